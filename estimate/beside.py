"""A run's estimate beside what was measured: where this machine is calibrated, after every run.

found = beside(measured)
found.as_json()         # {"prompt_seconds": {"estimated": …, "measured": …, "error": …}, …}
found.sentences         # "a token takes 12.8 ms, estimated 12.3 ms (-4 %) …"
"""

import statistics
from dataclasses import dataclass, field
from functools import cached_property

from benchlog.origin import versions
from errors import QuantbenchError
from estimate.calibration import Calibration, of_this_machine
from estimate.predict import Calibrated, Estimate, Request, pass_of, predict
from run import why
from run.energy import NO_COUNTER
from run.facts import Facts, Measured

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


@dataclass(frozen=True)
class Beside:
    """The figures of a run that have an estimate; or why none has."""

    figures: dict[str, Compared] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    share_of_limit: float | None = None  # seconds that memory needs for a step's bytes ÷ measured
    why_not: str | None = None

    def as_json(self) -> dict[str, object]:
        if self.why_not is not None:
            return {"why_not": self.why_not}
        rows: dict[str, object] = {
            name: {**vars(figure), "error": figure.error} for name, figure in self.figures.items()
        }
        return rows | {"share_of_limit": self.share_of_limit}


def details_of(measured: Measured) -> tuple[dict[str, object], list[str]]:
    """The JSON object of a run, with its estimate and its reasons; and the reasons as sentences."""
    found = beside(measured)
    reasons = [*why.of_single_run(measured), *found.sentences]
    return {**measured.details(), "estimate": found.as_json(), "why": reasons}, reasons


def beside(measured: Measured, calibration: Calibration | None = None) -> Beside:
    """The estimate of a run, from the calibration given, or from this machine's own."""
    estimator = Estimator.of(calibration, measured.facts.device.type)
    if estimator is None:
        return Beside(why_not="not calibrated", sentences=[HOW_TO])
    return estimator.beside(measured)


def expected(facts: Facts, calibration: Calibration | None = None) -> dict[str, float] | None:
    """What this machine's calibration predicts of a run, before it; None where it cannot."""
    estimator = Estimator.of(calibration, facts.device.type)
    return estimator.expected(facts) if estimator else None


class Estimator:
    """Estimates runs by one calibration, whose curves are fitted once."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration

    @staticmethod
    def of(calibration: Calibration | None, device_type: str) -> "Estimator | None":
        """By the calibration given, or by this machine's own; None where there is none."""
        found = calibration or of_this_machine(device_type)
        return Estimator(found) if found else None

    @cached_property
    def machine(self) -> Calibrated:
        return Calibrated(self.calibration)

    def expected(self, facts: Facts) -> dict[str, float] | None:
        """The estimate of a run, before it; None where the calibration says nothing of it."""
        if self.why_not(facts) is not None:
            return None
        try:
            estimate = predict(_request(facts), self.machine)
        except QuantbenchError:
            return None
        figures = {name: getattr(estimate, name) for name in NAMES}
        return {name: float(figure.value) for name, figure in figures.items() if figure}

    def beside(self, measured: Measured) -> Beside:
        """The estimate of a run beside what was measured."""
        reason = self.why_not(measured.facts)
        if reason is None:
            try:
                request = _request(measured.facts)
                return _compared(measured, self.machine, request, predict(request, self.machine))
            except QuantbenchError as error:
                reason = str(error)
        return Beside(why_not=reason)

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


def _compared(
    measured: Measured, machine: Calibrated, request: Request, estimate: Estimate
) -> Beside:
    steps = [1 / s.decode_tok_s for s in measured.samples if s.decode_tok_s]
    values = {
        "prompt_seconds": statistics.median(s.prefill_seconds for s in measured.samples),
        "token_seconds": statistics.median(steps) if steps else None,
        "tokens_per_second": measured.summary.tok_s_all_rows,
        "peak_memory_bytes": float(next(iter(measured.peaks.generate.values()))),
    }
    figures = {}
    for name, value in values.items():
        if value:
            one = getattr(estimate, name)
            figures[name] = Compared(one.value, value, one.source, one.low, one.high)
    if (one := estimate.joules_per_token) is not None:
        counted = measured.joules()["joules_per_token"]
        figures["joules_per_token"] = Compared(
            one.value, counted if isinstance(counted, float) else None, one.source,
            at_most=one.source == NO_COUNTER,
        )  # fmt: skip
    sentences, share = [], None
    if "token_seconds" in figures:
        share, sentence = _share(measured, machine, request, figures["token_seconds"])
        sentences.append(sentence)
    sentences.append(
        "estimated before, against measured: "
        + ", ".join(
            f"{NAMES[name]} {figure.error:+.0%}"
            for name, figure in figures.items()
            if figure.error is not None
        )
    )
    return Beside(figures, sentences, share)


NAMES = {
    "prompt_seconds": "the prompt's seconds",
    "token_seconds": "a token's",
    "tokens_per_second": "tok/s",
    "peak_memory_bytes": "peak memory",
    "joules_per_token": "joules per token",
}


def _share(
    measured: Measured, machine: Calibrated, request: Request, token: Compared
) -> tuple[float, str]:
    """How near a step is to what memory allows for its weights and its cache."""
    middle = request.depth + request.prompt + request.new_tokens // 2
    attention = pass_of(request, machine, 1, middle).of_kind("attention")
    read = measured.facts.step_weight_bytes
    read += request.tp * sum(work.bytes_read for work in attention)
    allowed = read / machine.calibration.speed.read
    assert token.measured
    share = allowed / token.measured
    return share, (
        f"a step runs at {share:.0%} of what this machine allows for these bytes "
        f"({read / 1e9:.2f} GB at {machine.calibration.speed.read / 1e9:.1f} GB/s), and at "
        f"{token.estimated / token.measured:.0%} of what its own kernels reach"
    )
