"""quantbench growth: what decoding costs as the work grows, each point with its limit.

    quantbench growth                                    # every point: half an hour
    quantbench growth --over batch --values 1,4          # these anew, the others stay
    quantbench growth --over none                        # only draw what the file holds

Points are kept in docs/data/growth.json and drawn in docs/growth.svg. The schemes of a point are
sampled in turns; points are minutes apart, so compare a point with its limit before comparing two
points.
"""

import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.answer.interval import Interval
from quantbench.arguments import names_of, refuse_given
from quantbench.cli import Command
from quantbench.compare.figures import decode_limit
from quantbench.compare.figures.json_rows import DecodeRow
from quantbench.compare.sampling.results import Settings, write_json
from quantbench.errors import LogError, UsageError
from quantbench.log.about import About, about
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.quantize import spec
from quantbench.report.columns import Columns, aligned, interval, number
from quantbench.report.lines import AXES as DRAWN
from quantbench.report.lines import draw
from quantbench.typed_json import from_json

SCHEMES = spec.COMPARED_BRIEFLY
PROCESSES = 4  # of each scheme at a point: the least for an interval
DATA = "docs/data/growth.json"
OF_MEASURING = ("schemes", "checkpoint_path", "device", "max_new_tokens", "max_rounds")


@dataclass(frozen=True)
class Axis:
    """The option of generate.py that grows along an axis, and the values measured."""

    option: str  # of generate.py
    values: tuple[int, ...]  # measured unless --values says otherwise
    model: str  # measured unless --checkpoint_path says otherwise


AXES = {
    "layers": Axis("num_layers", (4, 8, 16, 22), f"dummy:{DRAWN['layers'].model}"),
    "batch": Axis("batch_size", (1, 2, 4, 8, 16), f"dummy:{DRAWN['batch'].model}"),
    "depth": Axis("context_depth", (0, 4096, 16384, 32768, 65536), f"dummy:{DRAWN['depth'].model}"),
}


@dataclass(frozen=True)
class Point:
    """One measurement: its place on an axis, and the figures of its DecodeRow."""

    axis: str
    value: int
    scheme: str
    decode_tok_s: float | None
    limit_tok_s: float | None
    limit_share: Interval | None
    bandwidth: float | None
    step_bytes: float | None
    weight_bytes: int | None
    kernel: str | None
    attention_kernel: str | None
    rounds: int | None
    model: str | None = None  # None: the axis's own

    def check(self) -> None:
        """Raise ValueError, with the value, for what cannot be drawn."""
        if self.axis not in AXES:
            raise ValueError(f"a point's axis is one of {', '.join(AXES)}; given: {self.axis!r}")
        for value in (self.value, self.decode_tok_s, self.limit_tok_s):
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"a point's figures are at least 0 and finite; given: {value}")


FIGURES = [field.name for field in dataclasses.fields(Point)][3:-1]  # that a DecodeRow has as well


@dataclass(frozen=True)
class Points:
    """What the JSON file holds."""

    points: list[Point]
    about: About | None = None  # where the newest points come from


