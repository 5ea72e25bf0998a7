"""A run's estimate beside what was measured.

    phases = phases_of(facts, model, generator_of)      # of the first layers of the run's own model
    report = beside(measured, phases, bandwidth)
    report.figures["token_seconds"].error       # (estimated − measured) ÷ measured
    report.reasons          # "a step runs at 71% of what memory allows for these bytes (…)", …

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
from quantbench.estimate.predict import Figure, Machine, Phase, Request, predict
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

SECONDS = 1.0  # of turns of the first layers
PHASES = ("prompt_seconds", "token_seconds")
Phases = tuple[Phase, Phase]  # a prompt and a step


@dataclass(frozen=True)
class Report:
    """A run, its estimate, and why it is as fast as it is."""

    measured: Measured
    reasons: list[str]  # sentences
    figures: dict[str, Estimated] = field(default_factory=dict)
    limit_share: float | None = None  # seconds that memory needs for a step's bytes ÷ measured
    why_not: str | None = None  # why nothing is estimated

    @property
    def table(self) -> str:
        """For the terminal: the run, and below it what was estimated."""
        tables = shown.table(self.measured), shown.estimates(self.figures)
        return "\n\n".join(filter(None, tables))

    @property
    def remarks(self) -> list[str]:
        return [*(f"- {reason}" for reason in self.reasons), *shown.remarks(self.measured)]

    def to_json(self) -> dict[str, object]:
        """What --output_json_path writes, but for the log line."""
        estimate = {**to_json(self.figures), "limit_share": self.limit_share}
        if self.why_not is not None:
            estimate = {"why_not": self.why_not}
        return {**to_json(self.measured), "estimate": estimate, "why": self.reasons}


def report_of(measured: Measured, model: Transformer, generator_of: GeneratorOf) -> Report:
    """The run with its estimate, for which the machine is measured now."""
    facts = measured.facts
    try:
        if reason := why_not(facts):
            raise QuantbenchError(reason)
        phases = phases_of(facts, model, generator_of)
        return beside(measured, phases, read_bandwidth(torch.device(facts.device.type)))
    except QuantbenchError as error:
        reasons = [*why.of_single_run(measured), f"no estimate: {error}"]
        return Report(measured, reasons, why_not=str(error))


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
    if on_cpu and (facts.compiled_step or facts.compiled_prefill):
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
    return None if phases is None else {n: p.seconds for n, p in zip(PHASES, phases, strict=True)}


def expected(facts: Facts, seconds: Mapping[str, float] | None) -> Expected:
    """The estimate of a run, before it; nothing for one that has none. seconds: what `seconds_of`
    gave in another process."""
    if why_not(facts) is not None:
        return Expected()
    phases: Phases | None = None
    if seconds is not None:
        prompt, token = (Phase({"layers": seconds[name]}, "", "", 0.0) for name in PHASES)
        phases = prompt, token
    try:
        figures = _estimate(facts, phases)
    except QuantbenchError as error:
        return Expected(no_estimate=str(error))
    return Expected({name: float(figure.value) for name, figure in figures.items()})


def beside(measured: Measured, phases: Phases | None, bandwidth: float) -> Report:
    """The run and its estimate, which was made of these phases. Raises QuantbenchError for one that
    has none."""
    facts, reasons = measured.facts, why.of_single_run(measured)
    steps = [1 / s.decode_tok_s for s in measured.samples if s.decode_tok_s]
    step = statistics.median(steps) if steps else None
    values = {
        "prompt_seconds": statistics.median(s.prefill_seconds for s in measured.samples),
        "token_seconds": step,
        "tokens_per_second": measured.summary.tok_s_all_rows,
        "peak_memory_bytes": float(next(iter(measured.peaks["generate"].values()))),
        "joules_per_token": measured.joules_per_token,
    }
    figures = {}
    for name, figure in _estimate(facts, phases).items():
        value, bound = values[name], figure.source == NO_COUNTER
        if value or bound:
            relative = figure.value / value - 1 if value else None
            ends = figure.low, figure.high
            figures[name] = Estimated(figure.value, value, relative, bound, figure.source, *ends)
    if step is None:
        return Report(measured, reasons, figures)
    read = facts.mean_step_bytes
    share = read / bandwidth / step
    return Report(measured, [*reasons, why.of_limit(share, read, bandwidth)], figures, share)


def _estimate(facts: Facts, phases: Phases | None) -> dict[str, Figure]:
    """The figures that have an estimate, by their keys in JSON. phases: of the CPU. Raises
    UsageError if they are missing."""
    request, name = _request(facts), facts.device.name
    if facts.device.type != "cpu":
        machine: Machine = card(name)
    elif phases is None:
        layers = facts.architecture.num_layers
        raise UsageError(
            f"its {layers} layers are too few, or too small for the processor's cache, to "
            "estimate them from the first ones"
        )
    else:
        power, cpu = energy.power_limit(), torch.device("cpu")
        machine = Here(name, "", cpu, power, None, measured={request: phases})
    estimate = vars(predict(request, machine))
    return {key: estimate[key] for key in shown.FIGURES if isinstance(estimate[key], Figure)}


def _request(facts: Facts) -> Request:
    more = {"chunk": facts.config.prefill_chunk, "cache_size": facts.cache_size}
    return Request.of(
        facts.config, facts.architecture, facts.scheme, facts.prompt_tokens,
        kv_cache=facts.kv_cache, tp=1, **more,
    )  # fmt: skip
