"""What `quantbench quality` measures; in a separate file because it needs torch."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.origin import git_commit, versions
from quantbench.models.formats import open_checkpoint
from quantbench.progress import progress, say
from quantbench.quality import decode_check
from quantbench.quality.layer_sqnr import sqnr_of_layers
from quantbench.quality.reference import read_on
from quantbench.quality.scores import Scores, score, summary
from quantbench.quality.tasks import Flips, Tasks, evaluate, flips
from quantbench.quality.texts import ALL_LOOKS, Texts, calibrated_on
from quantbench.quality.thresholds import MOST_TOKENS, looks_needed
from quantbench.quality.types import LayerSqnr, Quality
from quantbench.run.loading import Loaded, load
from quantbench.run.plan import Plan, begin, make_plan

FLOOR_STEPS = 64


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
    noise_floor: Quality  # of full precision: decoding steps against prompts
    layers: list[LayerSqnr]
    tasks: dict[str, dict[str, float]]  # by task, metrics as lm-evaluation-harness names them
    tasks_of_full_precision: dict[str, dict[str, float]]
    flips: list[Flips]
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
    if open_checkpoint(config.checkpoint_path).in_full_precision() is None:
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path} was saved quantized; quality is measured "
            "against full precision: give that checkpoint, and --quantization"
        )
    plan = begin(make_plan(config))
    if judge := calibrated_on(plan, text):
        raise UsageError(
            f"--quantization {plan.spec} is calibrated on {judge}, which judges its quality; give "
            "another --calibration_text"
        )
    exact = full_precision(plan.config)
    until, most, looks = (max_kl, MOST_TOKENS, 1) if tokens is None else (None, tokens, ALL_LOOKS)
    texts, scores, full, floor = Texts(exact, text, most), None, None, None
    while True:  # the two models are never in memory together
        loading = loaded(exact)
        with progress("Full precision: reading", unit="tokens") as report:
            full = read_on(exact, loading.model, texts, looks, full, report)
        ids = full.passages[0].ids
        if floor is None:
            _, floor = decode_check.both_ways(exact, loading.model, ids, FLOOR_STEPS)
        del loading
        loading = loaded(plan)
        with progress(f"{plan.spec}: reading", unit="tokens") as report:
            scores = score(plan, loading.model, full, until, scores, report)
        if not math.isfinite(scores["nats"].mean()):
            raise QuantbenchError(f"--quantization {plan.spec}: its predictions are not numbers")
        quality = summary(scores).with_interval()
        if until is None or quality.settled(max_kl) or full.about.whole:
            break
        del loading  # full precision reads more
        kl = scores.mean_kl()
        needed = looks_needed(kl.mean, kl.standard_error, max_kl, full.about.looks)
        looks = max(needed, full.about.looks + 1)
    model, kernel = loading.model, loading.kernels
    quality = dataclasses.replace(
        quality, decoding=decode_check.check(plan, model, ids, FLOOR_STEPS)
    )
    with progress("Each layer against the same layer in full precision"):
        layers = sqnr_of_layers(plan, model, plan.config.checkpoint_path, ids)
    result = of_full = None
    if tasks:
        result = evaluate(plan, model, tasks, limit)
        del loading, model
        of_full = evaluate(exact, loaded(exact).model, tasks, limit)
    scheme = str(plan.spec)
    return QualityReport(
        config=plan.config,
        model=plan.name,
        scheme=scheme if plan.kv_cache == "dense" else f"{scheme}, {plan.kv_cache} KV cache",
        kernel=kernel,
        text=text,
        max_kl=max_kl,
        settled=quality.settled(max_kl),
        quality=quality,
        full_precision=summary(Scores(scores.passages, {"nats": scores["reference_nats"]})),
        noise_floor=floor.with_interval(),
        layers=layers,
        tasks=result.figures if result else {},
        tasks_of_full_precision=of_full.figures if of_full else {},
        flips=flips(result, of_full) if result and of_full else [],
        versions=versions(),
        git_commit=git_commit(),
    )


def full_precision(config: RunConfig) -> Plan:
    """A plan for the config's model in full precision."""
    unquantized = {"quantization": "none", "kernel": "auto", "kv_cache": "dense"}
    full = dataclasses.replace(config, **unquantized, kv_cache_quantization=False)  # type: ignore
    return begin(make_plan(full))


def loaded(plan: Plan) -> Loaded:
    """The plan's model, with progress while it is loaded."""
    with progress(f"Loading {plan.name} as {plan.spec} in {plan.config.precision}") as report:
        return load(plan, report, say)
