"""Runs as a table for the terminal: a row for each run, a unit on every number."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import files
from errors import LogError
from text import aligned, one_line, size

NUMBERS = ("tok/s", "samples", "prefill", "decode", "mem/s", "peak memory", "model size")
HEADINGS = ("scheme", *NUMBERS, "kernel", "decoder")
SINCE_START = "resident_since_start"  # peak since the process started (devices.peak_memory)


def read(path: files.FilePath) -> list[Mapping[str, Any]]:
    """The runs that --output_json_path wrote to a file, one for each line.

    Raises LogError, with the number of the line, for a line that holds anything else.
    """
    runs = []
    for number, line in enumerate(files.read_text("cannot read", path, LogError).splitlines(), 1):
        try:
            runs.append(json.loads(line))
            _row(runs[-1])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
                RecursionError, StopIteration):  # fmt: skip
            raise LogError(
                f"{path}:{number} is not what generate.py --output_json_path writes"
            ) from None
    if not runs:
        raise LogError(f"{path} is not what generate.py --output_json_path writes: it is empty")
    return runs


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Lines of aligned columns, one for each run, of runs as --output_json_path writes them."""
    return aligned([HEADINGS, *map(_row, runs)], left={0, len(HEADINGS) - 2, len(HEADINGS) - 1})


def one_run(run: Mapping[str, Any]) -> str:
    """A run's table; and below it what was estimated before, where something was."""
    beside = estimates(run)
    return f"{table([run])}\n\n{beside}" if beside else table([run])


def estimates(run: Mapping[str, Any]) -> str:
    """A line for each figure that was estimated before the run, with what was measured and the
    error, (estimated − measured) ÷ measured; "" where nothing was estimated."""
    found = run.get("estimate") or {}
    rows = [
        (words, *_against(found[name], show))
        for name, (words, show) in ESTIMATED.items()
        if isinstance(found.get(name), Mapping)
    ]
    if not rows:
        return ""
    heads = ("", "estimated", "measured", "error")
    noted = [(*row, NO_COUNTER if row[:1] == ("energy",) and row[2] == "-" else "") for row in rows]
    return aligned([heads, *noted], left={0, 4})


def _against(figure: Mapping[str, Any], show: Callable[[float], str]) -> tuple[str, str, str]:
    measured, error = figure["measured"], figure["error"]
    return (
        ("≤ " if figure.get("at_most") else "") + show(figure["estimated"]),
        "-" if measured is None else show(measured),
        "-" if error is None else f"{error:+.1%}",
    )


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


# Of an estimate's figures: what the table calls them, and how it shows them.
ESTIMATED: dict[str, tuple[str, Callable[[float], str]]] = {
    "prompt_seconds": ("prompt", _seconds),
    "token_seconds": ("a step", _seconds),
    "tokens_per_second": ("all rows", lambda rate: f"{rate:.2f} tok/s"),
    "peak_memory_bytes": ("peak memory", size),
    "joules_per_token": ("energy", lambda joules: f"{joules:.3g} J/token"),
}
NO_COUNTER = "no counter; power limit × time is an upper bound"  # as run/energy.py says it


def remarks(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each run whose speed is not trustworthy: those with a mark in the table."""
    return [
        f"! {run['scheme']}: {one_line(str(why))}"
        for run in runs
        if run.get("trustworthy") is False and (why := run.get("why_not_trustworthy"))
    ]


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    kind, peak = next(iter(run["peak_memory_bytes"]["generate"].items()))
    at_most = "≤ " if kind == SINCE_START else ""  # loading may have peaked higher than the run
    scheme, kernel = run["scheme"], run["kernel"]
    if not isinstance(scheme, str) or not isinstance(kernel, str):
        raise TypeError
    return (
        scheme,
        f"{run['tok_s']:.2f}",
        _spread(run),
        _rate(run["prefill_tok_s"]),
        _rate(run["decode_tok_s"]),
        f"{size(run['weight_bytes_per_s'])}/s",
        f"{at_most}{size(peak)}",
        size(run["weight_bytes"]),
        kernel,
        str(run.get("decoder", "-")),  # lines of older versions lack it
    )


def _spread(run: Mapping[str, Any]) -> str:
    """The least and most tok/s of the samples; with a mark if they are not trustworthy."""
    speeds = [sample["tok_s"] for sample in run.get("samples", ())]
    if len(speeds) < 2:
        return "1" if speeds else "-"
    mark = "! " if run.get("trustworthy") is False else ""  # lines of older versions lack it
    return f"{mark}{min(speeds):.2f} to {max(speeds):.2f} over {len(speeds)}"


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.2f} tok/s"
