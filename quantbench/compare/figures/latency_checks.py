"""What must agree within latency tables, and what does not: a Finding for each line.

    findings(read(text), decode_length=8)   # [Finding(12, "p90 18.07 is below the average 18.78")]

Numbers are shown with two decimals, so each is known to half of the last one, and the old tool cut
its milliseconds to whole microseconds before. A figure disagrees only where no numbers that would
be shown like this agree.

- In a row: lowest ≤ average ≤ highest, lowest ≤ p50 ≤ p90 ≤ p99 ≤ highest, average ≤ p90, and
  all of the figures are NaN or none is. An average may exceed p90 where a few samples are far
  above all others; percentiles that are out of order were not taken from sorted samples.
- Decode (total) is (decode_length - 1) × Decode (token), column by column.
- The lowest rate is the work divided by the highest latency, and the other way round. The mean of
  rates is at least the rate at the mean latency, and at most what a chord of 1/x through the lowest
  and highest latency gives there; in the correct style the average is the rate at the mean latency.
- Every step has the same batch sizes, in both tables.
- The error of an estimate is (estimated − measured) ÷ measured, and what was measured is the
  average of the table of latencies.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from quantbench.compare.figures.latency import Against, Rate, Row, Summary
from quantbench.compare.output.latency_tables import Document, MarkdownTable, Table

HALF = 0.005  # half a unit of the last decimal shown
CUT = 0.001  # ms: the old tool kept whole microseconds
SHARE = 1e-9  # relative tolerance for the rounding of binary fractions
PREFILL, TOKEN, TOTAL = "Prefill", "Decode (token", "Decode (total)"  # how the steps' names begin
COLUMNS = ("average", "lowest", "highest", "p50", "p90", "p99")


@dataclass(frozen=True)
class Finding:
    """Two figures, or rows, of a table that contradict each other."""

    line: int  # of the text, from 1
    text: str


@dataclass(frozen=True)
class _Line:
    """A row and the line where it stands."""

    line: int
    row: Row


def findings(document: Document, decode_length: int | None = None) -> list[Finding]:
    """What does not agree, ordered by line.

    decode_length: stands for a parameter table that does not say it. If that is None, too, it is
    inferred from the rows (`inferred`).
    """
    disagree: list[Finding] = []
    parameters: Table | None = None
    averages: Table | None = None  # the last table of latencies
    latency: MarkdownTable | None = None  # the same, until its table of rates came
    for at in document.tables:
        table = at.table
        if table is None:
            continue
        if table.kind == "parameters":
            parameters = table
            continue
        rows = [_Line(at.line_of(n), row) for n, row in enumerate(table.rows)]
        if table.kind == "estimates":
            disagree += [*_steps(table, rows), *_against(averages, rows)]
            continue
        disagree += [Finding(r.line, text) for r in rows if (text := _within(r.row))]
        disagree += _steps(table, rows)
        if table.kind == "latency":
            latency, averages = at, table
            length = (parameters and parameters.number("Decode Length")) or decode_length
            disagree += _totals(rows, (length or inferred(table)) - 1)
        elif latency is not None and latency.table is not None:
            disagree += _rates(latency.table, rows, table, parameters, decode_length)
            disagree += _same_batch_sizes(latency.table, rows)
            latency = None
    return sorted(disagree, key=lambda finding: finding.line)


def inferred(table: Table) -> int:
    """The decode length that the median row of a latency table has: total ÷ token + 1; 1 if no row
    says."""
    tokens = {r.batch_size: r.figures.average for r in table.rows if r.step.startswith(TOKEN)}
    ratios = [
        row.figures.average / tokens[row.batch_size]
        for row in table.rows
        if row.step == TOTAL and tokens.get(row.batch_size, 0.0) > 0
    ]
    finite = [ratio for ratio in ratios if math.isfinite(ratio)]
    return round(statistics.median(finite)) + 1 if finite else 1


def _within(row: Row) -> str:
    """What does not agree among a row's own figures."""
    figures = row.figures
    values = figures.values
    missing = [name for name, value in values.items() if math.isnan(value)]
    if missing:
        if len(missing) == len(values):
            return ""
        return f"{_name(row)}: {', '.join(missing)} NaN, and the other figures are not"
    orders = [("lowest", "average"), ("average", "highest")]
    if isinstance(figures, Summary):
        orders += [("lowest", "p50"), ("p50", "p90"), ("p90", "p99"), ("p99", "highest")]
        orders += [("lowest", "p90"), ("lowest", "p99"), ("average", "p90")]
        orders += [("p50", "highest"), ("p90", "highest")]
    wrong = [
        f"{high} {values[high]:.2f} is below {low} {values[low]:.2f}"
        for low, high in orders
        if values[high] < values[low]
    ]
    if figures.interval and not figures.interval[0] <= figures.average <= figures.interval[1]:
        wrong.append("the average is outside of its interval")
    return f"{_name(row)}: {'; '.join(wrong)}" if wrong else ""


def _steps(table: Table, rows: list[_Line]) -> Iterator[Finding]:
    """Rows that stand twice, of steps that such a table does not have, or missing."""
    first: dict[tuple[str, str, int], int] = {}
    for at in rows:
        key = at.row.step, at.row.unit, at.row.batch_size
        if key[:2] not in table.steps:
            known = ", ".join(dict.fromkeys(step for step, _ in table.steps))
            yield Finding(at.line, f"{_name(at.row)}: no such step; there are {known}")
        elif key in first:
            yield Finding(at.line, f"{_name(at.row)}: stands in line {first[key]} already")
        first.setdefault(key, at.line)
    for step, unit, size in table.missing:
        lines = [line for key, line in first.items() if key[:2] == (step, unit)]
        last = max(lines or first.values())
        yield Finding(last, f"{step}: batch size {size} has no row, and other steps have one")


