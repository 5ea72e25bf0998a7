"""quantbench roofline: how near to the limit of memory each scheme comes.

    quantbench roofline --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    quantbench roofline --schemes int8wo,fp6 --parts layers --json roofline.json

Decoding reads every weight once for each token, so memory's bandwidth sets the limit. First every
distinct shape among the model's linear layers is timed alone: GB/s, share of the bandwidth, and how
our kernel compares with the stock one. Then the whole model, each scheme in a process of its own:
tokens per second against what its bytes allow. Bandwidth is read in the same rounds.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import click

from quantbench import files
from quantbench.answer.interval import Interval
from quantbench.answer.readings import caveats, span
from quantbench.arguments import names_of, refuse_given
from quantbench.bench.answers import Layers, Product, Reading, Shape, ShapeTimings
from quantbench.bench.process import Process
from quantbench.cli import Command
from quantbench.compare.figures import decode_limit
from quantbench.compare.figures.json_rows import DecodeRow
from quantbench.compare.figures.limits import over
from quantbench.compare.sampling.results import (
    ArmResult,
    Results,
    Settings,
    report_output,
    write_json,
)
from quantbench.errors import UsageError
from quantbench.log.config import PRECISIONS, RunConfig
from quantbench.progress import say
from quantbench.quantize import spec
from quantbench.report.columns import Columns, aligned, interval, number
from quantbench.typed_json import omitted

MODEL = "dummy:TinyLlama-1.1B-Chat-v1.0"
SCHEMES = spec.COMPARED
PARTS = ("layers", "model")
OF_MODEL = ("max_new_tokens", "max_rounds", "max_minutes", "processes")


@dataclass(frozen=True, kw_only=True)
class LayerRow(Product):
    """A shape's product under one scheme; bytes and shares are of the weight alone."""

    layer: str
    count: int  # layers of this shape
    bandwidth: float  # bytes per second, read in the same rounds
    rotated: int  # bytes that are read before any weight is read again
    cache: int  # bytes of the last-level cache
    bandwidth_probe: str | None
    bandwidth_caveat: str | None
    bytes_per_s: float | None = omitted()
    limit_share: float | None = omitted()  # bytes_per_s ÷ bandwidth
    speed_up: float | None = omitted()  # over full precision
    stock: Product | None = omitted()  # by the stock kernel, where that is another
    over_stock: float | None = omitted()  # its seconds ÷ ours


@dataclass
class Report:
    """The contents of the file that --json names."""

    config: RunConfig
    layers: list[LayerRow] | None = omitted()
    model: list[DecodeRow] | None = omitted()
    comparison: Results | None = omitted()


@click.command(cls=Command)
@click.option(
    "--checkpoint_path",
    default=MODEL,
    metavar="PATH",
    help=f"The model, as in generate.py [{MODEL}]",
)
@click.option("--device", default="auto", help="cpu, cuda, xpu, mps, or auto [auto]")
@click.option(
    "--precision", default="bfloat16", help=f"Unquantized dtype: {', '.join(PRECISIONS)} [bfloat16]"
)
@click.option("--schemes", metavar="A,B", help=f"Schemes to measure [{','.join(SCHEMES)}]")
@click.option("--batch_size", type=click.IntRange(1), default=1, help="Sequences at once [1]")
@click.option(
    "--num_layers", type=click.IntRange(1), help="Keep only the first N layers of the whole model"
)
@click.option(
    "--parts", metavar="A,B", help=f"Single layers, the whole model, or both [{','.join(PARTS)}]"
)
@click.option(
    "--only_ours",
    is_flag=True,
    help="Leave out torch's and torchao's kernels, which take memory, too",
)
@click.option(
    "--max_new_tokens", type=click.IntRange(2), default=33, help="New tokens of each sample [33]"
)
@click.option(
    "--max_rounds",
    type=click.IntRange(1),
    default=12,
    help="Rounds of samples of the whole model [12]",
)
@click.option(
    "--max_minutes", type=click.FloatRange(0), default=10.0, help="Minutes for these rounds [10]"
)
@click.option("--processes", type=click.IntRange(1), default=4,
              help="Start each scheme N times [4]; intervals need 4")  # fmt: skip
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, too")
@click.option("--debug", is_flag=True, help="Show tracebacks")
@click.pass_context
def roofline(
    context: click.Context,
    /,
    checkpoint_path: str,
    device: str,
    precision: str,
    schemes: str | None,
    batch_size: int,
    num_layers: int | None,
    parts: str | None,
    only_ours: bool,
    max_new_tokens: int,
    max_rounds: int,
    max_minutes: float,
    processes: int,
    json_path: str | None,
    debug: bool,
) -> None:
    """Hold every scheme against the limit that memory's bandwidth sets."""
    specs = [spec.parse(name) for name in names_of("--schemes", schemes, SCHEMES)]
    for scheme in specs:
        if scheme.scheme is None or isinstance(scheme, spec.Int8Embedding):
            raise UsageError(
                f"--schemes {scheme}: its layers are those of other schemes; name these"
            )
    # Full precision comes first: it is what the others are compared with.
    chosen = list(dict.fromkeys(["none", *map(str, specs)]))
    wanted = names_of("--parts", parts, PARTS, PARTS)
    if "model" not in wanted:
        refuse_given(context, OF_MODEL, "single layers are measured, and no whole model: "
                     "leave it out, or add model to --parts")  # fmt: skip
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": checkpoint_path})
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
    kernels, layers = _layers(common, chosen, "layers" in wanted, only_ours)
    report = Report(common, layers or None)
    if layers:
        if json_path:  # before stdout, which may be closed
            write_json(json_path, report)
        click.echo(aligned(LAYER_COLUMNS, layers))
        click.echo("\n" + "\n".join(layer_remarks(layers)))
    failed = any(row.why_not for row in layers)
    if "model" in wanted:
        settings = Settings.of_rounds(max_rounds, processes, max_minutes)
        results = decode_limit.measure(_arms(common, kernels), settings)
        rows = with_stock(results)
        report.model, report.comparison = rows, results
        if json_path:
            write_json(json_path, report)
        click.echo("\n" * bool(layers) + aligned(MODEL_COLUMNS, rows))
        click.echo("\n" + "\n".join(model_remarks(rows, results.bandwidth)))
        failed = failed or any(row.failed for row in rows)
    if json_path:
        say(f"Wrote {json_path}")
    if failed:
        sys.exit(1)


