"""What `quantbench quality` measures: a scheme against full precision, and where it errs."""

import math
from dataclasses import dataclass, replace

import torch

from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.origin import git_commit, versions
from quantbench.models.formats import open_checkpoint
from quantbench.progress import progress, say
from quantbench.quality import decode_check
from quantbench.quality.answers import AnswerLengths, answers, compared
from quantbench.quality.judge import Held, Judge, full_precision
from quantbench.quality.layers import sqnr_of_layers
from quantbench.quality.scores import Scores, summary
from quantbench.quality.tasks import Flips, Tasks, evaluate, flips
from quantbench.quality.texts import calibrated_on
from quantbench.quality.thresholds import MOST_TOKENS
from quantbench.quality.types import LayerSqnr, Quality
from quantbench.run.plan import begin, make_plan


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
    answers: AnswerLengths | None  # None: not measured
    versions: dict[str, str | None]
    git_commit: str | None


FLOOR_STEPS = 64


@torch.no_grad()
def measure(
    config: RunConfig,
    text: str | None,
    tokens: int | None,
    max_kl: float,
    tasks: Tasks | None,
    limit: int | None,
    with_answers: bool = False,
) -> QualityReport:
    """tokens: to predict, 0 for all; None: as many as it takes until the KL is clear of max_kl.
    tasks: of lm-evaluation-harness, with at most `limit` documents each. with_answers: whether
    lengths of answers are measured, too.

    Raises UsageError for a checkpoint that is quantized already.
    """
    if open_checkpoint(config.checkpoint_path).in_full_precision() is None:
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path} was saved quantized; quality is measured "
            "against full precision: give that checkpoint, and --quantization"
        )
    plan = begin(make_plan(config))
    if judged_by := calibrated_on(plan, text):
        raise UsageError(
            f"--quantization {plan.spec} is calibrated on {judged_by}, which judges its quality; "
            "give another --calibration_text"
        )
    most = MOST_TOKENS if tokens is None else tokens
    judge, arm = Judge(Held(full_precision(plan.config)), text, most), Held(plan)
    scores = judge.scores(arm, max_kl if tokens is None else None)
    for note in plan.notes:
        say(note)
    if not math.isfinite(scores["nats"].mean()):
        raise QuantbenchError(f"--quantization {plan.spec}: its predictions are not numbers")
    assert judge.full and judge.noise
    floor, ids = judge.noise, judge.full.passages[0].ids
    decoding = decode_check.check(plan, arm.model, judge.full, floor.kl, FLOOR_STEPS)
    quality = replace(summary(scores), noise=floor.kl, decoding=decoding).with_interval()
    with progress("Each layer against the same layer in full precision"):
        layers = sqnr_of_layers(plan, arm.model, ids)
    kernel = arm.loaded.kernels
    result = of_full = lengths = None
    if with_answers:
        exact = judge.exact
        lengths = compared(answers(plan, arm.model), answers(exact.plan, exact.model))
    if tasks:
        result = evaluate(plan, arm.model, tasks, limit)
        arm.free()
        of_full = evaluate(judge.exact.plan, judge.exact.model, tasks, limit)
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
        answers=lengths,
        versions=versions(),
        git_commit=git_commit(),
    )
