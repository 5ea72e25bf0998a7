"""A run's estimate beside what was measured.

    phases = phases_of(facts, model, generator_of)      # of the first layers of the run's own model
    estimate = beside(measured, phases, bandwidth)
    to_json(estimate)       # {"prompt_seconds": {"estimated": …, "measured": …, "error": …}, …}
    estimate.sentences      # "a step runs at 71% of what memory allows for these bytes (…)"

On a card with a data sheet the estimate is by that. Memory's speed is read once, in 0.2 s.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from quantbench import devices
from quantbench.errors import MemoryShortage, QuantbenchError, UsageError
from quantbench.estimate.cards import card
from quantbench.estimate.datasheets import known
from quantbench.estimate.here import GeneratorOf, Here, of_model
from quantbench.estimate.predict import Estimate, Figure, Phase, Request, pass_of, predict
from quantbench.log.config import RunConfig
from quantbench.log.record import NO_COUNTER
from quantbench.models.llama import Transformer
from quantbench.quantize.spec import RECIPE, AsIs
from quantbench.run import energy, shown, why
from quantbench.run.bandwidth import BYTES, Bandwidth
from quantbench.run.facts import Facts, Measured
from quantbench.run.shown import Estimated
from quantbench.run.why import Expected
from quantbench.text import size
from quantbench.typed_json import to_json

NAMES = tuple(shown.FIGURES)
SECONDS = 1.0  # of turns of the first layers
Phases = tuple[Phase, Phase]  # a prompt and a step


@dataclass(frozen=True)
class Beside:
    """The figures of a run that have an estimate; or why none has."""

    figures: dict[str, Estimated] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    share_of_limit: float | None = None  # seconds that memory needs for a step's bytes ÷ measured
    why_not: str | None = None

    def to_json(self) -> dict[str, object]:
        if self.why_not is not None:
            return {"why_not": self.why_not}
        return {**to_json(self.figures), "share_of_limit": self.share_of_limit}


@dataclass(frozen=True)
class Report:
    """A run, its estimate, and why it is as fast as it is."""

    measured: Measured
    estimate: Beside
    reasons: list[str]  # sentences

    @property
    def table(self) -> str:
        """For the terminal: the run, and below it what was estimated."""
        tables = shown.table(self.measured), shown.estimates(self.estimate.figures)
        return "\n\n".join(filter(None, tables))

    @property
    def remarks(self) -> list[str]:
        return [*(f"- {reason}" for reason in self.reasons), *shown.remarks(self.measured)]

    def to_json(self) -> dict[str, object]:
        """What --output_json_path writes, but for the log line."""
        estimate = to_json(self.estimate)
        return {**to_json(self.measured), "estimate": estimate, "why": self.reasons}


def report_of(measured: Measured, model: Transformer, generator_of: GeneratorOf) -> Report:
    """The run with its estimate, for which the machine is measured now."""
    facts = measured.facts
    try:
        if reason := why_not(facts):
            raise QuantbenchError(reason)
        phases = phases_of(facts, model, generator_of)
        estimate = beside(measured, phases, read_bandwidth(torch.device(facts.device.type)))
    except QuantbenchError as error:
        estimate = Beside(why_not=str(error), sentences=[f"no estimate: {error}"])
    return Report(measured, estimate, [*why.of_single_run(measured), *estimate.sentences])


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of memory. Raises MemoryShortage where the block read would not fit."""
    free = devices.free_memory(device)
    if free is not None and free < 2 * BYTES:
        raise MemoryShortage(
            f"reading the memory's speed takes {size(BYTES)}, and {size(free)} are free"
        )
    return Bandwidth(device).measure()


def why_not(facts: Facts) -> str | None:
    """Why a run has no estimate; None where it has one."""
    config = facts.config
    if facts.parallel is not None:
        return "ranks share this machine, and no rank has a few layers alone"
    if config.quantization == str(AsIs()) or RECIPE.fullmatch(config.quantization):
        return "each layer has its own scheme, and its first layers do not tell the others' speed"
    if facts.experts is not None:
        return "experts lie in two tiers, and how often they are copied is not estimated"
    if config.speculate != RunConfig.speculate:
        return "acceptance of drafted tokens depends on the text"
    on_cpu = facts.device.type == "cpu"
    compiled = config.compile_prefill or (config.compile and facts.decoder != "cpu-step")
    if on_cpu and compiled:
        return "a few of its layers would have to be compiled, too"
    if not on_cpu and known(facts.device.name) is None:
        return f"there is no data sheet of {facts.device.name}"
    cache = devices.last_level_cache(torch.device(facts.device.type))
    read = facts.step_weight_bytes or facts.weight_bytes
    if cache is not None and read < cache:
        return (
            f"a step's weights, {size(read)}, fit into the last-level cache of {size(cache)}, so "
            "that the speed of memory does not set its own"
        )
    return None


