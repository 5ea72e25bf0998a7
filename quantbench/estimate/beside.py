"""A run's estimate beside what was measured, after every run whose speed memory can set.

    estimate = beside(measured)
    to_json(estimate)       # {"prompt_seconds": {"estimated": …, "measured": …, "error": …}, …}
    estimate.sentences      # "a step runs at 71% of what memory allows for these bytes (…)"

Memory and a product are read once, just after the samples or before ab's first: about a second.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from quantbench import devices
from quantbench.errors import QuantbenchError
from quantbench.estimate.machines import Speed, here, read_speed
from quantbench.estimate.predict import Estimate, Figure, Machine, Request, pass_of, predict
from quantbench.log import table
from quantbench.run import why
from quantbench.run.energy import NO_COUNTER
from quantbench.run.facts import Facts, Measured
from quantbench.run.why import Expected
from quantbench.text import size
from quantbench.typed_json import to_json

NAMES = {
    "prompt_seconds": "the prompt's seconds",
    "token_seconds": "a token's",
    "tokens_per_second": "tok/s",
    "peak_memory_bytes": "peak memory",
    "joules_per_token": "joules per token",
}


@dataclass(frozen=True)
class Compared:
    """One figure, estimated and measured."""

    estimated: float
    measured: float | None  # None: nothing here measures it
    source: str
    low: float | None = None
    high: float | None = None
    at_most: bool = False  # whether the estimate is an upper bound

    @property
    def error(self) -> float | None:
        """(estimated − measured) ÷ measured."""
        return self.estimated / self.measured - 1 if self.measured else None

    def to_json(self) -> dict[str, object]:
        return {**vars(self), "error": self.error}


@dataclass(frozen=True)
class Beside:
    """The figures of a run that have an estimate; or why none has."""

    figures: dict[str, Compared] = field(default_factory=dict)
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
    def row(self) -> table.Run:
        """What the terminal's table shows of the run."""
        facts, summary, trust = self.measured.facts, self.measured.summary, self.measured.trust
        figures = self.estimate.figures
        return table.Run(
            scheme=facts.scheme,
            kernel=facts.kernel,
            tok_s=summary.tok_s,
            prefill_tok_s=summary.prefill_tok_s,
            decode_tok_s=summary.decode_tok_s,
            weight_bytes_per_s=summary.weight_bytes_per_s,
            weight_bytes=facts.weight_bytes,
            peak_memory_bytes=table.Peaks(self.measured.peaks.generate),
            decoder=facts.decoder,
            samples=[table.Speed(sample.tok_s) for sample in self.measured.samples],
            trustworthy=trust.trustworthy,
            why_not_trustworthy=trust.why_not_trustworthy,
            estimate=table.Estimates(**_shown(figures)),
        )

    def to_json(self) -> dict[str, object]:
        """What --output_json_path writes, but for the log line."""
        estimate = to_json(self.estimate)
        return {**to_json(self.measured), "estimate": estimate, "why": self.reasons}


def _shown(figures: Mapping[str, Compared]) -> dict[str, table.Estimated]:
    return {
        name: table.Estimated(figure.estimated, figure.measured, figure.error, figure.at_most)
        for name, figure in figures.items()
    }


def report_of(measured: Measured) -> Report:
    """The run with its estimate, for which the machine's speed is read now."""
    estimate = beside(measured)
    return Report(measured, estimate, [*why.of_single_run(measured), *estimate.sentences])


def why_not(facts: Facts) -> str | None:
    """Why memory's speed says nothing of a run; None where it does."""
    if facts.parallel is not None:
        return "ranks share this machine, and its speed is not read meanwhile"
    if facts.experts is not None:
        return "experts lie in two tiers, and how often they are copied is not estimated"
    cache = devices.last_level_cache(torch.device(facts.device.type))
    read = facts.step_weight_bytes or facts.weight_bytes
    if cache is not None and read < cache:
        return (
            f"a step's weights, {size(read)}, fit into the last-level cache of {size(cache)}, so "
            "that the speed of memory does not set its own"
        )
    return None


def beside(measured: Measured, speed: Speed | None = None) -> Beside:
    """The estimate of a run. speed: of this machine; read now if it is not given."""
    reason = why_not(measured.facts)
    if reason is None:
        try:
            return _compared(measured, _machine(measured.facts, speed))
        except QuantbenchError as error:
            reason = str(error)
    return Beside(why_not=reason, sentences=[f"no estimate: {reason}"])


def expected(facts: Facts, speed: Callable[[], Speed] | None = None) -> Expected:
    """The estimate of a run, before it; nothing for one that memory's speed says nothing of.
    speed: gives that of this machine, if an estimate needs it; it is read anew if not given."""
    if why_not(facts) is not None:
        return Expected()
    try:
        machine = _machine(facts, speed() if speed else None)
        request = _request(facts)
        estimate, limit = predict(request, machine), _limit(facts, machine, request)
    except QuantbenchError as error:
        return Expected(why_not=str(error))
    values = {name: getattr(estimate, name).value for name in NAMES}
    figures = {name: float(value) for name, value in values.items() if value is not None}
    return Expected(figures, limit)


def _machine(facts: Facts, speed: Speed | None) -> Machine:
    device = torch.device(facts.device.type)
    precision: torch.dtype = getattr(torch, facts.config.precision)
    return here(device, precision, speed or read_speed(device, precision))


def _request(facts: Facts) -> Request:
    config = facts.config
    return Request(
        facts.architecture,
        facts.scheme,
        facts.kv_cache,
        config.batch_size,
        facts.prompt_tokens,
        config.max_new_tokens,
        depth=config.context_depth,
        precision=config.precision,
        chunk=config.prefill_chunk,
        cache_size=facts.cache_size,
    )


def _compared(measured: Measured, machine: Machine) -> Beside:
    request = _request(measured.facts)
    estimate: Estimate = predict(request, machine)
    steps = [1 / s.decode_tok_s for s in measured.samples if s.decode_tok_s]
    values = {
        "prompt_seconds": statistics.median(s.prefill_seconds for s in measured.samples),
        "token_seconds": statistics.median(steps) if steps else None,
        "tokens_per_second": measured.summary.tok_s_all_rows,
        "peak_memory_bytes": float(next(iter(measured.peaks.generate.values()))),
        "joules_per_token": measured.joules_per_token,
    }
    figures = {}
    for name, value in values.items():
        figure = getattr(estimate, name)
        bound = figure.source == NO_COUNTER
        if isinstance(figure, Figure) and (value or bound):
            figures[name] = Compared(
                figure.value, value, figure.source, figure.low, figure.high, bound
            )
    sentences, share = [], None
    if step := values["token_seconds"]:
        limit = _limit(measured.facts, machine, request)
        share = limit.share(step)
        sentences.append(limit.sentence(step))
    errors = [
        f"{NAMES[name]} {figure.error:+.0%}"
        for name, figure in figures.items()
        if figure.error is not None and not figure.at_most
    ]
    sentences.append(f"estimated, against measured: {', '.join(errors)}")
    return Beside(figures, sentences, share)


def _limit(facts: Facts, machine: Machine, request: Request) -> why.Limit:
    """What memory allows of a step in the middle of the new tokens."""
    middle = request.depth + request.prompt + request.new_tokens // 2
    attention = pass_of(request, machine.device, 1, middle).of_kind("attention")
    read = facts.step_weight_bytes + sum(work.bytes_read for work in attention)
    return why.Limit(read, machine.bandwidth)
