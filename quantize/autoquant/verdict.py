"""autoquant's decision over what was measured, and the table that says why it was taken.

A candidate is a scheme and a kernel. It has to be faster than full precision by more than noise,
and its output on real activations has to keep a signal-to-quantization-noise ratio (SQNR) of
min_sqnr decibels: 35 dB is noise of 1.8 % of the signal's size.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantbench.errors import KernelError
from quantbench.quantize.autoquant.race import Timing
from quantbench.quantize.spec import FullPrecision, Spec

GAIN = 0.97  # of full precision's time, at most: what is nearer to it may be noise
# A kernel's output in decode's shape, compiled, against its own of many rows, not compiled. These
# round in other places, which keeps 40 dB and more; where one of them is broken there is none left.
AGREEMENT = 30.0  # dB

HEADINGS = ("scheme", "kernel", "time (quartiles)", "weights", "reads", "SQNR", "verdict")


@dataclass(frozen=True)
class Candidate:
    spec: Spec
    kernel: str

    def __str__(self) -> str:
        return f"{self.spec} ({self.kernel})"


def full_precision(kernel: str) -> Candidate:
    return Candidate(FullPrecision(), kernel)


def fastest_in_full(measurements: Iterable["Measurement"]) -> "Measurement":
    """What the others have to beat: full precision on the fastest of its kernels."""
    in_full = (m for m in measurements if isinstance(m.candidate.spec, FullPrecision))
    return min(in_full, key=lambda m: m.seconds)


@dataclass(frozen=True)
class Measurement:
    """A candidate on one shape of layer: the bytes of its weights, its timing, its SQNR and its
    agreement with itself (see AGREEMENT), both in dB; or the `reason` why it was not measured."""

    candidate: Candidate
    bytes: int = 0
    timing: Timing | None = None
    sqnr: float = math.nan
    agreement: float = math.inf
    reason: str | None = None
    verdict: str = ""

    @property
    def seconds(self) -> float:
        return self.timing.seconds if self.timing else math.inf


@dataclass(frozen=True)
class Choice:
    """What was chosen for a shape (out_features, in_features), and every measurement, fastest
    first. setting: batch, dtype, compiled or not; rotated, cache: as in race.Race; kept: whether
    the timings are an earlier run's."""

    shape: tuple[int, int]
    layers: tuple[str, ...]
    setting: str
    min_sqnr: float
    chosen: Candidate
    measurements: tuple[Measurement, ...]
    rotated: int
    cache: int
    kept: bool

    @property
    def spec(self) -> Spec:
        return self.chosen.spec

    @property
    def kernel(self) -> str:
        return self.chosen.kernel

    def of(self, candidate: Candidate) -> Measurement:
        return next(m for m in self.measurements if m.candidate == candidate)


def decide(
    measurements: Iterable[Measurement], min_sqnr: float
) -> tuple[Candidate, list[Measurement]]:
    """The fastest candidate that is allowed; and all, fastest first, each with its verdict.

    Full precision wins where nothing is. Raises KernelError if it was not timed.
    """
    ordered = sorted(measurements, key=lambda m: m.seconds)
    full = fastest_in_full(ordered)
    if full.timing is None:
        raise KernelError(f"autoquant cannot time full precision: {full.reason}")
    allowed = (m for m in ordered if _objection(m, full, min_sqnr) is None)
    best = next(allowed, full)
    judged = [dataclasses.replace(m, verdict=_verdict(m, best, full, min_sqnr)) for m in ordered]
    return best.candidate, judged


def _objection(one: Measurement, full: Measurement, min_sqnr: float) -> str | None:
    """Why a candidate may not be chosen however fast the others are, or None."""
    if one.timing is None:
        return one.reason or "not timed"
    # Written so that NaN, which compares as false, is no pass.
    if not one.agreement >= AGREEMENT:
        return f"wrong: timed, its output was {one.agreement:.1f} dB from what it gives many rows"
    if one is not full and not one.sqnr >= min_sqnr:
        return f"{one.sqnr:.1f} dB < {min_sqnr:g} dB"
    ratio = one.seconds / full.seconds
    if ratio > 1:
        return f"slower than full precision: {ratio:.2f} × its time"
    if ratio > GAIN:
        return f"no faster than full precision beyond noise: {ratio:.2f} × its time"
    return None


