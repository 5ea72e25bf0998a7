"""What `quantbench quality` measures; in a separate file because it needs torch."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantbench.compare.fidelity import decode_check, harness
from quantbench.compare.fidelity.layer_sqnr import sqnr_of_layers
from quantbench.compare.fidelity.reference_logits import reference
from quantbench.compare.fidelity.scores import score, summary, through_cache, token_ids, window
from quantbench.compare.fidelity.tasks import Tasks
from quantbench.compare.sampling.answers import LayerSqnr, Quality
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.log.origin import git_commit, versions
from quantbench.models.formats import open_checkpoint
from quantbench.run.loading import load
from quantbench.run.plan import begin, make_plan

DECODED, STEPS = 129, 64  # one window of 129 tokens is read both ways, its last 64 by steps
Say = Callable[[str], None]


@dataclass(frozen=True)
class QualityReport:
    """A scheme's quality against full precision."""

    config: RunConfig
    model: str
    scheme: str  # with the kind of KV cache, where that is not dense
    kernel: str
    window: int  # positions; windows advance by half of them
    text: str | None  # None: the embedded one
    quality: Quality
    full_precision: Quality  # the baseline's own
    noise_floor: Quality  # of full precision in other_dtype
    other_dtype: str
    layers: list[LayerSqnr]
    tasks: dict[str, dict[str, float]]  # by task, metrics as lm-evaluation-harness names them
    versions: dict[str, str | None]
    git_commit: str | None


@torch.no_grad()
def measure(
    config: RunConfig,
    text: str | None,
    tokens: int,
    tasks: Tasks | None,
    limit: int | None,
    say: Say,
) -> QualityReport:
    """tokens: of the text, 0 for all. tasks: of lm-evaluation-harness, with at most `limit`
    documents each. Raises UsageError for a checkpoint that is quantized already.
    """
    if open_checkpoint(config.checkpoint_path).saved:
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path} was saved quantized; quality is measured "
            "against full precision: give that checkpoint, and --quantization"
        )
    plan = begin(make_plan(config))
    ids = token_ids(plan, tokens, text)
    context = window(plan, tokens)
    ids = ids.to(plan.device)
    full = reference(plan.config, ids, context, say)
    say(f"{plan.spec} …")
    loaded = load(plan, lambda done, total: None, say)
    model = loaded.model
    scores = score(through_cache(plan, model, ids, context), full.open())
    count = len(plan.tokenizer.decode(ids.tolist()).encode())
    count -= len(plan.tokenizer.decode(ids[:1].tolist()).encode())  # it is not predicted

    def per_byte(mean_nats: float) -> float:
        return mean_nats * len(scores.nats) / math.log(2) / count

    decoding = decode_check.check(plan, model, ids[:DECODED], STEPS)
    say("Each layer against the same layer in full precision …")
    layers = sqnr_of_layers(plan, model, plan.config.checkpoint_path, ids)
    return QualityReport(
        config=plan.config,
        model=plan.name,
        scheme=_name(plan.config, str(plan.spec)),
        kernel=loaded.kernels,
        window=context,
        text=text,
        quality=dataclasses.replace(
            summary(scores),
            bits_per_byte=per_byte(scores.nats.mean().item()),
            window=context,
            decoding=decoding,
        ),
        full_precision=dataclasses.replace(
            full.quality, bits_per_byte=per_byte(math.log(full.quality.perplexity)), window=context
        ),
        noise_floor=full.noise_floor,
        other_dtype=full.other_dtype,
        layers=layers,
        tasks=harness.evaluate(plan, model, tasks, limit, say) if tasks else {},
        versions=versions(),
        git_commit=git_commit(),
    )


def _name(config: RunConfig, scheme: str) -> str:
    cache = "int8" if config.kv_cache_quantization else config.kv_cache
    return scheme if cache == "dense" else f"{scheme}, {cache} KV cache"
