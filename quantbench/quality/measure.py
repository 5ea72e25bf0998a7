"""What `quantbench quality` measures; in a separate file because it needs torch."""

import dataclasses
from dataclasses import dataclass

import torch

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.log.origin import git_commit, versions
from quantbench.models.formats import open_checkpoint
from quantbench.progress import say
from quantbench.quality import decode_check, harness
from quantbench.quality.layer_sqnr import sqnr_of_layers
from quantbench.quality.reference_cache import OTHER_DTYPE, loaded, phase, reference
from quantbench.quality.scores import of_reference, score, summary
from quantbench.quality.tasks import Tasks
from quantbench.quality.thresholds import MOST_TOKENS, looks_needed
from quantbench.quality.types import LayerSqnr, Quality
from quantbench.run.plan import begin, make_plan

DECODED, STEPS = 129, 64  # one window of 129 tokens is read both ways, its last 64 by steps
FIRST_LOOKS, ALL_LOOKS = 3, 64  # of full precision: reading on takes two models' loading


@dataclass(frozen=True)
class QualityReport:
    """A scheme's quality against full precision."""

    config: RunConfig
    model: str
    scheme: str  # with the kind of KV cache, where that is not dense
    kernel: str
    text: str | None  # None: the embedded ones
    max_kl: float  # the limit that the KL was compared with
    settled: bool  # whether it is on one side of it beyond doubt
    quality: Quality
    full_precision: Quality  # the baseline's own
    noise_floor: Quality  # of full precision in other_dtype, on the first tokens
    other_dtype: str
    layers: list[LayerSqnr]
    tasks: dict[str, dict[str, float]]  # by task, metrics as lm-evaluation-harness names them
    versions: dict[str, str | None]
    git_commit: str | None


@torch.no_grad()
def measure(
    config: RunConfig,
    text: str | None,
    tokens: int | None,
    max_kl: float,
    tasks: Tasks | None,
    limit: int | None,
) -> QualityReport:
    """tokens: to predict, 0 for all; None: as many as it takes until the KL is clear of max_kl.
    tasks: of lm-evaluation-harness, with at most `limit` documents each.

    Raises UsageError for a checkpoint that is quantized already.
    """
    if open_checkpoint(config.checkpoint_path).saved:
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path} was saved quantized; quality is measured "
            "against full precision: give that checkpoint, and --quantization"
        )
    plan = begin(make_plan(config))
    most, looks = (MOST_TOKENS, FIRST_LOOKS) if tokens is None else (tokens, ALL_LOOKS)
    scores = None
    while True:
        full = reference(plan.config, text, most, looks)
        loading = loaded(plan)
        done = scores.passages[-1].number + 1 if scores else 0
        with phase(f"{plan.spec}: reading") as report:
            until = max_kl if tokens is None else None
            scores = score(
                plan, loading.model, full.read[done:], full, until, report=report, before=scores
            )
        quality = summary(scores).with_interval()
        if tokens is not None or quality.settled(max_kl) or full.whole:
            break
        del loading  # full precision reads more: the two are never in memory together
        kl = scores.mean_kl()
        needed = looks_needed(kl.mean, kl.standard_error, max_kl, full.looks)
        looks = max(needed, full.looks + 2)
    model, ids = loading.model, torch.tensor(full.read[0].ids, device=plan.device)
    quality = dataclasses.replace(
        quality, decoding=decode_check.check(plan, model, ids[:DECODED], STEPS)
    )
    with phase("Each layer against the same layer in full precision"):
        layers = sqnr_of_layers(plan, model, plan.config.checkpoint_path, ids)
    floor, scheme = full.about.noise_floor, str(plan.spec)
    assert floor is not None
    return QualityReport(
        config=plan.config,
        model=plan.name,
        scheme=scheme if plan.kv_cache == "dense" else f"{scheme}, {plan.kv_cache} KV cache",
        kernel=loading.kernels,
        text=text,
        max_kl=max_kl,
        settled=quality.settled(max_kl),
        quality=quality,
        full_precision=of_reference(scores).with_interval(),
        noise_floor=floor.with_interval(),
        other_dtype=OTHER_DTYPE[plan.config.precision],
        layers=layers,
        tasks=harness.evaluate(plan, model, tasks, limit, say) if tasks else {},
        versions=versions(),
        git_commit=git_commit(),
    )
