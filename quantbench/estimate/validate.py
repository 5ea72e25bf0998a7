"""Estimates held against what was measured, and whether the estimator had seen the case.

    cases = [*of_tables(["published_a5000.rst"]), *of_results("accuracy.json")]
    print(report(cases))

A case is held out if no constant of its estimate was fitted to it. Errors are given twice, by both
denominators: published tables divide by the estimate, which makes a large overestimate small.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import QuantbenchError, UsageError
from quantbench.estimate.audit_energy import cards, unmeasured
from quantbench.estimate.datasheets import Datasheet, find, known
from quantbench.estimate.own_results import SUFFIXES, figures, named
from quantbench.estimate.published import (
    AT_LEAST,
    Constants,
    Counted,
    chosen_without,
    counted_rows,
    fitted,
    left_out,
)
from quantbench.estimate.tables import grid, read
from quantbench.text import counted as number_of
from quantbench.typed_json import parsed

# Each quantity: its title in a table, what its figures are multiplied by, and their format.
QUANTITIES = {
    "runtime": ("Runtime (ms)", 1e3, "{:.2f}"),
    "memory": ("Memory (GiB)", 1 / (1 << 30), "{:.2f}"),
    "energy": ("Energy (J/token)", 1.0, "{:.4g}"),
    "throughput": ("Throughput (tokens/s)", 1.0, "{:,.0f}"),
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
    # Known for a run of ours, not for a published row.
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


# ---------------------------------------------------------------------------------- published


def of_tables(paths: Sequence[str | Path], device: str | None = None) -> list[Case]:
    """The rows of published tables, estimated by constants of the first card that has enough.

    Its own rows are estimated by constants fitted to the other rows, which is held out, and by
    those fitted to all of them; where there are rows enough, also with the form of the model chosen
    by the other rows. Rows of other cards are held out. device: a card for which that card's models
    are estimated, too, where the tables have no row of them; nothing is fitted to its own rows.

    Raises UsageError for a device that has the only rows to which constants can be fitted.
    """
    target = None if device is None else find(device)
    rows: list[Counted] = []
    for path in paths:
        for table in read(path):
            hollow = unmeasured(table)
            rows += [
                replace(row, energy=None) if row.row.device in hollow else row
                for row in counted_rows(table, Path(path).parent)
            ]
    by_device: dict[str, list[Counted]] = {}
    for row in rows:
        by_device.setdefault(row.row.device, []).append(row)
    enough = [own for own in by_device.values() if sum(bool(r.seconds) for r in own) > AT_LEAST]
    if not enough:
        raise QuantbenchError(
            f"{paths[0]}: to leave out a row and fit two constants to the others, a card needs "
            f"{AT_LEAST + 1} measured rows"
        )
    others = [own for own in enough if target is None or _card(own[0]) != target]
    if target is not None and not others:
        raise UsageError(
            f"--device {target.name}: the table has enough rows of no other card to predict it by; "
            "leave --device out, and each of its rows is estimated by the others"
        )
    own = min(others, key=lambda rows: cards(rows[0].row.device)[0])  # of one card, if any is
    constants = fitted(own, str(Path(paths[0]).name))
    alone = f"{own[0].row.device}, each row left out of its fit"
    cases = [
        _case(row, alone, True, seconds) for row, seconds in zip(own, left_out(own), strict=True)
    ]
    cases += [
        _case(row, f"{alone} and of the choice of its form", True, chosen[0])
        for row, chosen in zip(own, chosen_without(own), strict=True)
        if chosen
    ]
    cases += [
        _case(row, f"{row.row.device}, all rows in the fit", False,
              constants.seconds(row.demand))
        for row in own
    ]  # fmt: skip
    elsewhere = [row for row in rows if row.row.device != own[0].row.device]
    cases += [_of_another(row, constants) for row in elsewhere]
    if target is not None:
        there = {row.row.model for row in elsewhere if _card(row) == target}
        cases += [_on(target, row, constants) for row in own if row.row.model not in there]
    return cases


def _card(row: Counted) -> Datasheet | None:
    """The datasheet of the one card that a row is of."""
    count, card = cards(row.row.device)
    return known(card) if count == 1 else None


def _of_another(row: Counted, constants: Constants) -> Case:
    """A row of another card than that of the constants."""
    count, card = cards(row.row.device)
    if count > 1:  # nothing says how they share a pass
        case = _case(row, f"{row.row.device}: several cards, not estimated", True, None)
        return replace(case, estimated={})
    if (sheet := known(card)) is None:
        return _case(row, f"{card}, of which there is no datasheet", True, None)
    group = f"{row.row.device}, by the datasheets' ratio"
    return _case(row, group, True, constants.on(sheet).seconds(row.demand))


def _case(row: Counted, group: str, held_out: bool, seconds: float | None) -> Case:
    measured: dict[str, float] = {}
    estimated = {"memory": float(row.demand.peak.allocated)}
    if row.seconds:
        measured |= {"runtime": row.seconds, "throughput": row.tokens / row.seconds}
    if row.memory:
        measured["memory"] = row.memory * (1 << 30)
    if row.energy is not None:
        measured["energy"] = row.energy
    if seconds:
        estimated |= _of_seconds(seconds, row.tokens, row.row.device)
    return Case(row.row.model, row.row.device, group, held_out, measured, estimated)


def _on(sheet: Datasheet, row: Counted, constants: Constants) -> Case:
    """A row's model on a card of which no row is published."""
    seconds = constants.on(sheet).seconds(row.demand)
    estimated = _of_seconds(seconds, row.tokens, sheet.name)
    estimated["memory"] = float(row.demand.peak.allocated)
    return Case(row.row.model, sheet.name, f"{sheet.name}, predicted", True, {}, estimated)


def _of_seconds(seconds: float, tokens: int, device: str) -> dict[str, float]:
    """Energy is the power limit × time, an upper bound."""
    figures = {"runtime": seconds, "throughput": tokens / seconds}
    count, card = cards(device)
    if sheet := known(card):
        figures["energy"] = sheet.power * count * seconds / tokens
    return figures


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
                "measured_seconds and estimated_seconds, or a published table (.rst, .md)"
            ) from None
    cases = list(_cases(content, {}))
    if not cases:
        raise QuantbenchError(
            f"{path}: there is no case in it that was both measured and estimated; --validate "
            "takes what generate.py --output_json_path, ab and latency write where the machine "
            f"is calibrated, or measured_X beside estimated_X, X one of {', '.join(SUFFIXES)}"
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
    """A grid table for the cases that were held out, one for the others, and mean errors."""
    parts = []
    for held_out, title in ((True, "Held out"), (False, "Calibrated on")):
        group = [case for case in cases if case.held_out == held_out]
        if group:
            parts.append(f"{title}\n{'-' * len(title)}\n\n{_table(group)}\n\n{_means(group)}")
    return "\n\n".join(parts) + "\n"


def _table(cases: Sequence[Case]) -> str:
    present = [
        name for name in QUANTITIES if any(name in c.measured or name in c.estimated for c in cases)
    ]
    columns = ("Measured", "Estimated", "Error ÷ measured", "Error ÷ estimated")
    head: list[tuple[str, Sequence[str]]] = [("Model", ()), ("Device", ())]
    head += [(QUANTITIES[name][0], columns) for name in present]
    rows = []
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
    return grid(head, rows)


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
