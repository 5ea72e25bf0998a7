"""What is wrong with a published table of measured and estimated runs, by column.

    for finding in audit(table):
        print(finding.column, finding.text)

Everything is derived from the figures: each of a row's has to follow from the others within half a
unit of its last printed digit. A unit, a denominator or a constant is named only if it fits every
row.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from estimate.datasheets import known
from estimate.headings import COLUMNS
from estimate.tables import Number, Row, Table
from text import counted

COARSE = 0.05  # a figure that may be off by more than this share of itself says little


@dataclass(frozen=True)
class Finding:
    column: str  # as the table has it: "Energy (J/token), Measured"
    wrong: bool  # or only worth knowing
    text: str


def audit(table: Table) -> list[Finding]:
    """What does not hold in a table, and what cannot be told from it."""
    found = [*_throughput(table), *_energy(table)]
    for quantity in table.titles:
        found += _errors(table, quantity)
    found += _copies(table)
    for quantity in table.titles:
        found += _digits(table, quantity)
    return found


def _name(table: Table, quantity: str, column: str) -> str:
    return f"{table.titles[quantity]}, {column.capitalize()}"


def _pairs(table: Table, quantity: str, column: str) -> list[tuple[Row, Number, Number]]:
    """Each row's figure of a quantity, with the seconds of the same column."""
    found = []
    for row in table.rows:
        value = getattr(row.cell(quantity), column)
        time = getattr(row.cell("runtime"), column)
        if value is not None and time is not None:
            found.append((row, value, table.seconds(time)))
    return found


# ---------------------------------------------------------------------------------- throughput

# What a figure may be: (seconds of the pass, sequences, tokens of each) -> the figure.
MEANINGS: dict[str, Callable[[float, int, int], float]] = {
    "tokens per second": lambda s, B, L: B * L / s,
    "microseconds per token": lambda s, B, L: 1e6 * s / (B * L),
    "milliseconds per token": lambda s, B, L: 1e3 * s / (B * L),
    "seconds per token": lambda s, B, L: s / (B * L),
    "thousands of tokens per second": lambda s, B, L: B * L / s / 1e3,
    "tokens per second of one sequence": lambda s, B, L: L / s,
    "tokens per millisecond of one sequence": lambda s, B, L: L / s / 1e3,
    "sequences per second": lambda s, B, L: B / s,
    "passes per second": lambda s, B, L: 1 / s,
    "microseconds per position of all sequences": lambda s, B, L: 1e6 * s / L,
    "milliseconds per sequence": lambda s, B, L: 1e3 * s / B,
}


# The first letters of a unit, and what it counts.
RATES = {
    "ktok": "thousands of tokens",
    "tok": "tokens",
    "seq": "sequences",
    "sample": "sequences",
    "batch": "passes",
    "iter": "passes",
}


def _stated(unit: str) -> str | None:
    """Which meaning a unit names: "token/sec" is tokens per second."""
    plain = unit.lower().replace(" per ", "/").replace(" ", "")
    above, _, below = plain.partition("/")
    if below.startswith("token"):
        units = {"us": "micro", "µs": "micro", "ms": "milli", "s": "", "sec": ""}
        return f"{units[above]}seconds per token" if above in units else None
    if not below.startswith("s"):
        return None
    return next((f"{RATES[word]} per second" for word in RATES if above.startswith(word)), None)


def _throughput(table: Table) -> Iterator[Finding]:
    if not {"throughput", "runtime"} <= set(table.titles):
        return
    unit = table.units.get("throughput", "")
    stated = _stated(unit) or "tokens per second"
    for column in COLUMNS[:2]:
        pairs = _pairs(table, "throughput", column)
        if not pairs:
            continue
        name = _name(table, "throughput", column)
        if table.batch is None or table.length is None:
            yield from _proportional(name, pairs)
            continue
        B, L = table.batch, table.length
        fitting = [
            meaning
            for meaning, of in MEANINGS.items()
            if all(_agrees(value, of, time, B, L) for _, value, time in pairs)
        ]
        row, value, time = pairs[0]
        true = (
            f"tokens per second are {B * L} tokens ÷ {time.value:.3f} s = "
            f"{B * L / time.value:,.0f} for {row.model}, and the table says {value.value:g}"
        )
        if stated in fitting:
            continue
        if fitting:
            yield Finding(name, True, f"it is {fitting[0]}, not {stated}: {true}")
        else:
            away = [r.model for r, v, t in pairs if not _agrees(v, MEANINGS[stated], t, B, L)]
            yield Finding(
                name,
                True,
                f"it does not follow from the runtime in {counted(len(away), 'row')} "
                f"({', '.join(away[:3])}{', …' * (len(away) > 3)}): {true}",
            )


