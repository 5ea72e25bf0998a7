"""python -m compare roofline: how near to the limit of memory each scheme comes.

    python -m compare roofline --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    python -m compare roofline --schemes int8wo,fp6 --parts layers --json roofline.json

Decoding reads every weight once for each token, so memory's bandwidth sets the limit. First every
distinct shape among the model's linear layers, alone: time, GB/s, share of the bandwidth, and the
stock kernel beside ours. Then the whole model, each scheme in a process of its own: tokens per
second against what its bytes allow. Bandwidth is read in the same rounds.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

import files
from benchlog.config import PRECISIONS, RunConfig
from cli import Command, say
from compare.arguments import names_of
from compare.figures import decode_limit as whole
from compare.figures.readings import caveats, span
from compare.output.tables import Columns, aligned
from compare.sampling.process import Process
from compare.sampling.results import Reading, Settings, write_json
from errors import UsageError
from quantize import spec

MODEL = "dummy:TinyLlama-1.1B-Chat-v1.0"
SCHEMES = spec.COMPARED
PARTS = ("layers", "model")
Row = dict[str, Any]


@click.command(cls=Command)
@click.option("--checkpoint_path", default=MODEL, metavar="PATH", help=f"[{MODEL}]")
@click.option("--device", default="auto", help="As in generate.py [auto]")
@click.option("--precision", default="bfloat16", help=f"{', '.join(PRECISIONS)} [bfloat16]")
@click.option("--schemes", metavar="A,B", help=f"[{','.join(SCHEMES)}]")
@click.option("--batch_size", type=click.IntRange(1), default=1, help="Rows at once [1]")
@click.option("--num_layers", type=click.IntRange(1), help="Of the whole model, the first N")
@click.option("--parts", metavar="A,B", help=f"[{','.join(PARTS)}]")
@click.option("--max_new_tokens", type=click.IntRange(2), default=33, help="Per sample [33]")
@click.option("--max_rounds", type=click.IntRange(1), default=12, help="Of the whole model [12]")
@click.option("--max_minutes", type=click.FloatRange(0), default=10.0, help="Of these rounds [10]")
@click.option("--processes", type=click.IntRange(1), default=1, help="Start each so often anew [1]")
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, too")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def roofline(
    checkpoint_path: str,
    device: str,
    precision: str,
    schemes: str | None,
    batch_size: int,
    num_layers: int | None,
    parts: str | None,
    max_new_tokens: int,
    max_rounds: int,
    max_minutes: float,
    processes: int,
    json_path: str | None,
    debug: bool,
) -> None:
    """Hold every scheme against the limit that memory's bandwidth sets."""
    specs = [spec.parse(name) for name in names_of("--schemes", schemes, SCHEMES)]
    for one in specs:
        if one.scheme is None or isinstance(one, spec.Int8Embedding):
            raise UsageError(f"--schemes {one}: its layers are those of other schemes; name these")
    # Full precision comes first: it is what the others are compared with.
    chosen = list(dict.fromkeys(["none", *map(str, specs)]))
    wanted = names_of("--parts", parts, PARTS, PARTS)
    files.check_output("--json", json_path, files.is_json, "JSON")
    common = RunConfig(
        checkpoint_path=checkpoint_path,
        device=device,
        precision=precision,
        batch_size=batch_size,
        num_layers=num_layers,
        max_new_tokens=max_new_tokens,
        compile=True,
        temperature=0,
        write_result="none",
    )
    kernels, layers = _layers(common, chosen, timed="layers" in wanted)
    found: dict[str, Any] = {"config": dataclasses.asdict(common)}
    if layers:
        found["layers"] = layers
        click.echo(aligned(LAYER_COLUMNS, layers))
        click.echo("\n" + "\n".join(layer_remarks(layers)))
    failed = any("why_not" in row for row in layers)
    if "model" in wanted:
        settings = Settings(
            max_rounds=max_rounds, max_minutes=max_minutes, tokens=0, processes=processes
        )
        results = whole.measure(_arms(common, kernels), settings)
        rows = beside_stock(whole.rows(results))
        found |= {"model": rows, "comparison": dataclasses.asdict(results)}
        click.echo("\n" * bool(layers) + aligned(MODEL_COLUMNS, rows))
        click.echo("\n" + "\n".join(model_remarks(rows, results.bandwidth)))
        failed = failed or any(row["failed"] for row in rows)
    if json_path:
        write_json(json_path, found)
        say(f"Wrote {json_path}")
    if failed:
        sys.exit(1)


def _layers(
    common: RunConfig, schemes: Sequence[str], timed: bool
) -> tuple[dict[str, list[str]], list[Row]]:
    """Every scheme's kernels, and a row for each shape and scheme if these are to be timed."""
    worker = Process()
    where = {"device": common.device, "precision": common.precision}
    try:
        known = worker.ask(
            "layers", checkpoint_path=common.checkpoint_path, schemes=list(schemes), **where
        )
        rows: list[Row] = []
        shapes = known["shapes"] if timed else []
        for number, shape in enumerate(shapes, 1):
            size = {"rows": shape["rows"], "columns": shape["columns"]}
            say(f"Layer {number} of {len(shapes)}: {layer_name(shape)} …")
            found = worker.ask(
                "products", kernels=known["kernels"], batch_size=common.batch_size, **size, **where
            )
            rows += layer_rows(shape, found)
    finally:
        worker.close()
    return known["kernels"], rows


