"""A run as a table for the terminal."""

from quantbench.run.facts import Measured
from quantbench.text import aligned, one_line, size

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