@click.command(cls=Command)
@click.option("--over", metavar="A,B", help=f"What grows [{','.join(AXES)}]; none: only draw")
@click.option("--values", metavar="N,N", help="Values to measure of the one axis in --over")
@click.option("--schemes", metavar="A,B", help=f"Schemes to measure [{','.join(SCHEMES)}]")
@click.option(
    "--checkpoint_path", metavar="PATH", help="A model to measure, instead of each axis's own"
)
@click.option("--device", default="cpu", help="cpu, cuda, xpu, mps, or auto [cpu]")
@click.option(
    "--max_new_tokens", type=click.IntRange(2), default=17, help="New tokens of each sample [17]"
)
@click.option(
    "--max_rounds", type=click.IntRange(1), default=8, help="Rounds of samples at each point [8]"
)
@click.option("--json", "json_path", default=DATA, help=f"Where the points are kept [{DATA}]")
@click.option("--chart", default="docs/growth.svg", help="The picture [docs/growth.svg]")
@click.option("--debug", is_flag=True, help="Show tracebacks")
@click.pass_context
def growth(
    context: click.Context,
    /,
    over: str | None,
    values: str | None,
    schemes: str | None,
    checkpoint_path: str | None,
    device: str,
    max_new_tokens: int,
    max_rounds: int,
    json_path: str,
    chart: str,
    debug: bool,
) -> None:
    """Measure decoding against layers, batch and depth, and draw it."""
    axes = names_of("--over", over, tuple(AXES), (*AXES, "none"))
    if "none" in axes and len(axes) > 1:
        raise UsageError(f"--over none measures nothing: leave out the others; given: {over!r}")
    axes = [name for name in axes if name != "none"]
    if not axes:
        refuse_given(context, OF_MEASURING, "--over none measures nothing: leave it out")
    chosen = [str(spec.parse(name)) for name in names_of("--schemes", schemes, SCHEMES)]
    wanted = {name: whole_numbers(values, name, axes) for name in axes}
    kept = read(json_path)
    points = kept.points
    if Path(chart).suffix != ".svg":
        raise UsageError(f"--chart {chart}: it is drawn as SVG; end its name in .svg")
    files.check_outputs([
        files.Output("--json", json_path, files.is_json, "JSON"),
        files.Output("--chart", chart, files.is_svg, "SVG"),
    ])  # fmt: skip
    if not (axes or points):
        raise UsageError(f"{json_path} holds no points yet, and --over none measures none")
    settings = Settings.of_rounds(max_rounds, PROCESSES)
    common = RunConfig(
        device=device,
        max_new_tokens=max_new_tokens,
        compile=True,
        temperature=0,
        write_result="none",
    )
    configs = {}
    for name, numbers in wanted.items():
        model = checkpoint_path or AXES[name].model
        for value in numbers:
            changes: dict[str, Any] = {AXES[name].option: value, "checkpoint_path": model}
            point = dataclasses.replace(common, **changes)
            configs[name, value] = [
                dataclasses.replace(point, quantization=scheme) for scheme in chosen
            ]
    if checkpoint_path and configs:
        from quantbench.models.loading import load_config  # torch takes its seconds

        load_config(checkpoint_path)  # or every point would fail for a path that names no model
    failed = False
    for (name, value), arms in configs.items():
        say(f"{name} {value}")
        results = decode_limit.measure(arms, settings)
        rows = decode_limit.rows(results)
        for row in rows:
            if row.failed:
                say(f"{name} {value}, {row.arm}: failed: {row.failed}")
        failed = failed or any(row.failed for row in rows)
        new = [_point(name, value, row, checkpoint_path) for row in rows if row.kernel]
        if new:
            points = merged(points, new)
            kept = Points(points, about())
            write_json(json_path, kept)
        if results.ended == "interrupted":
            raise KeyboardInterrupt
    if not points:
        raise LogError(f"{json_path} holds no points yet, and none could be measured")
    files.replace("--chart", chart, lambda path: draw(points, path, caption(kept.about)))
    say(f"Drew {chart}")
    click.echo(aligned(COLUMNS, points))  # last: stdout may be closed
    if failed:
        sys.exit(1)


def whole_numbers(text: str | None, name: str, axes: Sequence[str]) -> tuple[int, ...]:
    """The values to measure along one axis. Raises UsageError for what are none."""
    if text is None:
        return AXES[name].values
    if len(axes) != 1:
        raise UsageError("--values are those of one axis: name it with --over")
    words = names_of("--values", text, ())
    if not all(re.fullmatch("[0-9]{1,18}", word) for word in words):
        raise UsageError(f"--values takes whole numbers such as 1,4; given: {text!r}")
    return tuple(map(int, words))


def read(path: str) -> Points:
    """What the file holds; no points where there is no file yet."""
    if not os.path.lexists(path):
        return Points([])
    try:
        kept = from_json(Points, files.read_json("--json", path, LogError))
        for point in kept.points:
            point.check()
    except ValueError as error:
        raise UsageError(f"--json {path} is not what this command writes: {error}") from None
    return kept


def caption(of: About | None) -> str:
    """Machine and date of the newest points, where they are known."""
    return f"{of.machine}, {of.date}" if of else ""


def merged(old: Sequence[Point], new: Sequence[Point]) -> list[Point]:
    """All of them, a new point in the place of an old one of the same axis, value and scheme."""
    by_place = {_place(point): point for point in (*old, *new)}
    return [by_place[place] for place in sorted(by_place)]


def _place(point: Point) -> tuple[int, str, int]:
    return list(AXES).index(point.axis), point.scheme, point.value


def _point(axis: str, value: int, row: DecodeRow, model: str | None) -> Point:
    figures = {name: getattr(row, name) for name in FIGURES}
    return Point(axis, value, row.scheme or "", **figures, model=model)


COLUMNS: Columns[Point] = [
    ("over", lambda point: point.axis),
    ("value", lambda point: str(point.value)),
    ("scheme", lambda point: point.scheme),
    ("decode", number(lambda point: point.decode_tok_s, ".2f", suffix=" tok/s")),
    ("limit", number(lambda point: point.limit_tok_s, ".2f", suffix=" tok/s")),
    ("of the limit", interval(lambda point: point.limit_share, ".1%")),
]
