"""A run's estimate beside what was measured: where this machine is calibrated, after every run.

    estimate = beside(measured)
    estimate.to_json()          # {"prompt_seconds": {"estimated": …, "measured": …, "error": …}, …}
    estimate.sentences          # "a step runs at 71% of what this machine allows for these bytes …"

Machines drift, so there is a second estimate: at the speed of memory and of arithmetic that is read
just after the samples, instead of the calibration's.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from quantbench import devices
from quantbench.errors import QuantbenchError
from quantbench.estimate.calibration import Calibration, Speed
from quantbench.estimate.calibration_file import of_this_machine
from quantbench.estimate.predict import Calibrated, Estimate, Figure, Request, pass_of, predict
from quantbench.estimate.probe import speed_now
from quantbench.log import table
from quantbench.log.origin import versions
from quantbench.run import bandwidth, why
from quantbench.run.energy import NO_COUNTER
from quantbench.run.facts import Facts, Measured
from quantbench.run.why import Expected
from quantbench.typed_json import to_json

ROOM = 2 * bandwidth.BYTES  # free memory, without which the speed is not read
NOT_CALIBRATED = "not calibrated"
HOW_TO = "`quantbench calibrate` measures, in some minutes, what this machine allows"


@dataclass(frozen=True)
class Compared:
    """One figure, estimated before and measured after."""

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
class AtSpeed:
    """The figures that go with the machine's speed, estimated for the speed beside the run."""

    read: float  # bytes per second, of memory
    multiply: float  # floating-point operations per second, of a product
    figures: dict[str, Compared]

    def to_json(self) -> dict[str, object]:
        return {"read": self.read, "multiply": self.multiply, **to_json(self.figures)}


@dataclass(frozen=True)
class Beside:
    """The figures of a run that have an estimate; or why none has."""

    figures: dict[str, Compared] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    share_of_limit: float | None = None  # seconds that memory needs for a step's bytes ÷ measured
    why_not: str | None = None
    at_speed: AtSpeed | None = None  # None: the speed was not read

    def to_json(self) -> dict[str, object]:
        if self.why_not is not None:
            return {"why_not": self.why_not}
        second = {"at_speed": to_json(self.at_speed)} if self.at_speed else {}
        return {**to_json(self.figures), "share_of_limit": self.share_of_limit, **second}


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
        at_speed, figures = self.estimate.at_speed, self.estimate.figures
        second = None
        if at_speed is not None:
            token = _shown(at_speed.figures).get("token_seconds")
            second = table.AtSpeed(at_speed.read, token)
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
            estimate=table.Estimates(**_shown(figures), at_speed=second),
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
    """The run with its estimates, for which the machine's speed is read now."""
    estimator = Estimator.of(None, measured.facts.device.type)
    if isinstance(estimator, Estimator):
        estimate = estimator.beside(measured, estimator.reading(measured.facts))
    else:
        estimate = estimator
    return Report(measured, estimate, [*why.of_single_run(measured), *estimate.sentences])


def beside(
    measured: Measured, calibration: Calibration | None = None, now: Speed | None = None
) -> Beside:
    """The estimate of a run, from the calibration given, or from this machine's own; and a second
    one for the speed `now`, if that was read."""
    estimator = Estimator.of(calibration, measured.facts.device.type)
    return estimator.beside(measured, now) if isinstance(estimator, Estimator) else estimator


def expected(facts: Facts, calibration: Calibration | None = None) -> Expected:
    """What this machine's calibration, or another one, predicts of a run, before it."""
    estimator = Estimator.of(calibration, facts.device.type)
    if isinstance(estimator, Estimator):
        return estimator.expected(facts)
    return Expected(why_not=_damage(estimator))


def damaged(device_type: str) -> str | None:
    """Why this machine's calibration cannot be read, one line; None where it can, or is missing."""
    estimator = Estimator.of(None, device_type)
    return None if isinstance(estimator, Estimator) else _damage(estimator)


def _damage(none: Beside) -> str | None:
    return None if none.why_not == NOT_CALIBRATED else none.why_not


