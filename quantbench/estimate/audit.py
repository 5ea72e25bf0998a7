"""What is wrong with a published table of measured and estimated runs, by column.

    for finding in audit(table):
        print(finding.column, finding.text)

Everything is derived from the figures: each of a row's has to follow from the others within half a
unit of its last printed digit. A unit, a denominator or a constant is named only if it fits every
row, or more than half of them: then the others are listed.
"""

from collections.abc import Callable, Iterator, Sequence

from quantbench.estimate.audit_energy import cards, energy_findings
from quantbench.estimate.datasheets import known
from quantbench.estimate.findings import (
    NAMED,
    Finding,
    Pair,
    common,
    is_most,
    name_of,
    named,
    pairs_of,
)
from quantbench.estimate.headings import COLUMNS
from quantbench.estimate.tables import Number, Table
from quantbench.text import counted

COARSE = 0.05  # a figure that may be off by more than this share of itself says little


def audit(table: Table) -> list[Finding]:
    """What does not hold in a table, and what cannot be told from it."""
    findings = [*_throughput(table), *energy_findings(table)]
    for quantity in table.titles:
        findings += [*_missing(table, quantity), *_errors(table, quantity)]
    findings += [*_copies(table), *_too_large(table)]
    for quantity in table.titles:
        findings += _digits(table, quantity)
    return findings


def _missing(table: Table, quantity: str) -> Iterator[Finding]:
    """Figures that are zero or negative, and cells without one."""
    for column in COLUMNS[:2]:
        figures = [(row, getattr(row.cell(quantity), column)) for row in table.rows]
        if (quantity, column) not in table.columns:
            continue
        zero = [row for row, figure in figures if figure and not figure.value]
        for what, wrong, rows in (
            ("zero", True, [] if quantity == "energy" else zero),
            ("negative", True, [row for row, figure in figures if figure and figure.value < 0]),
            ("no number", False, [row for row, figure in figures if figure is None]),
        ):
            if rows:
                lines = ", ".join(f"{row.model} (line {row.line})" for row in rows[:NAMED])
                text = f"it is {what} in {counted(len(rows), 'row')}: {lines}"
                yield Finding(name_of(table, quantity, column), wrong, text)


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
        pairs = pairs_of(table, "throughput", column)
        if not pairs:
            continue
        name = name_of(table, "throughput", column)
        if table.batch is None or table.length is None:
            yield from _proportional(name, pairs)
            continue
        B, L = table.batch, table.length
        fitting = [
            meaning
            for meaning, of in MEANINGS.items()
            if all(_agrees(value, of, time, B, L) for _, value, time in pairs)
        ]

        def true(pair: Pair, tokens: int = B * L) -> str:
            row, value, time = pair
            return (
                f"tokens per second are {tokens} tokens ÷ {time.value:.3f} s = "
                f"{tokens / time.value:,.0f} for {row.model}, and the table says {value.value:g}"
            )

        if stated in fitting:
            continue
        if fitting:
            yield Finding(name, True, f"it is {fitting[0]}, not {stated}: {true(pairs[0])}")
            continue
        usual, away = _usual_meaning(pairs, B, L)
        if usual not in (stated, None):
            rest = next(pair for pair in pairs if pair not in away)
            text = f"it is {usual}, not {stated}, in {len(pairs) - len(away)} of {len(pairs)} rows "
            text += f"and no unit of the runtime's in {named(away)}: {true(rest)}"
        else:
            away = [p for p in pairs if not _agrees(p[1], MEANINGS[stated], p[2], B, L)]
            text = f"it does not follow from the runtime in {counted(len(away), 'row')} "
            text += f"({named(away)}): {true(away[0])}"
        yield Finding(name, True, text)


def _usual_meaning(pairs: Sequence[Pair], B: int, L: int) -> tuple[str | None, Sequence[Pair]]:
    """What the figures of more than half of the rows are, if of three at least; and the others."""
    away = {
        meaning: [pair for pair in pairs if not _agrees(pair[1], of, pair[2], B, L)]
        for meaning, of in MEANINGS.items()
    }
    usual = min(away, key=lambda meaning: len(away[meaning]))
    fit = len(pairs) - len(away[usual])
    return (usual, away[usual]) if is_most(fit, len(pairs)) else (None, pairs)


def _agrees(
    value: Number, of: Callable[[float, int, int], float], time: Number, B: int, L: int
) -> bool:
    low, high = sorted(of(seconds, B, L) for seconds in (time.low, time.high))
    return value.low <= high * (1 + 1e-9) and low <= value.high * (1 + 1e-9)


def _proportional(name: str, pairs: Sequence[Pair]) -> Iterator[Finding]:
    """Without the number of tokens: whether figures grow with the runtime."""
    span = common([(value.low / time.high, value.high / time.low) for _, value, time in pairs])
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
    name = name_of(table, quantity, "error")
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
    rest = f", in the others it is {best}" if len(away) < len(whole) else ""
    yield Finding(
        name,
        True,
        f"in {counted(len(away), 'row')} of {len(whole)} it follows from no definition{rest}: "
        f"{', '.join(f'{row.model} (line {row.line})' for row in away[:3])}",
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
                name_of(table, quantity, "error"),
                True,
                f"it is the runtime's error in all {len(pairs)} rows: this column was computed "
                "from the runtime, and tests nothing more",
            )


def _too_large(table: Table) -> Iterator[Finding]:
    """Memories that the card does not have."""
    for column in COLUMNS[:2]:
        more: dict[str, list[str]] = {}
        for row in table.rows:
            number = getattr(row.cell("memory"), column)
            count, card = cards(row.device)
            sheet = known(card)
            if number and sheet:
                has = sheet.memory * count
                if table.gibibytes(number).low * (1 << 30) > has:
                    of = f"the {has / (1 << 30):.1f} GiB of {row.device}"
                    more.setdefault(of, []).append(f"{row.model} (line {row.line})")
        for of, rows in more.items():
            text = f"it is more than {of} in {counted(len(rows), 'row')}: {', '.join(rows[:NAMED])}"
            yield Finding(name_of(table, "memory", column), True, text)


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
                name_of(table, quantity, column),
                False,
                f"it has so few digits that it may be off by {off:.0%}: {worst.value:g} for "
                f"{row.model}",
            )
