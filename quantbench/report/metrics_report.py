"""A comparison of latencies as prose, in Markdown.

    files.write_text("--narrative", path, metrics_report.text(comparisons))

Names from the data become code spans.
"""

from collections.abc import Sequence
from string import Template

from quantbench.compare.figures.metrics import CONFIDENCE, Comparison, Metric, Side
from quantbench.text import counted, one_line

REPORT = Template(f"""\
# $target compared with $baseline

A ratio below 1 means that the target is better: Ratio_Latency is target ÷ baseline, and \
Ratio_Throughput is baseline ÷ target. The intervals of one section hold together with \
{100 * CONFIDENCE:.0f} % confidence, over the runs of one process on either side.
$sections""")
SECTION = Template("""
## Prompts of $prompt, answers of $answer

The baseline is $baseline. The target is $target.$apart

$metrics

$where
""")
APART = " They are of different folders, or machines: what else changed is in the ratios, too."
VERDICTS = {
    "better": "The target is better in",
    "worse": "The baseline is better in",
    "no difference shown": "No difference is shown in",
    "not measured": "Not measured on both sides:",
}


def text(comparisons: Sequence[Comparison]) -> str:
    """The whole report. comparisons: at least one."""
    return REPORT.substitute(
        target=_code(comparisons[0].target.table.arm),
        baseline=_code(comparisons[0].baseline.table.arm),
        sections="".join(map(_section, comparisons)),
    )


def _section(comparison: Comparison) -> str:
    baseline, target = comparison.baseline, comparison.target
    where = [
        f"{said} {', '.join(names)}."
        for verdict, said in VERDICTS.items()
        if (names := [_named(m) for m in comparison.metrics if m.verdict == verdict])
    ]
    return SECTION.substitute(
        prompt=counted(baseline.table.sequence_length, "token"),
        answer=counted(baseline.decode_length, "token"),
        baseline=_described(baseline),
        target=_described(target),
        apart="" if _place(baseline) == _place(target) else APART,
        metrics="\n".join(f"- {_sentence(metric)}" for metric in comparison.metrics),
        where=" ".join(where),
    )


def _place(side: Side) -> tuple[str, str | None]:
    return side.folder, side.table.carried.machine if side.table.carried else None


def _described(side: Side) -> str:
    table, carried = side.table, side.table.carried
    said = f"arm {_code(table.arm)} of {_code(side.folder)}, {counted(table.ranks, 'rank')}, model "
    said += _code(table.model.name if table.model else table.checkpoint)
    if carried is not None:
        said += f" in {_code(carried.precision)} on {_code(carried.device)} of "
        said += _code(carried.machine)
    return f"{said}, up to {counted(side.runs, 'run')} of each batch size"


def _named(metric: Metric) -> str:
    return f"{metric.name} ({metric.counted} tokens)" if metric.counted else metric.name


def _sentence(metric: Metric) -> str:
    """The values, then the ratio with its interval."""
    name = _named(metric)[0].upper() + _named(metric)[1:]
    if metric.baseline is None or metric.target is None or metric.ratio is None:
        return f"{name} was not measured on both sides: {_code(metric.reason or '')}."
    (new, old) = (
        f"{value.value:.2f} {metric.unit} for the {side} at batch size {value.batch_size}"
        for side, value in (("target", metric.target), ("baseline", metric.baseline))
    )
    ratio, *ends = metric.ratio.shown
    interval = f"interval {ends[0]} to {ends[1]}" if ends else "too few runs for an interval"
    return f"{name} is {new} and {old}: {metric.ratio.name} {ratio} ({interval})."


def _code(name: str) -> str:
    return f"`{one_line(name).replace('`', chr(39)) or '-'}`"
