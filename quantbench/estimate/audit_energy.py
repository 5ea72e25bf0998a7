"""Energies of a published table that nobody measured: one power × time, in every row."""

import re
from collections.abc import Iterator, Sequence

from quantbench.estimate.datasheets import known
from quantbench.estimate.findings import Finding, Pair, common, is_most, name_of, named, pairs_of
from quantbench.estimate.headings import COLUMNS
from quantbench.estimate.tables import Table
from quantbench.text import counted

OF_ONE = {"tokens": "a token", "sequences": "a sequence", "": "the whole pass"}


def cards(device: str) -> tuple[int, str]:
    """The number of cards and the name of one: of "2 × NVIDIA RTX A5000" or "RTX A5000 x2"."""
    for pattern, number, name in (
        (r"(\d+)\s*[x×*]\s*(.+)", 1, 2),
        (r"(.+?)\s*[x×*]\s*(\d+)", 2, 1),
        (r"(.+?)\s*\((\d+)(?:\s*GPUs?)?\)", 2, 1),
    ):
        if found := re.fullmatch(pattern, device.strip()):
            return int(found.group(number)), found.group(name).strip()
    return 1, device.strip()


def energy_findings(table: Table) -> Iterator[Finding]:
    """Joules ÷ seconds is a power. A measured one differs from row to row."""
    if not {"energy", "runtime"} <= set(table.titles):
        return
    B, L = table.batch or 1, table.length or 1
    shares = {"tokens": B * L, "sequences": B, "positions": L, "": 1}
    stated = table.energy_share
    shares = {stated: shares[stated], **shares}
    known_size = bool(table.tokens) or not stated
    for column in COLUMNS[:2]:
        by_device: dict[str, list[Pair]] = {}
        for row, energy, time in pairs_of(table, "energy", column):
            by_device.setdefault(row.device, []).append((row, table.joules(energy), time))
        for device, pairs in by_device.items():
            name = name_of(table, "energy", column)
            count, card = cards(device)
            sheet = known(card)
            limit = sheet.power * count if sheet else None
            for share, by in shares.items():
                spans = [(e.low * by / t.high, e.high * by / t.low) for _, e, t in pairs]
                at_limit = [s for s in spans if limit and _holds(s, limit)]
                span = common(at_limit) if at_limit else None
                if limit and span and (at_limit == spans or is_most(len(at_limit), len(spans))):
                    away = [p for p, s in zip(pairs, spans, strict=True) if not _holds(s, limit)]
                    yield _constant(
                        name, column, device, limit, span, (share, stated), len(pairs), away
                    )
                    break
            else:
                by = shares[stated]
                spans = [(e.low * by / t.high, e.high * by / t.low) for _, e, t in pairs]
                span = common(spans)
                if span and len(pairs) > 2 and span[0] > 0 and known_size:
                    yield Finding(
                        name,
                        column == "measured",
                        f"on {device} every row is one power, {_watts(span)}, × time"
                        f"{f' ÷ {stated}' if stated else ''}: a measured power would differ "
                        "between models",
                        device,
                    )
                above = [r.model for (r, *_), (low, _) in zip(pairs, spans, strict=True)
                         if limit and low > limit * 1.02]  # fmt: skip
                if above and known_size:
                    yield Finding(
                        name,
                        True,
                        f"{counted(len(above), 'row')} ({', '.join(above[:3])}) would need more "
                        f"than the {limit:g} W at which {device} is limited",
                        device,
                    )


def unmeasured(table: Table) -> set[str]:
    """Devices of whose energies, called measured, the figures say that nobody measured them."""
    findings = energy_findings(table)
    return {f.device for f in findings if f.wrong and f.device and f.column.endswith("Measured")}


def _constant(
    name: str,
    column: str,
    device: str,
    limit: float,
    span: tuple[float, float],
    shares: tuple[str, str],
    rows: int,
    away: Sequence[Pair],
) -> Finding:
    """shares: what the energies are of, and what their title says. away: rows of which it does not
    hold."""
    share, stated = shares
    what = f"power limit × time{f' ÷ {share}' if share else ''}"
    number = f"{'all ' if rows > 1 else ''}{counted(rows, 'row')}"
    if away:
        number = f"{rows - len(away)} of {rows} rows, all but {named(away)}"
    text = f"it is {device}'s {what} in {number}"
    text += f": they have {_watts(span)} in common, and the limit is {limit:g} W"
    if column == "measured":
        text += "; nothing was measured, and it is an upper bound"
    if share != stated:
        text += f"; of {share or 'the whole pass'}, not of {OF_ONE[stated]}"
    return Finding(name, column == "measured" or share != stated, text, device)


def _holds(span: tuple[float, float], value: float) -> bool:
    return span[0] <= value * (1 + 1e-9) and value <= span[1] * (1 + 1e-9)


def _watts(span: tuple[float, float]) -> str:
    return f"{span[0]:.1f} to {span[1]:.1f} W"