def _agrees(
    value: Number, of: Callable[[float, int, int], float], time: Number, B: int, L: int
) -> bool:
    low, high = sorted(of(seconds, B, L) for seconds in (time.low, time.high))
    return value.low <= high * (1 + 1e-9) and low <= value.high * (1 + 1e-9)


def _proportional(name: str, pairs: Sequence[tuple[Row, Number, Number]]) -> Iterator[Finding]:
    """Without the number of tokens: whether figures grow with the runtime."""
    span = _common([(value.low / time.high, value.high / time.low) for _, value, time in pairs])
    if (
        len(pairs) > 1
        and span
        and max(t.value for *_, t in pairs) > 1.2 * min(t.value for *_, t in pairs)
    ):
        yield Finding(
            name,
            True,
            "it grows with the runtime, in proportion, so it is a time and no throughput; as "
            f"microseconds per token it stands for {2e6 / sum(span):.0f} tokens a pass",
        )


def _common(spans: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The interval that all of the given ones share; None if they share none."""
    low, high = max(low for low, _ in spans), min(high for _, high in spans)
    return (low, high) if low <= high else None


# ---------------------------------------------------------------------------------- energy


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


def _energy(table: Table) -> Iterator[Finding]:
    """Joules ÷ seconds is a power. A measured one differs from row to row."""
    if not {"energy", "runtime"} <= set(table.titles):
        return
    B, L = table.batch or 1, table.length or 1
    shares = {"tokens": B * L, "sequences": B, "positions": L, "": 1}
    for column in COLUMNS[:2]:
        by_device: dict[str, list[tuple[Row, Number, Number]]] = {}
        for row, energy, time in _pairs(table, "energy", column):
            by_device.setdefault(row.device, []).append((row, table.joules(energy), time))
        for device, pairs in by_device.items():
            name = _name(table, "energy", column)
            count, card = cards(device)
            sheet = known(card)
            limit = sheet.power * count if sheet else None
            for share, by in shares.items():
                spans = [(e.low * by / t.high, e.high * by / t.low) for _, e, t in pairs]
                span = _common(spans)
                if (
                    span
                    and limit
                    and span[0] <= limit * (1 + 1e-9)
                    and limit <= span[1] * (1 + 1e-9)
                ):
                    yield _constant(name, column, device, limit, span, share, len(pairs))
                    break
            else:
                spans = [(e.low * B * L / t.high, e.high * B * L / t.low) for _, e, t in pairs]
                span = _common(spans)
                if span and len(pairs) > 2 and span[0] > 0 and table.tokens:
                    yield Finding(
                        name,
                        column == "measured",
                        f"on {device} every row is one power, {_watts(span)}, × time ÷ tokens: a "
                        "measured power would differ between models",
                    )
                above = [r.model for (r, *_), (low, _) in zip(pairs, spans, strict=True)
                         if limit and low > limit * 1.02]  # fmt: skip
                if above and table.tokens:
                    yield Finding(
                        name,
                        True,
                        f"{counted(len(above), 'row')} ({', '.join(above[:3])}) would need more "
                        f"than the {limit:g} W at which {device} is limited",
                    )


def _constant(
    name: str,
    column: str,
    device: str,
    limit: float,
    span: tuple[float, float],
    share: str,
    rows: int,
) -> Finding:
    what = f"power limit × time{f' ÷ {share}' if share else ''}"
    text = f"it is {device}'s {what} in {'all ' if rows > 1 else ''}{counted(rows, 'row')}"
    text += f": they have {_watts(span)} in common, and the limit is {limit:g} W"
    if column == "measured":
        text += "; nothing was measured, and it is an upper bound"
    if share != "tokens":
        text += f"; of {share or 'the whole pass'}, not of a token"
    return Finding(name, column == "measured" or share != "tokens", text)


def _watts(span: tuple[float, float]) -> str:
    return f"{span[0]:.1f} to {span[1]:.1f} W"


# ---------------------------------------------------------------------------------- errors

Span = tuple[float, float]


def _by_measured(m: Number, e: Number) -> Span:
    return e.low / m.high - 1, e.high / m.low - 1


def _by_estimate(m: Number, e: Number) -> Span:
    return 1 - m.high / e.low, 1 - m.low / e.high


def _negative(of: Callable[[Number, Number], Span]) -> Callable[[Number, Number], Span]:
    def turned(m: Number, e: Number) -> Span:
        low, high = of(m, e)
        return -high, -low

    return turned


def _absolute(of: Callable[[Number, Number], Span]) -> Callable[[Number, Number], Span]:
    def folded(m: Number, e: Number) -> Span:
        low, high = of(m, e)
        return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))

    return folded


MEASURED, ESTIMATE = "(estimated − measured) ÷ measured", "(estimated − measured) ÷ estimated"
DEFINITIONS: dict[str, Callable[[Number, Number], Span]] = {
    MEASURED: _by_measured,
    ESTIMATE: _by_estimate,
    "|estimated − measured| ÷ measured": _absolute(_by_measured),
    "|estimated − measured| ÷ estimated": _absolute(_by_estimate),
    "(measured − estimated) ÷ measured": _negative(_by_measured),
    "(measured − estimated) ÷ estimated": _negative(_by_estimate),
}
HONEST = {MEASURED, "|estimated − measured| ÷ measured", "(measured − estimated) ÷ measured"}


def _errors(table: Table, quantity: str) -> Iterator[Finding]:
    """Which denominator the printed errors have. That of an error is what was measured."""
    cells = [(row, row.cell(quantity)) for row in table.rows]
    whole = [
        (row, cell.measured, cell.estimated, cell.error)
        for row, cell in cells
        if cell.measured and cell.estimated and cell.error
        if cell.measured.low > 0 and cell.estimated.low > 0
    ]
    if not whole:
        return
    name = _name(table, quantity, "error")
    fitting = [
        definition
        for definition, of in DEFINITIONS.items()
        if all(_within(error, of(m, e)) for _, m, e, error in whole)
    ]
    if HONEST & set(fitting):
        return
    if fitting:
        row, m, e, error = max(whole, key=lambda one: abs(one[2].value / one[1].value - 1))
        yield Finding(
            name,
            True,
            f"it divides by the estimate, {fitting[0]}: for {row.model} {error.value:.2%}, and "
            f"{e.value / m.value - 1:.2%} of what was measured",
        )
        return
    best = max(DEFINITIONS, key=lambda d: sum(_within(x, DEFINITIONS[d](m, e))
                                              for _, m, e, x in whole))  # fmt: skip
    away = [row for row, m, e, x in whole if not _within(x, DEFINITIONS[best](m, e))]
    yield Finding(
        name,
        True,
        f"in {counted(len(away), 'row')} of {len(whole)} it follows from no definition, in the "
        f"others it is {best}: {', '.join(f'{row.model} (line {row.line})' for row in away[:3])}",
    )


def _within(error: Number, span: Span) -> bool:
    return error.low <= span[1] + 1e-9 and span[0] <= error.high + 1e-9


def _copies(table: Table) -> Iterator[Finding]:
    """Errors that are those of the runtime, figure by figure."""
    for quantity in ("energy", "throughput", "memory"):
        pairs = [
            (one, other)
            for row in table.rows
            if (one := row.cell(quantity).error) and (other := row.cell("runtime").error)
        ]
        if quantity in table.titles and len(pairs) > 1 and all(a == b for a, b in pairs):
            yield Finding(
                _name(table, quantity, "error"),
                True,
                f"it is the runtime's error in all {len(pairs)} rows: this column was computed "
                "from the runtime, and tests nothing more",
            )


def _digits(table: Table, quantity: str) -> Iterator[Finding]:
    for column in COLUMNS[:2]:
        values = [(row, number) for row in table.rows
                  if (number := getattr(row.cell(quantity), column)) and number.value]  # fmt: skip
        if not values:
            continue
        row, worst = max(values, key=lambda one: one[1].half / abs(one[1].value))
        off = worst.half / abs(worst.value)
        if off > COARSE:
            yield Finding(
                _name(table, quantity, column),
                False,
                f"it has so few digits that it may be off by {off:.0%}: {worst.value:g} for "
                f"{row.model}",
            )
