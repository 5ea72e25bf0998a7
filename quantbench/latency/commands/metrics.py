"""quantbench metrics: time to first token and throughputs of a target against a baseline.

    quantbench metrics --baseline results:none --target results:int8wo
    quantbench metrics --baseline old --target new --narrative report.md

Both are folders that latency --output wrote, or FOLDER:ARM where a folder has several arms.
"""

from pathlib import Path

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.latency import metrics_tables as report
from quantbench.latency.plan import pairs, sides
from quantbench.log.kinds import Whole
from quantbench.log.origin import report_output, write_json
from quantbench.progress import say
from quantbench.text import shown

PROSE = b"# `"  # the start of our reports, which a new report replaces


@click.command(cls=Command)
@click.option("--baseline", metavar="DIR[:ARM]", required=True,
              help="Results to compare with: a folder, and one of its arms")  # fmt: skip
@click.option("--target", metavar="DIR[:ARM]", required=True,
              help="Results to compare: a folder, and one of its arms")  # fmt: skip
@click.option("--baseline_tp", type=Whole(1), help="Take the baseline's tables of N ranks")
@click.option("--target_tp", type=Whole(1), help="Take the target's tables of N ranks")
@click.option("--narrative", "prose", metavar="PATH",
              help="Write a report in prose here, too, as Markdown: PATH ends with .md"
)  # fmt: skip
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
    comparisons = pairs(
        sides("--baseline", baseline, baseline_tp), sides("--target", target, target_tp)
    )
    written = files.Output(
        "--narrative", prose, lambda head: head.startswith(PROSE), "report in prose"
    )
    files.check_outputs([written, report_output(json_path)])
    write_json(json_path, {"comparisons": comparisons})
    if prose:
        files.write_text("--narrative", prose, report.text(comparisons))
        say(f"Wrote {prose}")
    click.echo("\n\n".join(map(report.table, comparisons)))
