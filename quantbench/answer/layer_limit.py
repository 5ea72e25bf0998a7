"""Linear layers alone, under every scheme, and the limit that memory sets to them: for roofline.

kernels, rows = measured(config, ["none", "int8wo"])
rows[0].limit_share            # 0.86: bytes per second of the product ÷ those of memory
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from quantbench.bench.answers import Product, Shape, ShapeTimings
from quantbench.bench.process import Process
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.typed_json import omitted


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


def measured(
    config: RunConfig, schemes: Sequence[str], timed: bool = True, only_ours: bool = False
) -> tuple[dict[str, list[str]], list[LayerRow]]:
    """Every scheme's kernels, ours first and then a stock one that is another; and a row for each
    distinct shape of the model's linear layers and scheme, the first being full precision.

    timed: False for no rows. only_ours: without the stock kernels. Raises WorkerFailed.
    """
    rows: list[LayerRow] = []
    where = {"device": config.device, "precision": config.precision}
    with closing(Process()) as worker:
        kernels = worker.answer(dict[str, list[str]], "kernels", schemes=list(schemes), **where)
        shapes = worker.answer(list[Shape], "shapes", checkpoint_path=config.checkpoint_path)
        if only_ours:
            kernels = {name: own[:1] for name, own in kernels.items()}
        for number, shape in enumerate(shapes if timed else [], 1):
            say(f"Layer {number} of {len(shapes)}: {layer_name(shape)} …")
            size = {"rows": shape.rows, "columns": shape.columns, "batch_size": config.batch_size}
            timings = worker.answer(ShapeTimings, "products", kernels=kernels, **size, **where)
            rows += layer_rows(shape, timings)
    return kernels, rows


def layer_rows(shape: Shape, timings: ShapeTimings) -> list[LayerRow]:
    """A row for each scheme; the first scheme is full precision, and the first product of each is
    by our kernel."""
    by_scheme: dict[str, list[Product]] = {}
    for product in timings.products:
        by_scheme.setdefault(product.scheme, []).append(product)
    full = next(iter(by_scheme.values()))[0].seconds
    about = {name: value for name, value in vars(timings).items() if name != "products"}
    limit = timings.bandwidth if timings.bandwidth_caveat is None else None
    rows = []
    for own, *others in by_scheme.values():
        stock, rate = others[0] if others else None, _quotient(own.bytes, own.seconds)
        rows.append(
            LayerRow(
                **vars(own),
                **about,
                layer=layer_name(shape),
                count=shape.count,
                bytes_per_s=rate,
                limit_share=_quotient(rate, limit),
                speed_up=_quotient(full, own.seconds),
                stock=stock,
                over_stock=_quotient(stock.seconds if stock else None, own.seconds),
            )
        )
    return rows


def layer_name(shape: Shape) -> str:
    """wqkv 2560 × 2048: outputs × inputs."""
    return f"{', '.join(shape.names)} {shape.rows} × {shape.columns}"


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