def _totals(rows: list[_Line], steps: int) -> Iterator[Finding]:
    tokens = {at.row.batch_size: at.row.figures for at in rows if at.row.step.startswith(TOKEN)}
    for at in rows:
        token = tokens.get(at.row.batch_size)
        if at.row.step != TOTAL or token is None:
            continue
        wrong = []
        for name in COLUMNS:
            total, single = getattr(at.row.figures, name), getattr(token, name)
            slack = HALF + steps * (HALF + CUT) + SHARE * abs(total)
            # A difference of infinite numbers is no number, and disagrees with nothing.
            if abs(total - steps * single) > slack or math.isnan(total) != math.isnan(single):
                wrong.append(f"{name} {total:.2f} is not {steps} × {single:.2f}")
        if wrong:
            yield Finding(at.line, f"{_name(at.row)}: {'; '.join(wrong)} ms")


def _rates(
    latency: Table,
    rows: list[_Line],
    table: Table,
    parameters: Table | None,
    decode_length: int | None,
) -> Iterator[Finding]:
    named = parameters.number("Decode Length") if parameters else None
    steps = (named or decode_length or inferred(latency)) - 1
    prompt = parameters.number("Sequence Length") if parameters else None
    for at in rows:
        row, works = at.row, {"tokens/secs": 1, "requests/s": 1, "tokens/s": prompt}
        is_prefill = row.step.startswith(PREFILL)
        each = works.get(row.unit) if is_prefill else steps
        step = PREFILL if is_prefill else TOTAL
        times = next(
            (
                r.figures
                for r in latency.rows
                if r.batch_size == row.batch_size and r.step.startswith(step)
            ),
            None,
        )
        if each and isinstance(times, Summary) and isinstance(row.figures, Rate):
            mean_of_rates = table.style == "legacy"
            if text := _rate(row.figures, times, row.batch_size * each, row.unit, mean_of_rates):
                yield Finding(at.line, f"{_name(row)}: {text}")


def _rate(rate: Rate, times: Summary, work: float, unit: str, mean_of_rates: bool) -> str:
    """What does not agree between rates and milliseconds of the same work."""
    if math.isnan(rate.average) or math.isnan(times.average):
        both = math.isnan(rate.average) == math.isnan(times.average)
        return "" if both else "NaN in one of the two tables, and not in the other"
    wrong = []
    expected = {
        "lowest": _rate_at(work, times.highest),
        "highest": (_rate_at(work, times.lowest)),
        "average": _rate_at(work, times.average),
    }
    if mean_of_rates:
        ends = [(v - HALF, v + HALF + CUT) for v in (times.average, times.lowest, times.highest)]
        chords = [
            1e3 * work * (low + high - mean) / (low * high)
            for mean, low, high in product(*ends)
            if low > 0 and high > 0
        ]
        finite = filter(math.isfinite, chords)
        expected["average"] = (expected["average"][0], max(finite, default=math.inf))
    for name, (low, high) in expected.items():
        value = getattr(rate, name)
        slack = HALF + SHARE * abs(value)
        if value + slack < low or value - slack > high:
            wrong.append(f"{name} {value:.2f} {unit}, and the latencies say {_range(low, high)}")
    return "; ".join(wrong)


def _rate_at(work: float, milliseconds: float) -> tuple[float, float]:
    """The smallest and the largest rate of work that takes so long as is shown."""
    shortest, longest = milliseconds - HALF, milliseconds + HALF + CUT
    return 1e3 * work / longest, 1e3 * work / shortest if shortest > 0 else math.inf


def _range(low: float, high: float) -> str:
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _same_batch_sizes(latency: Table, rows: list[_Line]) -> Iterator[Finding]:
    """Batch sizes that only one of the two tables has at all."""
    if not rows:
        return
    here = {at.row.batch_size for at in rows}
    there = {row.batch_size for row in latency.rows}
    for size in sorted(here ^ there):
        which = "latencies" if size in here else "rates"
        yield Finding(rows[-1].line, f"batch size {size}: there are no {which} of it")


def _against(latency: Table | None, rows: list[_Line]) -> Iterator[Finding]:
    """Errors that do not follow from their row, and measured averages of another table."""
    averages = {
        (row.step, row.batch_size): row.figures.average
        for row in (latency.rows if latency else ())
        if isinstance(row.figures, Summary)
    }
    for at in rows:
        row, figures = at.row, at.row.figures
        if not isinstance(figures, Against):
            continue
        average = averages.get((row.step, row.batch_size), figures.measured)
        if abs(average - figures.measured) > HALF or math.isnan(average) != math.isnan(
            figures.measured
        ):
            yield Finding(
                at.line, f"{_name(row)}: measured {figures.measured:.2f}, average {average:.2f} ms"
            )
        ends = [figures.estimated + way * HALF for way in (-1, 1)]
        measured = [max(figures.measured + way * HALF, HALF / 10) for way in (-1, 1)]
        shares = [end / other - 1 for end in ends for other in measured]
        if not math.isnan(figures.error) and not (
            min(shares) - HALF / 100 <= figures.error <= max(shares) + HALF / 100
        ):
            yield Finding(at.line, f"{_name(row)}: the error is {100 * shares[0]:+.2f} %")


def _name(row: Row) -> str:
    return f"{row.step}, batch size {row.batch_size}"