class Estimator:
    """Estimates runs by one calibration, whose curves are fitted once."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    @staticmethod
    def of(calibration: Calibration | None, device_type: str) -> "Estimator | Beside":
        """By the calibration given, or by this machine's own; where there is none, or it cannot be
        read, what every run has in place of an estimate."""
        try:
            chosen = calibration or of_this_machine(device_type)
        except QuantbenchError as error:
            return Beside(why_not=str(error), sentences=[str(error)])
        if chosen is None:
            return Beside(why_not=NOT_CALIBRATED, sentences=[HOW_TO])
        return Estimator(chosen)

    @cached_property
    def machine(self) -> Calibrated:
        return Calibrated(self.calibration)

    def expected(self, facts: Facts) -> Expected:
        """The estimate of a run, before it."""
        if (reason := self.why_not(facts)) is not None:
            return Expected(why_not=reason)
        try:
            request = _request(facts)
            estimate = predict(request, self.machine)
            limit = _limit(facts, self.machine, request)
        except QuantbenchError as error:
            return Expected(why_not=str(error))
        values = {name: getattr(estimate, name).value for name in NAMES}
        figures = {name: float(value) for name, value in values.items() if value is not None}
        return Expected(figures, limit)

    def reading(self, facts: Facts) -> Speed | None:
        """The machine's speed at this moment; None where no estimate needs it, and where reading
        it would take memory that is not free."""
        if facts.parallel is not None or self.why_not(facts) is not None:
            return None
        device = torch.device(str(self.calibration.device["type"]))
        free = devices.free_memory(device)
        if free is not None and free < ROOM:
            return None
        return speed_now(self.calibration, device)

    def beside(self, measured: Measured, now: Speed | None = None) -> Beside:
        """The estimates of a run beside what was measured."""
        reason = self.why_not(measured.facts)
        if reason is None:
            try:
                request = _request(measured.facts)
                estimate = predict(request, self.machine)
                second = None
                if now is not None:
                    at_now = Calibrated(self.calibration, now=now)
                    timed = _figures(measured, predict(request, at_now), TIMED)
                    second = AtSpeed(now.read, now.multiply, timed)
                return _compared(measured, self.machine, request, estimate, second)
            except QuantbenchError as error:
                reason = str(error)
        return Beside(why_not=reason, sentences=[f"no estimate: {reason}"])

    def why_not(self, facts: Facts) -> str | None:
        """Why the calibration says nothing of a run; None where it does."""
        calibration = self.calibration
        ranks = facts.parallel.ranks if facts.parallel else 1
        threads = facts.device.threads
        here = {"name": facts.device.name, "threads": ranks * threads if threads else None}
        if warnings := calibration.warnings(here, versions()):
            return warnings[0]
        if facts.parallel is not None:
            through = {point.through for point in calibration.exchanges}
            if facts.parallel.backend not in through:
                return f"what ranks exchange through {facts.parallel.backend} was not calibrated"
        if facts.config.compile_prefill:
            return "a calibration is of prompts that are not compiled"
        kernels = {point.kernel for point in calibration.products if point.scheme == facts.scheme}
        if facts.kernel not in kernels:
            return f"{facts.scheme} on kernel {facts.kernel} was not calibrated"
        decoders = {p.decoder for p in calibration.wholes if p.kv_cache == facts.kv_cache}
        if facts.decoder not in decoders:
            return f"decoder {facts.decoder} over a {facts.kv_cache} cache was not calibrated"
        return None


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
        tp=facts.parallel.ranks if facts.parallel else 1,
        chunk=config.prefill_chunk,
        cache_size=facts.cache_size,
    )


def _figures(measured: Measured, estimate: Estimate, names: Iterable[str]) -> dict[str, Compared]:
    """The estimate's figures of these names that were measured."""
    steps = [1 / s.decode_tok_s for s in measured.samples if s.decode_tok_s]
    values = {
        "prompt_seconds": statistics.median(s.prefill_seconds for s in measured.samples),
        "token_seconds": statistics.median(steps) if steps else None,
        "tokens_per_second": measured.summary.tok_s_all_rows,
        "peak_memory_bytes": float(next(iter(measured.peaks.generate.values()))),
    }
    figures = {}
    for name in names:
        if value := values[name]:
            figure: Figure = getattr(estimate, name)
            figures[name] = Compared(figure.value, value, figure.source, figure.low, figure.high)
    return figures


def _compared(
    measured: Measured,
    machine: Calibrated,
    request: Request,
    estimate: Estimate,
    at_speed: AtSpeed | None,
) -> Beside:
    figures = _figures(measured, estimate, (*TIMED, "peak_memory_bytes"))
    if isinstance(energy := estimate.joules_per_token, Figure):
        figures["joules_per_token"] = Compared(
            energy.value, measured.joules_per_token, energy.source,
            at_most=energy.source == NO_COUNTER,
        )  # fmt: skip
    sentences, share = [], None
    if "token_seconds" in figures:
        limit, token = _limit(measured.facts, machine, request), figures["token_seconds"]
        assert token.measured
        share = limit.share(token.measured)
        sentences.append(limit.sentence(token.measured, token.estimated))
    sentences.append(
        "estimated before, against measured: "
        + ", ".join(
            f"{NAMES[name]} {figure.error:+.0%}"
            for name, figure in figures.items()
            if figure.error is not None
        )
    )
    return Beside(figures, sentences, share, at_speed=at_speed)


TIMED = ("prompt_seconds", "token_seconds", "tokens_per_second")
NAMES = {
    "prompt_seconds": "the prompt's seconds",
    "token_seconds": "a token's",
    "tokens_per_second": "tok/s",
    "peak_memory_bytes": "peak memory",
    "joules_per_token": "joules per token",
}


def _limit(facts: Facts, machine: Calibrated, request: Request) -> why.Limit:
    """What memory allows of a step in the middle of the new tokens."""
    middle = request.depth + request.prompt + request.new_tokens // 2
    attention = pass_of(request, machine, 1, middle).of_kind("attention")
    read = facts.step_weight_bytes + request.tp * sum(work.bytes_read for work in attention)
    return why.Limit(read, machine.calibration.speed.read)
