"""The quality of one arm of a session, whose baseline lies in another process.

full = scored(plan, model, keep="hidden")                               # the baseline's
found = scored(plan, model, reference="hidden")                         # an arm's
full = scored(plan, model, keep="hidden", looks=found.answer.looks)     # it reads on,
found = scored(plan, model, reference="hidden", before=found)           # and so does the arm
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantbench import files
from quantbench.errors import KernelError, UsageError
from quantbench.log.config import RunConfig
from quantbench.models.llama import Transformer
from quantbench.quality import decode_check
from quantbench.quality.layer_sqnr import sqnr_of_layers
from quantbench.quality.reference import Reference, model_of, read_on
from quantbench.quality.scores import Scores, score, summary
from quantbench.quality.texts import Texts, calibrated_on
from quantbench.quality.thresholds import MAX_KL, TOKENS
from quantbench.quality.types import DecodeCheck, LayerSqnr, NoQuality, QualityAnswer
from quantbench.run.checks import EXPERTS
from quantbench.run.plan import Plan, begin, make_plan

EMBEDDED_MODEL = "tiny"  # takes the place of random weights, which predict nothing
READ_AGAIN = 1.5e9  # parameters at most: a checkpoint of 3 GB
# Options of a run that concern its speed alone or the work it does, not what it predicts.
OF_THE_RUN = (
    *("num_layers", "prompt", "prefill_size", "context_depth", "cache_size", "batch_size"),
    *("max_new_tokens", "save", "format", "expert_memory", *EXPERTS),
)


@dataclass(frozen=True)
class Scored:
    """An answer, and what goes on from it."""

    answer: QualityAnswer
    scores: Scores | None = None
    decoding: DecodeCheck | None = None
    layers: list[LayerSqnr] | None = None


@torch.no_grad()
def scored(
    plan: Plan,
    model: Transformer,
    tokens: int = TOKENS,
    text: str | None = None,
    reference: str | None = None,
    keep: str | None = None,
    max_kl: float = MAX_KL,
    looks: int = 1,
    before: Scored | None = None,
) -> Scored:
    """An arm's quality, without intervals.

    With `keep`, a path, it is the baseline, which reads `looks` looks of at most `tokens` tokens (0
    for all) and keeps its hidden states there, behind those of earlier looks. With `reference`,
    such a path, it reads as many of these looks as it takes until its KL is clear of `max_kl`;
    `before` has the first of them. A model of random weights is replaced by the embedded one in the
    same scheme.
    """
    stand_in = None
    if plan.config.checkpoint_path.startswith("dummy:"):
        try:
            plan, model = embedded(plan)
        except (UsageError, KernelError) as error:
            why = f"random weights, and not on the model {EMBEDDED_MODEL}: {error}"
            return Scored(QualityAnswer(NoQuality(why)))
        stand_in = EMBEDDED_MODEL
    if judge := calibrated_on(plan, text):
        return Scored(QualityAnswer(NoQuality(f"it was calibrated on {judge}, which judges it")))
    if reference:
        full = Reference.read(reference)
        if full.about.vocab_size != plan.architecture.vocab_size:
            return Scored(QualityAnswer(NoQuality("the baseline has another tokenizer")))
    else:
        earlier = Reference.read(keep) if keep and Path(keep).exists() else None
        full = read_on(plan, model, Texts(plan, text, tokens), looks, earlier)
        if keep and plan.ranks.rank == 0:
            files.replace("hidden states", keep, full.write)
    scores = score(plan, model, full, max_kl, before.scores if before else None, own=not reference)
    if not math.isfinite(scores["nats"].mean()):
        return Scored(QualityAnswer(NoQuality("its predictions are not numbers")))
    ids = full.passages[0].ids
    decoding = before.decoding if before else decode_check.check(plan, model, ids)
    layers = before.layers if before else _layers(plan, model, ids)
    quality = dataclasses.replace(summary(scores), model=stand_in, decoding=decoding, layers=layers)
    enough = not reference or full.about.whole or quality.settled(max_kl)
    answer = QualityAnswer(quality, None if enough else full.about.looks + 1)
    return Scored(answer, scores, decoding, layers)


def _layers(plan: Plan, model: Transformer, ids: list[int]) -> list[LayerSqnr] | None:
    """Each layer against full precision, where that is there and can be read again in seconds;
    none of a rank, which has only parts of layers."""
    exact = str(plan.spec) == "none" or plan.checkpoint.saved
    if plan.split is not None or exact or plan.architecture.parameters() > READ_AGAIN:
        return None
    return sqnr_of_layers(plan, model, plan.config.checkpoint_path, ids)


def embedded(plan: Plan) -> tuple[Plan, Transformer]:
    """The plan and model of the same scheme, kernel and cache on the embedded model.

    Raises UsageError or KernelError where it cannot take them.
    """
    if plan.spec.scheme is None:
        raise UsageError(f"{plan.spec} chooses by a model's own layers")
    fields = RunConfig.__dataclass_fields__
    changes: dict[str, Any] = {name: fields[name].default for name in OF_THE_RUN}
    changes |= {"checkpoint_path": EMBEDDED_MODEL, "compile": False, "compile_prefill": False}
    plan = begin(make_plan(dataclasses.replace(plan.config, **changes)))
    return plan, model_of(plan)
