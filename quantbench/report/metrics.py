"""A comparison of latencies as a table, and as prose in Markdown: templates/metrics.md.j2.

    files.write_text("--narrative", path, metrics.text(comparisons))

Names from the data become code spans.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jinja2

from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.metrics import Comparison, Metric, Side, Value
from quantbench.text import aligned, counted, one_line

HEADINGS = ["", "tokens", "baseline", "target", "ratio", "interval", "target is"]
TEMPLATES = Path(__file__).parent / "templates"
VERDICTS = (
    ("better", "The target is better in"),
    ("worse", "The baseline is better in"),
    ("no difference shown", "No difference is shown in"),
    ("not in turns", "Without a verdict, as it was not measured in turns:"),
)


def text(comparisons: Sequence[Comparison]) -> str:
    """The whole report. comparisons: at least one."""
    made = jinja2.Environment(  # Markdown, in which HTML's escapes would be shown as they are
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=False,
    )
    made.filters |= {
        name: partial(_counted, f"{name[:-1]}") for name in ("tokens", "ranks", "runs")
    }
    made.filters |= {"code": _code, "sentence": lambda text: text[:1].upper() + text[1:]}
    template = made.get_template("metrics.md.j2")
    given = {"confidence": f"{100 * CONFIDENCE:.0f}", "verdict_words": VERDICTS}
    return template.render(comparisons=comparisons, **given).strip() + "\n"


def _counted(noun: str, number: int) -> str:
    return counted(number, noun)


def _code(name: str) -> str:
    return f"`{one_line(name).replace('`', chr(39)) or '-'}`"


# ---------------------------------------------------------------------------- for a terminal


def table(comparison: Comparison) -> str:
    """Lines for a terminal."""
    baseline, target = comparison.baseline, comparison.target
    rows = [HEADINGS, *map(_row, comparison.metrics)]
    notes = [
        f"{_described(target)} against {_described(baseline)}: prompts of "
        f"{baseline.table.sequence_length} tokens, {baseline.decode_length} generated",
        "",
        aligned(rows, left={0, 1, 6}),
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


def _row(metric: Metric) -> list[str]:
    ratio = metric.ratio
    name = f"{metric.name}, {metric.unit}"
    return [
        name[0].upper() + name[1:],
        metric.counted or "",
        *(_value(value) for value in (metric.baseline, metric.target)),
        ratio.shown[0] if ratio else "-",
        ratio.interval if ratio and ratio.low else "-",
        metric.verdict,
    ]


def _value(value: Value | None) -> str:
    if value is None:
        return "NaN"
    return f"{value.value:.2f} (batch {value.batch_size})"
