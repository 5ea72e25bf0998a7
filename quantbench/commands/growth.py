"""quantbench growth: what decoding costs as the work grows, each point with its limit.

    quantbench growth                                    # every point: half an hour
    quantbench growth --over batch --values 1,4          # these anew, the others stay
    quantbench growth --over none                        # only draw what the file holds

The command keeps points in docs/data/growth.json and draws them in docs/growth.svg. The
schemes of a point take turns; points are minutes apart, so compare a point with its limit before
comparing two points.
"""

import dataclasses
import sys
from typing import Any

import click

from quantbench import files
from quantbench.answer import decode_limit
from quantbench.answer.growth import AXES, Point, Points, merged, read, whole_numbers
from quantbench.arguments import names_of, refuse_given
from quantbench.bench.store import Settings
from quantbench.cli import Command
from quantbench.errors import LogError, UsageError
from quantbench.log.about import about, write_json
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Whole
from quantbench.log.options import options
from quantbench.plans.compare_options import decoding
from quantbench.progress import say
from quantbench.quantize import spec
from quantbench.report.columns import Columns, aligned, interval, number
from quantbench.report.limit_tables import draw

SCHEMES = spec.COMPARED_BRIEFLY
DEFAULTS = {"device": "cpu", "max_new_tokens": 17}  # other than generate.py's
PROCESSES = 2  # of each scheme at a point
DATA, CHART = "docs/data/growth.json", "docs/growth.svg"
OF_MEASURING = ("schemes", "checkpoint_path", "device", "max_new_tokens", "cycles")


@click.command(cls=Command)
@click.option("--over", metavar="A,B", help=f"What grows [{','.join(AXES)}]; none: only draw")
@click.option("--values", metavar="N,N", help="Values to measure of the one axis in --over")
@click.option("--schemes", metavar="A,B", help=f"Schemes to measure [{','.join(SCHEMES)}]")
@click.option("--checkpoint_path", metavar="PATH",
              help="A model to measure, instead of each axis's own")  # fmt: skip
@click.option("--cycles", type=Whole(1), default=16,
              help="Turns of each process at each point [16]; intervals need 8")  # fmt: skip
@click.option("--json", "json_path", default=DATA, help=f"Where the points are kept [{DATA}]")
@click.option("--chart", default=CHART, help=f"The picture [{CHART}]")
@options("debug", defaults=DEFAULTS)
def growth(
    over: str | None,
    values: str | None,
    schemes: str | None,
    checkpoint_path: str | None,
    cycles: int,
    json_path: str,
    chart: str,
    config: RunConfig,
) -> None:
    """Measure decoding against layers, batch and depth, and draw it."""
    axes = names_of("--over", over, tuple(AXES), (*AXES, "none"))
    if "none" in axes and len(axes) > 1:
        raise UsageError(f"--over none measures nothing: leave out the others; given: {over!r}")
    axes = [name for name in axes if name != "none"]
    if not axes:
        refuse_given(OF_MEASURING, "--over none measures nothing: leave it out")
    names = names_of("--schemes", schemes, SCHEMES)
    chosen = [str(spec.parse(name, "--schemes")) for name in names]
    wanted = [(name, value) for name in axes for value in whole_numbers(values, name, axes)]
    data = read(json_path)
    kept = files.Output("--json", json_path if axes else None, files.is_json, "JSON")
    files.check_outputs([files.svg_output(chart), kept], {} if axes else {"--json": json_path})
    if not (axes or data.points):
        why = files.missing(json_path) or "it holds no points yet"
        raise UsageError(files.refusal("--json", json_path, why, "--over none measures none"))
    common = decoding(config)
    if checkpoint_path and wanted:
        from quantbench.models.loading import load_config  # torch takes its seconds

        load_config(checkpoint_path)  # or every point would fail for a path that names no model
    failed = False
    for name, value in wanted:
        say(f"{name} {value}")
        model = checkpoint_path or f"dummy:{AXES[name].model}"
        changes: dict[str, Any] = {AXES[name].option: value, "checkpoint_path": model}
        point = dataclasses.replace(common, **changes)
        arms = [dataclasses.replace(point, quantization=scheme) for scheme in chosen]
        settings = Settings(cycles=cycles, processes=PROCESSES, tokens=0)
        results = decode_limit.measure(decode_limit.arms_of(arms), settings)
        rows = decode_limit.rows(results)
        for row in rows:
            if row.failed:
                say(f"{name} {value}, {row.arm}: failed: {row.failed}")
                failed = True
        place: dict[str, Any] = {"axis": name, "value": value, "model": checkpoint_path}
        new = [Point(**vars(row), **place) for row in rows if row.kernel]
        if new:
            data = Points(merged(data.points, new), about())
            write_json(json_path, data)
        if results.ended == "interrupted":
            raise KeyboardInterrupt
    if not data.points:
        raise LogError(f"{json_path} holds no points yet, and none could be measured")
    caption = f"{data.about.machine}, {data.about.date}" if data.about else ""
    files.replace("--chart", chart, lambda path: draw(data.points, path, caption))
    say(f"Drew {chart}")
    click.echo(aligned(COLUMNS, data.points))  # last: stdout may be closed
    if failed:
        sys.exit(1)


COLUMNS: Columns[Point] = [
    ("over", lambda point: point.axis),
    ("value", lambda point: str(point.value)),
    ("scheme", lambda point: point.scheme or "-"),
    ("decode", number(lambda point: point.decode_tok_s, ".2f", suffix=" tok/s")),
    ("limit", number(lambda point: point.limit_tok_s, ".2f", suffix=" tok/s")),
    ("of the limit", interval(lambda point: point.limit_share, ".1%")),
]