def _layers(
    common: RunConfig, schemes: Sequence[str], timed: bool, only_ours: bool
) -> tuple[dict[str, list[str]], list[LayerRow]]:
    """Every scheme's kernels, or the first alone if `only_ours`; and, if `timed`, a row for each
    shape and scheme."""
    worker = Process()
    where = {"device": common.device, "precision": common.precision}
    try:
        layers = worker.answer(
            Layers,
            "layers",
            checkpoint_path=common.checkpoint_path,
            schemes=list(schemes),
            **where,
        )
        kernels = {name: own[:1] if only_ours else own for name, own in layers.kernels.items()}
        rows: list[LayerRow] = []
        shapes = layers.shapes if timed else []
        for number, shape in enumerate(shapes, 1):
            say(f"Layer {number} of {len(shapes)}: {layer_name(shape)} …")
            timings = worker.answer(
                ShapeTimings,
                "products",
                rows=shape.rows,
                columns=shape.columns,
                kernels=kernels,
                batch_size=common.batch_size,
                **where,
            )
            rows += layer_rows(shape, timings)
    finally:
        worker.close()
    return kernels, rows


def layer_rows(shape: Shape, timings: ShapeTimings) -> list[LayerRow]:
    """A row for each scheme; the first scheme is full precision, and the first product of each is
    by our kernel."""
    by_scheme: dict[str, list[Product]] = {}
    for product in timings.products:
        by_scheme.setdefault(product.scheme, []).append(product)
    full = next(iter(by_scheme.values()))[0].seconds
    return [
        _layer_row(shape, timings, full, own, others[0] if others else None)
        for own, *others in by_scheme.values()
    ]


def _layer_row(
    shape: Shape, timings: ShapeTimings, full: float | None, own: Product, stock: Product | None
) -> LayerRow:
    rate = own.bytes / own.seconds if own.bytes and own.seconds else None
    limit = timings.bandwidth if timings.bandwidth_caveat is None else None
    return LayerRow(
        **vars(own),
        layer=layer_name(shape),
        count=shape.count,
        bandwidth=timings.bandwidth,
        rotated=timings.rotated,
        cache=timings.cache,
        bandwidth_probe=timings.bandwidth_probe,
        bandwidth_caveat=timings.bandwidth_caveat,
        bytes_per_s=rate,
        limit_share=_quotient(rate, limit),
        speed_up=_quotient(full, own.seconds),
        stock=stock,
        over_stock=_quotient(stock.seconds if stock else None, own.seconds),
    )


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def layer_name(shape: Shape) -> str:
    """wqkv 2560 × 2048: outputs × inputs."""
    return f"{', '.join(shape.names)} {shape.rows} × {shape.columns}"