def phases_of(facts: Facts, model: Transformer, generator_of: GeneratorOf) -> Phases | None:
    """A prompt and a step on the CPU, estimated from the first layers of the run's own model; None
    on a card, whose data sheet is taken, and where there is no estimate."""
    if facts.device.type != "cpu" or why_not(facts) is not None:
        return None
    return of_model(_request(facts), model, generator_of, SECONDS)


def seconds_of(phases: Phases | None) -> dict[str, float] | None:
    """Phases as a worker sends them to another process."""
    return None if phases is None else dict(zip(NAMES, (p.seconds for p in phases), strict=False))


def expected(facts: Facts, seconds: Mapping[str, float] | None, bandwidth: float) -> Expected:
    """The estimate of a run, before it, and its limit; nothing for one that has none. seconds: what
    `seconds_of` gave in another process."""
    if why_not(facts) is not None:
        return Expected()
    phases: Phases | None = None
    if seconds is not None:
        prompt, token = (Phase({"layers": seconds[name]}, "", "", 0.0) for name in NAMES[:2])
        phases = prompt, token
    try:
        estimate = _estimate(facts, phases)
    except QuantbenchError as error:
        return Expected(why_not=str(error))
    values = {name: getattr(estimate, name).value for name in NAMES}
    figures = {name: float(value) for name, value in values.items() if value is not None}
    return Expected(figures, _limit(facts, bandwidth))


def beside(measured: Measured, phases: Phases | None, bandwidth: float) -> Beside:
    """The estimate of a run, compared with what was measured. Raises QuantbenchError for one that
    has none."""
    facts = measured.facts
    estimate = _estimate(facts, phases)
    steps = [1 / s.decode_tok_s for s in measured.samples if s.decode_tok_s]
    values = {
        "prompt_seconds": statistics.median(s.prefill_seconds for s in measured.samples),
        "token_seconds": statistics.median(steps) if steps else None,
        "tokens_per_second": measured.summary.tok_s_all_rows,
        "peak_memory_bytes": float(next(iter(measured.peaks["generate"].values()))),
        "joules_per_token": measured.joules_per_token,
    }
    figures = {}
    for name, value in values.items():
        figure = getattr(estimate, name)
        bound = figure.source == NO_COUNTER
        if isinstance(figure, Figure) and (value or bound):
            relative = figure.value / value - 1 if value else None
            ends = figure.low, figure.high
            figures[name] = Estimated(figure.value, value, relative, bound, figure.source, *ends)
    step = values["token_seconds"]
    if step is None:
        return Beside(figures)
    limit = _limit(facts, bandwidth)
    return Beside(figures, [limit.sentence(step)], limit.share(step))


def _estimate(facts: Facts, phases: Phases | None) -> Estimate:
    """phases: of the CPU. Raises UsageError if they are missing."""
    request, name = _request(facts), facts.device.name
    if facts.device.type != "cpu":
        return predict(request, card(name))
    if phases is None:
        layers = facts.architecture.num_layers
        raise UsageError(
            f"its {layers} layers are too few, or too small for the processor's cache, to "
            "estimate them from the first ones"
        )
    device, power = torch.device("cpu"), energy.power_limit()
    return predict(request, Here(name, "", device, power, None, measured={request: phases}))


def _request(facts: Facts) -> Request:
    more = {"chunk": facts.config.prefill_chunk, "cache_size": facts.cache_size}
    return Request.of(
        facts.config, facts.architecture, facts.scheme, facts.prompt_tokens,
        kv_cache=facts.kv_cache, tp=1, **more,
    )  # fmt: skip


def _limit(facts: Facts, bandwidth: float) -> why.Limit:
    """What memory allows of a step in the middle of the new tokens."""
    request = _request(facts)
    middle = request.depth + request.prompt + request.new_tokens // 2
    step = pass_of(request, torch.device(facts.device.type), 1, middle)
    read = facts.step_weight_bytes + step.total("bytes_read", "attention")
    return why.Limit(read, bandwidth)
