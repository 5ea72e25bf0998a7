"""A comparison of latencies as prose: Markdown or LaTeX, of sentences that recompute from the data.

    text = narrative(comparisons, "markdown")

Every sentence with a number or a direction ("lower", "better") is made here, from one template
each, and tests/compare/test_narrative.py computes each anew from the samples. A name that comes
from the data stands between the marks of `_name`, which become a code span: no number in it is a
claim.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from quantbench.compare.figures.metrics import CONFIDENCE, Comparison, Metric, Side, Verdict
from quantbench.text import counted, one_line

Form = Literal["markdown", "latex"]
Kind = Literal["title", "section", "paragraph"]
OPEN, CLOSE = "«", "»"
METHOD = (
    "A ratio below 1 means that the target is better: Ratio_Latency is target ÷ baseline, and "
    "Ratio_Throughput is baseline ÷ target. "
    f"The intervals of one section hold together with {100 * CONFIDENCE:.0f} % confidence, over "
    "the runs of one process on either side."
)
OTHER_MACHINE = "The two were measured on different machines, which the ratios compare as well."
OTHER_FOLDER = (
    "The two are of different results folders: what changed on the machine between them is in the "
    "ratios."
)


def narrative(comparisons: Sequence[Comparison], form: Form) -> str:
    """The whole report. comparisons: at least one."""
    blocks: list[tuple[Kind, str]] = [("title", _title(comparisons[0]))]
    blocks.append(("paragraph", _overall([c.metrics for c in comparisons])))
    for _, group in groupby(comparisons, key=_setting):
        alike = list(group)
        blocks += _setup(alike[0])
        for comparison in alike:
            blocks += _results(comparison)
    return markdown(blocks) if form == "markdown" else latex(blocks)


def _setting(comparison: Comparison) -> tuple[tuple[str, str, str, int], ...]:
    """What the sides are, but for the lengths."""
    return tuple(
        (side.folder, *side.table.key[:3]) for side in (comparison.baseline, comparison.target)
    )


def _title(comparison: Comparison) -> str:
    baseline, target = comparison.baseline.table.arm, comparison.target.table.arm
    return f"{_name(target)} compared with {_name(baseline)}"


def _overall(metrics: Iterable[Iterable[Metric]]) -> str:
    verdicts: list[Verdict] = [metric.verdict for each in metrics for metric in each]
    better, worse, undecided, missing = (
        verdicts.count(verdict)
        for verdict in ("better", "worse", "no difference shown", "not measured")
    )
    return (
        f"Of {counted(len(verdicts), 'metric')}, the target is better in {better} and worse in "
        f"{worse}; {undecided} show no difference, and {missing} lack a measurement."
    )


# ---------------------------------------------------------------------------------- the setup


def _setup(comparison: Comparison) -> list[tuple[Kind, str]]:
    baseline, target = comparison.baseline, comparison.target
    blocks: list[tuple[Kind, str]] = [("section", "What was compared")]
    blocks += [("paragraph", _described("baseline", baseline))]
    blocks += [("paragraph", _described("target", target))]
    notes = [METHOD]
    machines = [side.table.carried and side.table.carried.machine for side in (baseline, target)]
    if machines[0] != machines[1]:
        notes.append(OTHER_MACHINE)
    if baseline.folder != target.folder:
        notes.append(OTHER_FOLDER)
    return [*blocks, ("paragraph", " ".join(notes))]


def _described(which: str, side: Side) -> str:
    table = side.table
    model, carried = table.model, table.carried
    said = [
        f"The {which} is arm {_name(table.arm)} of {_name(side.folder)} on "
        f"{counted(table.ranks, 'rank')}."
    ]
    if model is None:
        said.append(f"Its model {_name(table.checkpoint)} was not loaded.")
    else:
        said.append(
            f"Its model {_name(model.name)} has {counted(model.layers, 'layer')} of width "
            f"{model.width}, {counted(model.heads, 'query head')}, "
            f"{counted(model.kv_heads, 'key/value head')}, a feed-forward width of "
            f"{model.feed_forward} and a vocabulary of {counted(model.vocabulary, 'token')}."
        )
    if carried is not None:
        by = [f"{what} {_name(name)}" for what, name in
              (("kernel", carried.kernel), ("decoder", carried.decoder)) if name]  # fmt: skip
        using = f" with {' and '.join(by)}" if by else ""
        said.append(
            f"It ran in {_name(carried.precision)} on {_name(carried.device)}{using}, on "
            f"{_name(carried.machine)}."
        )
        compiled = ", ".join(map(_name, carried.compiled))
        said.append(f"Compiled was {compiled}." if compiled else "Nothing was compiled.")
    said.append(
        f"Each of its cells has up to {counted(side.runs, 'run')} after "
        f"{counted(side.warmups, 'warm-up')}."
    )
    return " ".join(said)


# ---------------------------------------------------------------------------------- the results


def _results(comparison: Comparison) -> list[tuple[Kind, str]]:
    table, output = comparison.baseline.table, comparison.baseline.decode_length
    heading = (
        f"Prompts of {counted(table.sequence_length, 'token')}, "
        f"answers of {counted(output, 'token')}"
    )
    blocks: list[tuple[Kind, str]] = [("section", heading)]
    blocks += [("paragraph", sentence(metric)) for metric in comparison.metrics]
    for which, side in (("baseline", comparison.baseline), ("target", comparison.target)):
        missing = [
            f"For the {which}, batch size {cell.batch_size} was not measured: {_name(cell.reason)}."
            for cell in side.table.cells
            if cell.reason is not None
        ]
        blocks += [("paragraph", " ".join(missing))] if missing else []
    return blocks


def sentence(metric: Metric) -> str:
    """One or two sentences: the values, then the ratio with its direction in words."""
    what = f"The {metric.name}"
    if metric.counted is not None:
        what += f", counted in {metric.counted} tokens,"
    if metric.baseline is None or metric.target is None or metric.ratio is None:
        return f"{what} was not measured on both sides: {_name(metric.reason or '')}."
    values = " and ".join(
        f"{value.value:.2f} {metric.unit} for the {which} at batch size {value.batch_size}"
        for which, value in (("target", metric.target), ("baseline", metric.baseline))
    )
    return f"{what} is {values}. {_ratio(metric)}"


def _ratio(metric: Metric) -> str:
    ratio = metric.ratio
    assert ratio is not None
    value, *ends = ratio.shown
    if not ends:
        return (
            f"{ratio.name} is {value}, from too few runs for an interval: no difference is shown."
        )
    said = f"{ratio.name} is {value}, with an interval from {ends[0]} to {ends[1]}"
    if ratio.verdict == "no difference shown":
        return f"{said}, which contains 1: no difference is shown."
    # A throughput's change is that of tokens per second, which is 1 / ratio.
    change = ratio.value - 1 if metric.counted is None else 1 / ratio.value - 1
    noun = "latency" if metric.counted is None else "throughput"
    direction = "higher" if change > 0 else "lower"
    return (
        f"{said}: the target's {noun} is {percent(change)} % {direction}, which is {ratio.verdict}."
    )


def percent(change: float) -> str:
    """The size of a change in percent: one decimal, or as many as it takes not to read as 0."""
    decimals = 1
    while decimals < 12 and change and not float(f"{100 * change:.{decimals}f}"):
        decimals += 1
    return f"{100 * abs(change):.{decimals}f}"


# ---------------------------------------------------------------------------------- the two forms


def _name(text: str) -> str:
    """A name from the data, between marks."""
    return f"{OPEN}{one_line(text).replace(OPEN, '<').replace(CLOSE, '>') or '-'}{CLOSE}"


def markdown(blocks: Sequence[tuple[Kind, str]]) -> str:
    """Names are code spans; a backtick in one is written as an apostrophe."""
    marks = {"title": "# ", "section": "## ", "paragraph": ""}
    texts = [
        marks[kind] + text.replace("`", "'").replace(OPEN, "`").replace(CLOSE, "`")
        for kind, text in blocks
    ]
    return "\n\n".join(texts) + "\n"


ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "÷": r"\ensuremath{\div}",
    "×": r"\ensuremath{\times}",
    "±": r"\ensuremath{\pm}",
    OPEN: r"\texttt{",
    CLOSE: "}",
}


def latex(blocks: Sequence[tuple[Kind, str]]) -> str:
    """The report as a whole document for pdflatex."""
    marks = {"title": r"\section*{%s}", "section": r"\subsection*{%s}", "paragraph": "%s"}
    texts = [marks[kind] % "".join(ESCAPES.get(c, c) for c in text) for kind, text in blocks]
    head = "\\documentclass{article}\n\\usepackage[T1]{fontenc}\n\\begin{document}"
    return "\n\n".join([head, *texts, "\\end{document}"]) + "\n"
