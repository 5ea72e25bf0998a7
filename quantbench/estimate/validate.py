"""Estimates held against what was measured, and whether the estimator had seen the case.

    print(report(of_results("accuracy.json")))

A case is held out if no constant of its estimate was fitted to it. Errors are given twice, by both
denominators: dividing by the estimate makes a large overestimate small.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import QuantbenchError
from quantbench.estimate.own_results import SUFFIXES, figures, named
from quantbench.text import aligned
from quantbench.text import counted as number_of
from quantbench.typed_json import parsed

# Each quantity: its unit in a table, what its figures are multiplied by, and their format.
QUANTITIES = {
    "runtime": ("ms", 1e3, "{:.2f}"),
    "memory": ("GiB", 1 / (1 << 30), "{:.2f}"),
    "energy": ("J/token", 1.0, "{:.4g}"),
    "throughput": ("tokens/s", 1.0, "{:,.0f}"),
}


@dataclass(frozen=True)
class Case:
    """One run. Figures by quantity: seconds, bytes, joules per token, tokens per second."""

    model: str
    device: str
    group: str  # what its mean error is given for: a device, a kind of run
    held_out: bool
    measured: dict[str, float]
    estimated: dict[str, float]
    # None where the file does not say it.
    scheme: str | None = None
    batch: int | None = None
    positions: int | None = None  # of the prompt, or before a step

    @property
    def name(self) -> str:
        """In a table: "own int8wo × 4, token at 8192"."""
        name = f"{self.model} {self.scheme}" if self.scheme else self.model
        if self.batch is not None:
            name += f" × {self.batch}"
        if self.positions is not None:
            name += f", {self.group} at {self.positions}"
        return name

    def error(self, quantity: str, by_estimate: bool = False) -> float | None:
        """(estimated − measured) ÷ measured, or ÷ estimated; None without both figures."""
        measured, estimated = self.measured.get(quantity), self.estimated.get(quantity)
        if not measured or not estimated:
            return None
        return (estimated - measured) / (estimated if by_estimate else measured)


# ---------------------------------------------------------------------------------- our results


def of_results(path: str | Path) -> list[Case]:
    """Every case in a JSON or JSON-lines file: what generate.py, ab and latency write, and objects
    with measured_… and estimated_… figures (estimate/own_results.py has the names).

    A case is held out unless the file says that "held_out" is false.
    Raises QuantbenchError, one line, for a file without any.
    """
    text = files.read_text("cannot read", str(path), QuantbenchError)
    try:
        content = parsed(text)
    except ValueError:
        try:
            content = [parsed(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise QuantbenchError(
                f"{path}: it is neither JSON nor JSON lines; --validate takes results that hold "
                "measured_seconds and estimated_seconds"
            ) from None
    cases = list(_cases(content, {}))
    if not cases:
        raise QuantbenchError(
            f"{path}: there is no case in it that was both measured and estimated; --validate "
            "takes what generate.py --output_json_path, ab and latency write where they have an "
            f"estimate, or measured_X beside estimated_X, X one of {', '.join(SUFFIXES)}"
        )
    return cases


def _cases(content: Any, above: dict[str, Any]) -> Iterator[Case]:
    """above: what the objects around this one say of its cases."""
    if isinstance(content, list):
        for item in content:
            yield from _cases(item, above)
    if not isinstance(content, dict):
        return
    here = above | named(content)
    device = here.get("device", "")
    for beside in figures(content):
        yield Case(
            here.get("model", ""),
            device,
            beside.kind or here.get("kind", device),
            here.get("held_out", True),
            beside.measured,
            beside.estimated,
            here.get("scheme"),
            here.get("batch"),
            here.get("positions"),
        )
    for value in content.values():
        if isinstance(value, dict | list):
            yield from _cases(value, here)


# ---------------------------------------------------------------------------------- the report


def report(cases: Sequence[Case]) -> str:
    """A table of the cases that were held out, one of the others, and mean errors."""
    parts = []
    for held_out, title in ((True, "Held out"), (False, "Fitted to")):
        group = [case for case in cases if case.held_out == held_out]
        if group:
            parts.append(f"{title}\n{'-' * len(title)}\n\n{_table(group)}\n\n{_means(group)}")
    return "\n\n".join(parts) + "\n"


def _table(cases: Sequence[Case]) -> str:
    present = [
        name for name in QUANTITIES if any(name in c.measured or name in c.estimated for c in cases)
    ]
    head = ["Model", "Device"]
    for name in present:
        unit = QUANTITIES[name][0]
        head += [f"Measured, {unit}", f"Estimated, {unit}", "Error ÷ measured", "Error ÷ estimated"]
    rows = [head]
    for case in cases:
        row = [case.name, case.device]
        for name in present:
            _, factor, form = QUANTITIES[name]
            for side in (case.measured, case.estimated):
                value = side.get(name)
                row.append("" if value is None else form.format(value * factor))
            errors = (case.error(name), case.error(name, by_estimate=True))
            row += ["" if error is None else f"{error:+.2%}" for error in errors]
        rows.append(row)
    return aligned(rows, left=(0, 1))


# What mean errors are given for: words before the group's name, and the group of a case; None for a
# case that has none.
GROUPS: tuple[tuple[str, Callable[[Case], str | None]], ...] = (
    ("", lambda case: case.group),
    ("scheme ", lambda case: case.scheme),
    ("model ", lambda case: case.model if case.scheme else None),
)


def _means(cases: Sequence[Case]) -> str:
    """Mean absolute errors by group and quantity."""
    lines = []
    for words, group_of in GROUPS:
        groups: dict[str, list[Case]] = {}
        for case in cases:
            if (group := group_of(case)) is not None:
                groups.setdefault(f"{words}{group}", []).append(case)
        for name, own in groups.items():
            lines += [line for quantity in QUANTITIES if (line := _mean(name, own, quantity))]
    return "\n".join(lines)


def _mean(group: str, cases: Sequence[Case], quantity: str) -> str:
    """One line; empty where no case has both figures."""
    errors = [(abs(e), case) for case in cases if (e := case.error(quantity)) is not None]
    if not errors:
        return ""
    by_estimate = [abs(case.error(quantity, by_estimate=True) or 0.0) for _, case in errors]
    worst, at = max(errors, key=lambda pair: pair[0])
    return (
        f"- {group}: {quantity}: mean |error| {statistics.fmean(e for e, _ in errors):.2%} ÷ "
        f"measured, {statistics.fmean(by_estimate):.2%} ÷ estimated; worst {worst:.2%} "
        f"({at.name}); {number_of(len(errors), 'case')}"
    )


def as_json(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """The cases as `of_results` reads them."""
    names = {quantity: suffix for suffix, quantity in SUFFIXES.items()}
    rows = []
    for case in cases:
        row: dict[str, Any] = {"model": case.model, "device": case.device, "kind": case.group}
        row["held_out"] = case.held_out
        named_by = {"scheme": case.scheme, "batch": case.batch, "positions": case.positions}
        row |= {name: value for name, value in named_by.items() if value is not None}
        for side in ("measured", "estimated"):
            own = getattr(case, side)
            row |= {f"{side}_{names[q]}": value for q, value in own.items()}
        rows.append(row)
    return rows
