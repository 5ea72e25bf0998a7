"""A comparison of latencies as a table, and as prose in Markdown, templates/metrics.md.j2."""

from collections.abc import Sequence

from quantbench.compare.intervals import CONFIDENCE
from quantbench.latency.metrics import Metric, Side, TableComparison, Value
from quantbench.report.columns import Columns, aligned
from quantbench.report.page_templates import filled

VERDICTS = (
    ("better", "The target is better in"),
    ("worse", "The baseline is better in"),
    ("no difference shown", "No difference is shown in"),
    ("not in turns", "Without a verdict, as it was not measured in turns:"),
)
COLUMNS: Columns[Metric] = [
    ("", lambda metric: f"{metric.name[:1].upper()}{metric.name[1:]}, {metric.unit}"),
    ("tokens of", lambda metric: metric.counted or ""),
    ("baseline", lambda metric: _value(metric.baseline)),
    ("target", lambda metric: _value(metric.target)),
    ("ratio", lambda metric: shown(metric)[0]),
    ("interval", lambda metric: ends(metric) if shown(metric)[1:] else "-"),
    ("target is", lambda metric: metric.verdict),
]


def text(comparisons: Sequence[TableComparison]) -> str:
    """The whole report. comparisons: at least one."""
    given = {"confidence": f"{100 * CONFIDENCE:.0f}", "verdict_words": VERDICTS}
    return filled("metrics.md.j2", comparisons=comparisons, shown=shown, ends=ends, **given)


def shown(metric: Metric) -> list[str]:
    """The ratio and its interval's ends, with three decimals, or more where an end would read as 1
    and is not."""
    numbers = metric.ratio.to_json() if metric.ratio else []
    decimals = 3
    while decimals < 12 and any(n != 1 and float(f"{n:.{decimals}f}") == 1 for n in numbers[1:]):
        decimals += 1
    return [f"{n:.{decimals}f}" for n in numbers] or ["-"]


def ends(metric: Metric) -> str:
    """0.81 to 0.83, or why there is no interval."""
    if metric.verdict == "not in turns":
        return "not taken in turns"
    return " to ".join(shown(metric)[1:]) or "too few cycles for an interval"


def table(comparison: TableComparison) -> str:
    """Lines for a terminal."""
    baseline, target = comparison.baseline, comparison.target
    notes = [
        f"{_described(target)} against {_described(baseline)}: prompts of "
        f"{baseline.table.sequence_length} tokens, {baseline.decode_length} generated",
        "",
        aligned(COLUMNS, comparison.metrics),
        f"Intervals hold together with {100 * CONFIDENCE:.0f} %; below 1 the target is better. "
        "Without turns in the same cycles there is no verdict.",
    ]
    notes += [
        f"{', '.join(dict.fromkeys(m.name for m in some))}: not measured ({reason})"
        for reason, some in comparison.missing.items()
    ]
    return "\n".join(notes)


def _described(side: Side) -> str:
    table = side.table
    ranks = f", {table.ranks} ranks" if table.ranks > 1 else ""
    return f"{table.checkpoint} {table.arm}{ranks} ({side.folder})"


def _value(value: Value | None) -> str:
    if value is None:
        return "NaN"
    return f"{value.value:.2f} (batch {value.batch_size})"