def layer_remarks(rows: Sequence[LayerRow]) -> list[str]:
    """How it was measured, and what failed."""
    readings = sorted({row.bandwidth for row in rows})
    low, high = readings[0] / 1e9, readings[-1] / 1e9
    remarks = [f"memory was read at {low:.1f} to {high:.1f} GB/s; medians, quartiles in brackets"]
    remarks += dict.fromkeys(row.bandwidth_caveat for row in rows if row.bandwidth_caveat)
    if any(row.rotated < row.cache for row in rows):
        remarks.append("some weights may have come from the cache: too little memory for copies")
    for row in rows:
        for product in (row, row.stock):
            if product and product.why_not:
                remarks.append(
                    f"{row.layer}, {row.scheme}, kernel {product.kernel}: {product.why_not}"
                )
    return remarks


# ------------------------------------------------------------------------------------ whole model


def _arms(common: RunConfig, kernels: Mapping[str, Sequence[str]]) -> list[RunConfig]:
    """Every scheme on its best kernel, and on the stock one if that is another."""
    arms: list[RunConfig] = []
    for scheme, (_, *stock) in kernels.items():
        own = dataclasses.replace(common, quantization=scheme)
        arms.append(own)
        arms += [dataclasses.replace(own, kernel=name) for name in stock]
    return arms


def with_stock(results: Results) -> list[DecodeRow]:
    """A row for each scheme, that of the stock kernel inside it."""
    schemes: list[tuple[ArmResult, DecodeRow]] = []
    for arm, row in zip(results.arms, decode_limit.rows(results), strict=True):
        if ", " not in row.arm:
            schemes.append((arm, row))
            continue
        ours, own = schemes[-1]
        times = over(ours, arm, "token_latency")
        own.stock, own.over_stock = row, Interval.of(times) if times else None
    return [row for _, row in schemes]


def model_remarks(
    rows: Sequence[DecodeRow], bandwidth: Mapping[str, Sequence[Reading]]
) -> list[str]:
    """Lines below the table: bandwidth, and arms that failed. bandwidth: readings by device."""
    remarks = []
    for device, readings in bandwidth.items():
        remarks += [f"{device} read memory at {span(readings)}, before each round"]
        remarks += caveats(readings)
    remarks += dict.fromkeys(
        f"ours × stock compares decoders, too: {row.decoder} with {row.stock.decoder}"
        for row in rows
        if row.stock and row.decoder and row.stock.decoder not in (None, row.decoder)
    )
    for row in rows:
        remarks += [
            f"{arm.arm}: failed: {arm.failed}" for arm in (row, row.stock) if arm and arm.failed
        ]
    return remarks


# ----------------------------------------------------------------------------------------- tables


def _time(product: Product) -> str:
    seconds = (product.seconds, product.seconds_low, product.seconds_high)
    middle, low, high = (1e6 * (value or 0) for value in seconds)
    return f"{middle:.1f} µs ({low:.1f} to {high:.1f})" if product.seconds else "-"


def _of_layer(show: Callable[[Product], str]) -> Callable[[LayerRow], str]:
    return lambda row: show(row.stock) if row.stock else "-"


def _of_model(show: Callable[[DecodeRow], str]) -> Callable[[DecodeRow], str]:
    return lambda row: show(row.stock) if row.stock else "-"


LAYER_COLUMNS: Columns[LayerRow] = [
    ("layer", lambda row: row.layer),
    ("scheme", lambda row: row.scheme),
    ("kernel", lambda row: row.kernel),
    ("time", _time),
    ("read", number(lambda row: row.bytes_per_s, ".1f", 1e-9, " GB/s")),
    ("of the limit", number(lambda row: row.limit_share, ".0%")),
    ("× full precision", number(lambda row: row.speed_up, ".2f")),
    ("stock kernel", _of_layer(lambda product: product.kernel)),
    ("time", _of_layer(_time)),
    ("ours × stock", number(lambda row: row.over_stock, ".2f")),
]
DECODE: Callable[[DecodeRow], str] = number(lambda row: row.decode_tok_s, ".2f", suffix=" tok/s")
MODEL_COLUMNS: Columns[DecodeRow] = [
    ("scheme", lambda row: row.arm),
    ("kernel", lambda row: row.kernel or "-"),
    ("decode", DECODE),
    ("limit", number(lambda row: row.limit_tok_s, ".2f", suffix=" tok/s")),
    ("of the limit", interval(lambda row: row.limit_share, ".1%")),
    ("× full precision", interval(lambda row: row.speed_up)),
    ("stock kernel", _of_model(lambda row: row.kernel or "-")),
    ("decode", _of_model(DECODE)),
    ("ours × stock", interval(lambda row: row.over_stock)),
]
