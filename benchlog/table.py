"""Runs side by side, for the terminal: one row each, a unit on every number."""

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = ("scheme", "tok/s", "prefill", "decode", "mem/s", "peak memory", "model size", "kernel")
SINCE_START = "resident_since_start"  # a kind of peak that could not be reset: see devices.py


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Lines of aligned columns for runs as --output_json_path holds them."""
    rows = [HEADINGS, *(_row(run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return "\n".join(_line(row, widths) for row in rows)


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    kind, peak = next(iter(run["peak_memory_bytes"]["generate"].items()))
    at_most = "≤ " if kind == SINCE_START else ""  # the peak of loading may be the higher one
    return (
        run["scheme"],
        f"{run['tok_s']:.2f}",
        _rate(run["prefill_tok_s"]),
        _rate(run["decode_tok_s"]),
        f"{_size(run['weight_bytes_per_s'])}/s",
        f"{at_most}{_size(peak)}",
        _size(run["weight_bytes"]),
        run["kernel"],
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers, last = cells
    middle = (cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True))
    return "  ".join((first.ljust(widths[0]), *middle, last))


def _rate(tokens_per_second: float | None) -> str:
    return "-" if tokens_per_second is None else f"{tokens_per_second:.2f} tok/s"


def _size(count: float) -> str:
    """Bytes in the unit that keeps the number readable; 1 GB is 1e9 bytes, as in the log."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.2f} {name}"
