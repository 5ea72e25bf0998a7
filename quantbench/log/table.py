"""Runs as a table for the terminal: a row for each run, a unit on every number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quantbench.log.record import NO_COUNTER
from quantbench.text import aligned, one_line, seconds, size

NUMBERS = ("tok/s", "samples", "prefill", "decode", "mem/s", "peak memory", "model size")
HEADINGS = ("scheme", *NUMBERS, "kernel", "decoder")
SINCE_START = "resident_since_start"  # peak since the process started (devices.peak_memory)


@dataclass(frozen=True)
class Speed:
    """What the table shows of a sample."""

    tok_s: float


@dataclass(frozen=True)
class Peaks:
    """Peak memory, in bytes by kind, while samples were taken."""

    generate: dict[str, int]


@dataclass(frozen=True)
class Estimated:
    """A figure that was estimated before the run; error is (estimated − measured) ÷ measured."""

    estimated: float
    measured: float | None
    error: float | None
    at_most: bool = False  # whether the estimate is an upper bound


@dataclass(frozen=True)
class Estimates:
    """What was estimated of a run."""

    prompt_seconds: Estimated | None = None
    token_seconds: Estimated | None = None
    tokens_per_second: Estimated | None = None
    peak_memory_bytes: Estimated | None = None
    joules_per_token: Estimated | None = None


@dataclass(frozen=True)
class Run:
    """What the table shows of a line of --output_json_path. Lines of older versions lack the fields
    that have a default."""

    scheme: str
    kernel: str
    tok_s: float
    prefill_tok_s: float | None
    decode_tok_s: float | None
    weight_bytes_per_s: float
    weight_bytes: int
    peak_memory_bytes: Peaks
    decoder: str = "-"
    samples: list[Speed] = field(default_factory=list)
    trustworthy: bool | None = None
    why_not_trustworthy: str | None = None
    estimate: Estimates | None = None


def table(runs: Sequence[Run]) -> str:
    """Lines of aligned columns, one for each run."""
    return aligned([HEADINGS, *map(_row, runs)], left={0, len(HEADINGS) - 2, len(HEADINGS) - 1})


def one_run(run: Run) -> str:
    """A run's table; and below it what was estimated before, where something was."""
    estimated = estimates(run.estimate) if run.estimate else ""
    return f"{table([run])}\n\n{estimated}" if estimated else table([run])


def estimates(estimate: Estimates) -> str:
    """A line for each figure that was estimated, with what was measured and the error; "" where
    nothing was estimated."""
    rows: list[tuple[str, ...]] = []
    for name, (words, show) in ESTIMATED.items():
        figure: Estimated | None = getattr(estimate, name)
        if figure is None:
            continue
        note = NO_COUNTER if figure.at_most and figure.measured is None else ""
        rows.append((words, *_against(figure, show), note))
    if not rows:
        return ""
    return aligned([("", "estimated", "measured", "error"), *rows], left={0, 4})


def _against(figure: Estimated, show: Callable[[float], str]) -> tuple[str, str, str]:
    return (
        ("≤ " if figure.at_most else "") + show(figure.estimated),
        "-" if figure.measured is None else show(figure.measured),
        "-" if figure.error is None else f"{figure.error:+.1%}",
    )


# Name and format of each figure of an estimate in the table.
ESTIMATED: dict[str, tuple[str, Callable[[float], str]]] = {
    "prompt_seconds": ("prompt", seconds),
    "token_seconds": ("a step", seconds),
    "tokens_per_second": ("all rows", lambda rate: f"{rate:.2f} tok/s"),
    "peak_memory_bytes": ("peak memory", size),
    "joules_per_token": ("energy", lambda joules: f"{joules:.3g} J/token"),
}


def remarks(runs: Sequence[Run]) -> list[str]:
    """A line for each run whose speed is not trustworthy: those with a mark in the table."""
    return [
        f"! {run.scheme}: {one_line(run.why_not_trustworthy)}"
        for run in runs
        if run.trustworthy is False and run.why_not_trustworthy
    ]


def _row(run: Run) -> tuple[str, ...]:
    kind, peak = next(iter(run.peak_memory_bytes.generate.items()))
    at_most = "≤ " if kind == SINCE_START else ""  # loading may have peaked higher than the run
    return (
        run.scheme,
        f"{run.tok_s:.2f}",
        _spread(run),
        _rate(run.prefill_tok_s),
        _rate(run.decode_tok_s),
        f"{size(run.weight_bytes_per_s)}/s",
        f"{at_most}{size(peak)}",
        size(run.weight_bytes),
        run.kernel,
        run.decoder,
    )


def _spread(run: Run) -> str:
    """The least and most tok/s of the samples; with a mark if they are not trustworthy."""
    speeds = [sample.tok_s for sample in run.samples]
    if len(speeds) < 2:
        return "1" if speeds else "-"
    mark = "! " if run.trustworthy is False else ""
    return f"{mark}{min(speeds):.2f} to {max(speeds):.2f} over {len(speeds)}"


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.2f} tok/s"