def layer_rows(shape: Row, found: dict[str, Any]) -> list[Row]:
    """From what was timed of a shape, a row for each scheme; the first scheme is full precision.

    Bytes are those of the weight; a share of the limit is bytes ÷ seconds ÷ bandwidth.
    """
    rows: list[Row] = []
    by_scheme: dict[str, list[Row]] = {}
    for product in found["products"]:
        by_scheme.setdefault(product["scheme"], []).append(product)
    full = next(iter(by_scheme.values()))[0].get("seconds")
    for own, *others in by_scheme.values():
        row = {"layer": layer_name(shape), "count": shape["count"], **own}
        row |= {name: found[name] for name in ("bandwidth", "rotated", "cache")}
        row |= {name: found.get(name) for name in ("bandwidth_probe", "bandwidth_caveat")}
        if "seconds" in own:
            row["bytes_per_s"] = own["bytes"] / own["seconds"]
            if row["bandwidth_caveat"] is None:
                row["limit_share"] = row["bytes_per_s"] / found["bandwidth"]
            if full:
                row["speed_up"] = full / own["seconds"]
        stock = others[0] if others else None
        if stock:
            row["stock"] = stock
            if "seconds" in own and "seconds" in stock:
                row["over_stock"] = stock["seconds"] / own["seconds"]
        rows.append(row)
    return rows


def layer_name(shape: Row) -> str:
    """wqkv 2560 × 2048: outputs × inputs."""
    return f"{', '.join(shape['names'])} {shape['rows']} × {shape['columns']}"


def layer_remarks(rows: Sequence[Row]) -> list[str]:
    readings = sorted({row["bandwidth"] for row in rows})
    low, high = readings[0] / 1e9, readings[-1] / 1e9
    said = [f"memory was read at {low:.1f} to {high:.1f} GB/s; medians, quartiles in brackets"]
    said += dict.fromkeys(row["bandwidth_caveat"] for row in rows if row["bandwidth_caveat"])
    if any(row["rotated"] < row["cache"] for row in rows):
        said.append("some weights may have come from the cache: too little memory for more copies")
    for row in rows:
        for one in (row, row.get("stock", {})):
            if "why_not" in one:
                said.append(
                    f"{row['layer']}, {row['scheme']}, kernel {one['kernel']}: {one['why_not']}"
                )
    return said


# ------------------------------------------------------------------------------------ whole model


def _arms(common: RunConfig, kernels: dict[str, list[str]]) -> list[RunConfig]:
    """Every scheme on its best kernel, and on the stock one if that is another."""
    found: list[RunConfig] = []
    for scheme, (_, *stock) in kernels.items():
        own = dataclasses.replace(common, quantization=scheme)
        found.append(own)
        found += [dataclasses.replace(own, kernel=name) for name in stock]
    return found


def beside_stock(rows: Sequence[Row]) -> list[Row]:
    """Each scheme's row, with the stock kernel's speed in it."""
    found: list[Row] = []
    for row in rows:
        if ", " in row["arm"]:
            found[-1]["stock"] = row
            if "steps_per_s" in row and "steps_per_s" in found[-1]:
                found[-1]["over_stock"] = found[-1]["steps_per_s"] / row["steps_per_s"]
        else:
            found.append(dict(row))
    return found


def model_remarks(rows: Sequence[Row], bandwidth: dict[str, list[Reading]]) -> list[str]:
    said = []
    for device, readings in bandwidth.items():
        said += [f"{device} read memory at {span(readings)}, before each round"]
        said += caveats(readings)
    for row in rows:
        for one in (row, row.get("stock", {})):
            if one.get("failed"):
                said.append(f"{one['arm']}: failed: {one['failed']}")
    return said


# ----------------------------------------------------------------------------------------- tables


def _number(name: str, form: str, unit: float = 1, suffix: str = "") -> Callable[[Row], str]:
    return lambda row: f"{row[name] * unit:{form}}{suffix}" if name in row else "-"


def _time(row: Row) -> str:
    if "seconds" not in row:
        return "-"
    middle, low, high = (row[name] * 1e6 for name in ("seconds", "seconds_low", "seconds_high"))
    return f"{middle:.1f} µs ({low:.1f} to {high:.1f})"


def _stock(show: Callable[[Row], str]) -> Callable[[Row], str]:
    return lambda row: show(row["stock"]) if "stock" in row else "-"


LAYER_COLUMNS: Columns = [
    ("layer", lambda row: row["layer"]),
    ("scheme", lambda row: row["scheme"]),
    ("kernel", lambda row: row["kernel"]),
    ("time", _time),
    ("read", _number("bytes_per_s", ".1f", 1e-9, " GB/s")),
    ("of the limit", _number("limit_share", ".0%")),
    ("× full precision", _number("speed_up", ".2f")),
    ("stock kernel", _stock(lambda row: row["kernel"])),
    ("time", _stock(_time)),
    ("ours × stock", _number("over_stock", ".2f")),
]
MODEL_COLUMNS: Columns = [
    ("scheme", lambda row: row["arm"]),
    ("kernel", lambda row: row.get("kernel", "-")),
    ("decode", _number("decode_tok_s", ".2f", 1, " tok/s")),
    ("limit", _number("limit_tok_s", ".2f", 1, " tok/s")),
    ("of the limit", whole.shown("limit_share", percent=True)),
    ("× full precision", whole.shown("speed_up")),
    ("stock kernel", _stock(lambda row: row.get("kernel", "-"))),
    ("decode", _stock(_number("decode_tok_s", ".2f", 1, " tok/s"))),
    ("ours × stock", _number("over_stock", ".2f")),
]
