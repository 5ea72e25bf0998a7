"""quantbench metrics: time to first token and throughputs of a target against a baseline.

    quantbench metrics --baseline results:none --target results:int8wo
    quantbench metrics --baseline old --target new --narrative report.md

Both are folders that latency --output wrote, or FOLDER:ARM where a folder has several arms.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from quantbench import files
from quantbench.answer import latency as answers
from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.metrics import Comparison, Metric, Side, Value, compare
from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.log.about import report_output, write_json
from quantbench.progress import say
from quantbench.report import metrics as prose_report
from quantbench.text import aligned, shown

PROSE = b"# `"  # how a report of ours begins, which a new one replaces
HEADINGS = ["", "tokens", "baseline", "target", "ratio", "interval", "target is"]


@click.command(cls=Command)
@click.option(
    "--baseline",
    metavar="DIR[:ARM]",
    required=True,
    help="Results to compare with: a folder, and one of its arms",
)
@click.option(
    "--target",
    metavar="DIR[:ARM]",
    required=True,
    help="Results to compare: a folder, and one of its arms",
)
@click.option("--baseline_tp", type=click.IntRange(1), help="Take the baseline's tables of N ranks")
@click.option("--target_tp", type=click.IntRange(1), help="Take the target's tables of N ranks")
@click.option(
    "--narrative",
    "prose",
    metavar="PATH",
    help="Write a report in prose here, too, as Markdown: PATH ends with .md",
)
@click.option("--json", "json_path", metavar="PATH", help="Write all figures here, too")
def metrics(
    baseline: str,
    target: str,
    baseline_tp: int | None,
    target_tp: int | None,
    prose: str | None,
    json_path: str | None,
) -> None:
    """Compare a TARGET's latencies and throughputs with a BASELINE's; below 1 the target is better.

    Ratio_Latency is target ÷ baseline, Ratio_Throughput is baseline ÷ target.
    """
    if prose is not None and Path(prose).suffix != ".md":
        raise UsageError(f"--narrative takes a path that ends with .md; given: {shown(prose)}")
    comparisons = _pairs(
        sides("--baseline", baseline, baseline_tp), sides("--target", target, target_tp)
    )
    written = files.Output("--narrative", prose, files.begins_with(PROSE), "report in prose")
    files.check_outputs([written, report_output(json_path)])
    if json_path:
        write_json(json_path, {"comparisons": comparisons})
    if prose:
        files.write_text("--narrative", prose, prose_report.text(comparisons))
        say(f"Wrote {prose}")
    click.echo("\n\n".join(map(table, comparisons)))


# ---------------------------------------------------------------------------------- which tables


def sides(option: str, text: str, ranks: int | None) -> list[Side]:
    """The tables of one arm of a folder. Raises UsageError, one line."""
    folder, colon, arm = text, "", ""
    if not os.path.isdir(text):
        folder, colon, arm = text.rpartition(":")
        if not colon:
            folder = text
    measured = answers.load(Path(folder), option)
    plan, arms = measured.plan, [planned.name for planned in measured.plan.arms]
    if not colon and len(arms) == 1:
        arm = arms[0]
    if arm not in arms:
        given = f"there is no arm {shown(arm)}" if colon else "it has several arms"
        raise UsageError(f"{option} {folder}: {given}; give {folder}:ARM, one of {_listed(arms)}")
    chosen = [
        Side(folder, table, plan.decode_length, plan.runs)
        for table in measured.tables
        if table.arm == arm and ranks in (None, table.ranks)
    ]
    if not chosen:
        there = sorted({table.ranks for table in measured.tables if table.arm == arm})
        what = f"of {ranks} ranks" if ranks else "measured"
        raise UsageError(
            f"{option} {text}: no table {what}; there are tables of {_listed(there)} ranks"
        )
    return chosen


def _pairs(baselines: Sequence[Side], targets: Sequence[Side]) -> list[Comparison]:
    """The tables of the same model, ranks and sequence length. A model or a number of ranks that
    is the only one on its side may differ from the other's."""
    if {(s.folder, s.table.key) for s in baselines} == {(s.folder, s.table.key) for s in targets}:
        raise UsageError("--baseline and --target are the same tables: give another arm or folder")
    lengths = [{side.decode_length for side in some} for some in (baselines, targets)]
    if lengths[0] != lengths[1]:
        raise UsageError(
            f"the baseline decodes {_listed(lengths[0])} tokens and the target "
            f"{_listed(lengths[1])}: not the same work"
        )
    single = [
        all(len({side.table.key[place] for side in some}) == 1 for some in (baselines, targets))
        for place in (0, 2)
    ]

    def key(side: Side) -> tuple[object, ...]:
        table = side.table
        model = None if single[0] else table.checkpoint
        return model, None if single[1] else table.ranks, table.sequence_length

    by_key = {key(side): side for side in targets}
    pairs = [compare(side, by_key[key(side)]) for side in baselines if key(side) in by_key]
    if not pairs:
        both = [sorted({side.table.sequence_length for side in s}) for s in (baselines, targets)]
        raise UsageError(
            "no table of the baseline has one of the same model, ranks and sequence length in the "
            f"target: sequence lengths {_listed(both[0])} and {_listed(both[1])}"
        )
    return pairs


def _listed(names: Sequence[object] | set[int]) -> str:
    return ", ".join(map(str, names)) or "none"


# ---------------------------------------------------------------------------------- the table


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
