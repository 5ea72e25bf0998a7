"""A run as a table for the terminal, and estimates compared with measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantbench.log.record import NO_COUNTER
from quantbench.run.facts import Measured
from quantbench.text import aligned, one_line, seconds, size
from quantbench.typed_json import omitted

SINCE_START = "resident_since_start"  # peak since the process started (devices.peak_memory)
HEADINGS = (
    *("scheme", "tok/s", "samples", "prefill", "decode", "mem/s", "peak memory", "model size"),
    *("kernel", "decoder"),
)


def table(measured: Measured) -> str:
    """A row of aligned columns, a unit on every number."""
    facts, summary = measured.facts, measured.summary
    kind, peak = next(iter(measured.peaks["generate"].items()))
    at_most = "≤ " if kind == SINCE_START else ""  # loading may have peaked higher than the run
    row = (
        facts.scheme,
        f"{summary.tok_s:.2f}",
        _spread(measured),
        *map(_rate, (summary.prefill_tok_s, summary.decode_tok_s)),
        f"{size(summary.weight_bytes_per_s)}/s",
        f"{at_most}{size(peak)}",
        size(facts.weight_bytes),
        facts.kernel,
        facts.decoder,
    )
    return aligned([HEADINGS, row], left={0, len(HEADINGS) - 2, len(HEADINGS) - 1})


def remarks(measured: Measured) -> list[str]:
    """Why the speed is not trustworthy, where the table has a mark."""
    why = measured.trust.why_not_trustworthy
    is_marked = measured.trust.trustworthy is False and why
    return [f"! {measured.facts.scheme}: {one_line(why)}"] if is_marked and why else []


def _spread(measured: Measured) -> str:
    """The least and most tok/s of the samples; with a mark if they are not trustworthy."""
    speeds = [sample.tok_s for sample in measured.samples]
    if len(speeds) < 2:
        return "1"
    mark = "! " if measured.trust.trustworthy is False else ""
    return f"{mark}{min(speeds):.2f} to {max(speeds):.2f} over {len(speeds)}"


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.2f} tok/s"


# ------------------------------------------------------------------------------------ estimates


@dataclass(frozen=True)
class Estimated:
    """A figure that was estimated before the run; error is (estimated − measured) ÷ measured."""

    estimated: float
    measured: float | None
    error: float | None
    at_most: bool = False  # whether the estimate is an upper bound
    source: str | None = omitted()
    low: float | None = omitted()
    high: float | None = omitted()


# Name and format of each figure of an estimate.
FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "prompt_seconds": ("prompt", seconds),
    "token_seconds": ("a step", seconds),
    "tokens_per_second": ("all rows", lambda rate: f"{rate:.2f} tok/s"),
    "peak_memory_bytes": ("peak memory", size),
    "joules_per_token": ("energy", lambda joules: f"{joules:.3g} J/token"),
}


def against(
    estimate: Mapping[str, float], measured: Mapping[str, float | None]
) -> dict[str, Estimated]:
    """Each figure that was estimated, with what was measured, where that is known."""
    values = {name: measured.get(name) for name in estimate}
    return {
        name: Estimated(estimate[name], value, estimate[name] / value - 1 if value else None)
        for name, value in values.items()
    }


def sentence(estimate: Mapping[str, Estimated] | None) -> str:
    """Estimates and their errors in one line; "" where nothing was estimated and measured."""
    parts = [
        f"{FIGURES[name][0]} {FIGURES[name][1](figure.estimated)} ({figure.error:+.0%})"
        for name, figure in (estimate or {}).items()
        if figure.error is not None and name != "joules_per_token"  # which has its own sentence
    ]
    return f"estimated before (and the error): {', '.join(parts)}" if parts else ""


def estimates(estimate: Mapping[str, Estimated]) -> str:
    """A line for each figure that was estimated, with what was measured and the error."""
    rows = [("", "estimated", "measured", "error", "")]
    for name, (words, show) in FIGURES.items():
        if figure := estimate.get(name):
            bound, measured = figure.at_most, figure.measured
            rows.append((
                words,
                "≤ " * bound + show(figure.estimated),
                "-" if measured is None else show(measured),
                "-" if figure.error is None else f"{figure.error:+.1%}",
                NO_COUNTER if bound and measured is None else "",
            ))  # fmt: skip
    return aligned(rows, left={0, 4}) if len(rows) > 1 else ""