def _verdict(one: Measurement, best: Measurement, full: Measurement, min_sqnr: float) -> str:
    if one is best:
        return "chosen" if best is not full else "chosen: nothing faster was allowed"
    if one is not full and (objection := _objection(one, full, min_sqnr)):
        return objection
    return f"slower: {one.seconds / best.seconds:.2f} × the chosen"


# ------------------------------------------------------------------------------------------- table


def table(choices: Sequence[Choice]) -> str:
    """What was measured and chosen, shape by shape, fastest first; what could be had for less
    SQNR; and what the timings are worth where that needs saying."""
    rows = [[_row(m) for m in choice.measurements] for choice in choices]
    everything = [HEADINGS, *(row for group in rows for row in group)]
    widths = [max(len(row[i]) for row in everything) for i in range(len(HEADINGS) - 1)]
    parts = []
    for choice, group in zip(choices, rows, strict=True):
        lines = [_head(choice), _line(HEADINGS, widths), *(_line(row, widths) for row in group)]
        parts.append("\n".join(lines))
    if closing := [*_hints(choices), *_remarks(choices)]:
        parts.append("\n".join(closing))
    return "\n\n".join(parts)


def _head(choice: Choice) -> str:
    full, best = fastest_in_full(choice.measurements), choice.of(choice.chosen)
    times = f": {full.seconds / best.seconds:.2f} × as fast as full precision"
    first, *others = choice.layers
    also = f" and {len(others)} more" if others else ""
    N, K = choice.shape
    gain = times if best is not full else ""
    return f"{N} × {K} ({first}{also}), {choice.setting} → {choice.chosen}{gain}"


def _row(one: Measurement) -> tuple[str, ...]:
    scheme, kernel = str(one.candidate.spec), one.candidate.kernel
    if one.timing is None:
        return scheme, kernel, "-", "-", "-", _decibels(one.sqnr), one.verdict
    time, low, high = (1e6 * t for t in (one.seconds, one.timing.low, one.timing.high))
    return (
        scheme,
        kernel,
        f"{time:.1f} µs ({low:.1f} to {high:.1f})",
        f"{one.bytes / 1e6:.2f} MB",
        f"{one.bytes / one.seconds / 1e9:.1f} GB/s",
        _decibels(one.sqnr),
        one.verdict,
    )


def _decibels(value: float) -> str:
    return "-" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f} dB"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    *head, last = cells
    aligned = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(head, widths, strict=True))
    ]
    return "  ".join(["", *aligned, last]).rstrip()


def _hints(choices: Sequence[Choice]) -> list[str]:
    """Per scheme that only its SQNR kept from being chosen: what it would give, and for what."""
    missed: dict[Candidate, list[tuple[float, float]]] = {}
    for choice in choices:
        full, best = fastest_in_full(choice.measurements), choice.of(choice.chosen)
        for one in choice.measurements:
            lower = math.floor(one.sqnr) if math.isfinite(one.sqnr) else 0
            if one.seconds > GAIN * best.seconds or lower < 1 or lower >= choice.min_sqnr:
                continue
            if _objection(one, full, lower) is None:
                gain = best.seconds / one.seconds
                missed.setdefault(one.candidate, []).append((gain, one.sqnr))
                break  # the fastest of the shape
    lines = []
    for candidate, pairs in missed.items():
        gains, decibels = zip(*pairs, strict=True)
        where = "" if len(choices) == 1 else f" in {len(pairs)} of {len(choices)} shapes"
        lines.append(
            f"{candidate} would be {_range(gains)} × as fast{where} at {_range(decibels)} dB: "
            f"--min_sqnr {math.floor(min(decibels))}"
        )
    return lines


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _remarks(choices: Sequence[Choice]) -> list[str]:
    lines = []
    if kept := sum(choice.kept for choice in choices):
        lines.append(f"Timings of {kept} of {len(choices)} shapes are kept from an earlier run.")
    warm = [choice for choice in choices if choice.rotated < choice.cache]
    if warm:
        cache = warm[0].cache / 1e6
        least = min(choice.rotated for choice in warm) / 1e6
        lines.append(
            f"In {len(warm)} of {len(choices)} shapes weights may have come from the last-level "
            f"cache: it holds {cache:.0f} MB, and memory allowed for {least:.0f} MB of copies."
        )
    return lines
