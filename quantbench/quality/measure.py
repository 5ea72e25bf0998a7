"""The quality of a scheme: what `quantbench quality` measures, and that of a session's arm, whose
baseline lies in another process.

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
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from quantbench import files
from quantbench.errors import KernelError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.origin import git_commit, versions
from quantbench.models.formats import open_checkpoint
from quantbench.models.llama import Transformer
from quantbench.models.loading import load_model
from quantbench.progress import progress, say
from quantbench.quality import decode_check
from quantbench.quality.scores import Reference, Scores, model_of, read_on, score, summary
from quantbench.quality.tasks import Flips, Tasks, evaluate, flips
from quantbench.quality.texts import ALL_LOOKS, Texts, calibrated_on
from quantbench.quality.thresholds import MAX_KL, MOST_TOKENS, TOKENS, looks_needed
from quantbench.quality.types import LayerSqnr, NoQuality, Quality, QualityAnswer
from quantbench.quantize.observe import decibels
from quantbench.run.checks import EXPERTS
from quantbench.run.loading import Loaded, load
from quantbench.run.plan import Plan, begin, make_plan

FLOOR_STEPS = 64
EMBEDDED_MODEL = "tiny"  # takes the place of random weights, which predict nothing
READ_AGAIN = 1.5e9  # parameters at most: a checkpoint of 3 GB
# Options of a run that concern its speed alone or the work it does, not what it predicts.
OF_THE_RUN = (
    *("num_layers", "prompt", "prefill_size", "context_depth", "cache_size", "batch_size"),
    *("max_new_tokens", "save", "format", "compile", "compile_prefill", "expert_memory", *EXPERTS),
)
COLUMNS = 128  # sampled per weight; the error does not vary by column
OF_LAYERS = 64  # tokens that each layer is compared on


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
    for note in plan.notes:
        say(note)
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
    decoding = decode_check.check(plan, model, ids, FLOOR_STEPS)
    quality = dataclasses.replace(quality, decoding=decoding)
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


# ---------------------------------------------------------------------------------- an arm


@dataclass(frozen=True)
class Scored:
    """An answer, and what goes on from it."""

    answer: QualityAnswer
    scores: Scores | None = None


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
    ids, found = full.passages[0].ids, before.answer.quality if before else None
    if isinstance(found, Quality):
        decoding, layers = found.decoding, found.layers
    else:
        decoding, layers = decode_check.check(plan, model, ids), _layers(plan, model, ids)
    quality = dataclasses.replace(summary(scores), model=stand_in, decoding=decoding, layers=layers)
    enough = not reference or full.about.whole or quality.settled(max_kl)
    return Scored(QualityAnswer(quality, None if enough else full.about.looks + 1), scores)


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
    config = dataclasses.replace(plan.config.without(OF_THE_RUN), checkpoint_path=EMBEDDED_MODEL)
    plan = begin(make_plan(config))
    return plan, model_of(plan)


# ------------------------------------------------------------------------------- its layers


@torch.no_grad()
def sqnr_of_layers(plan: Plan, model: Transformer, full: str, ids: list[int]) -> list[LayerSqnr]:
    """Every linear layer of the model, in order, against the checkpoint `full`, on the text `ids`:
    SQNR of its weights and outputs.

    The checkpoint is read once more in full precision, layer by layer, and each layer is compared
    with the quantized one's inputs: the two models are never in memory together.
    Experts in two tiers of memory are left out: their weights are not in the model's modules.
    None of AWQ's layers can be compared: they take scaled inputs, and change layers before them."""
    if any(spec.way == "awq" for spec in plan.spec.candidates):
        return []
    inputs: dict[str, Tensor] = {}  # (1, n, K), by the layer's name
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if module in names and given:
            inputs[names[module]] = given[0]

    hook = register_module_forward_pre_hook(keep)
    try:
        model(torch.tensor([ids[:OF_LAYERS]], device=plan.device))
    finally:
        hook.remove()
    layers: list[LayerSqnr] = []

    def compare(name: str, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear) and name in inputs:
            x, quantized = inputs.pop(name).flatten(0, -2), model.get_submodule(name)
            given = (_columns(module.weight), x)
            layers.append(LayerSqnr(name, *(_sqnr(module, quantized, rows) for rows in given)))
        return nn.Identity()  # this model is never run: free its weights

    precision = getattr(torch, plan.config.precision)
    load_model(full, plan.device, precision, plan.config.num_layers, compare)
    return layers


def _sqnr(module: nn.Module, quantized: nn.Module, x: Tensor) -> float | None:
    """A layer's output without its bias, which is not quantized and would count as signal."""
    weight: Any = module.weight
    bias = 0 if module.bias is None else module.bias
    sqnr = decibels(nn.functional.linear(x, weight), quantized(x) - bias)
    return None if math.isinf(sqnr) else sqnr


def _columns(weight: Any) -> Tensor:
    """Inputs (n, K) that select n evenly spread columns of a weight (N, K): each has a single 1,
    which activations rounded to 8 bits hold exactly."""
    count = weight.shape[1]
    chosen = torch.linspace(0, count - 1, min(COLUMNS, count)).long()
    return nn.functional.one_hot(chosen, count).to(weight.device, weight.dtype)
