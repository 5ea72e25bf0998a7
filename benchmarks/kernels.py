"""Time each scheme's product with the linear layers of a model, alone, against the speed of memory.

    python -m benchmarks.kernels --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    python -m benchmarks.kernels --schemes int8wo,fp6 --batch_size 4 --json build/kernels.json
    python -m benchmarks.kernels --rows 8,128,512,2048      # of a prompt or a batch: speed ÷ none's

For each distinct shape of layer, our kernel and the stock one of every scheme take turns, and the
memory is read in the same rounds. Weights come from memory: between two uses of a copy more is read
than the last-level cache holds. Times are medians, with quartiles in brackets; shares are of a
weight's bytes ÷ time to the speed of memory. They say where a kernel loses time; which scheme is
faster says `quantbench ab`, in whole steps. Exit code 1: a kernel failed, and its line says why.

With --rows the schemes' kernels take turns with full precision's over all layers of a block, and a
line has the median of the turns' ratios, with quartiles, and products a second ÷ those of the
instruction repeated on numbers at hand, measured in the same turns. With OMP_NUM_THREADS=1 it
counts the thread's own processor time, which other programs on the machine disturb little.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from quantbench import environment
from quantbench.log.origin import write_json
from quantbench.quantize.spec import COMPARED

PROMPTS = ("int8dq", "int8wo", "int4wo-32", "int8dq-int4wo-32", "fp6")  # schemes of --rows
SPINS = 200_000  # about a millisecond
STOCK = ("torchao", "torch")  # kernels that are not part of this project


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint_path", default="dummy:TinyLlama-1.1B-Chat-v1.0")
    parser.add_argument("--schemes", help="by default all; with --rows some of each kind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rows", help="of x: numbers of tokens; prints ratios to full precision")
    parser.add_argument("--turns", type=int, default=20, help="of each scheme, with --rows")
    parser.add_argument("--json", help="write all of it into this file, too")
    given = parser.parse_args()
    environment.prepare()  # before torch is imported
    import torch

    from quantbench import devices
    from quantbench.bench.layer_timing import products
    from quantbench.models.loading import load_config
    from quantbench.quantize.registry import kernels_for
    from quantbench.quantize.spec import parse_scheme

    device, dtype = devices.resolve(given.device), getattr(torch, given.precision)
    kernels: dict[str, list[str]] = {}  # by scheme: the one that auto takes, then any stock one
    usual = PROMPTS if given.rows else COMPARED
    schemes = given.schemes.split(",") if given.schemes else usual
    for scheme in dict.fromkeys(["none", *schemes]):
        running = kernels_for(parse_scheme(scheme), "auto", device, dtype)
        stock = [name for name in running if name in STOCK]
        kernels[scheme] = list(dict.fromkeys([running[0], *stock]))

    layers: dict[tuple[int, int], list[str]] = {}  # names of layers by shape, outputs × inputs
    for name, shape in load_config(given.checkpoint_path).linear_shapes().items():
        layers.setdefault(shape, []).append(name.rpartition(".")[2])
    if given.rows:
        rows = [int(number) for number in given.rows.split(",")]
        blocks = [shape for shape, names in layers.items() if names != ["output"]]
        first = {scheme: names[0] for scheme, names in kernels.items()}
        write_json(given.json, ratios(blocks, first, rows, device, dtype, given.turns))
        return 0
    report, failed = [], False
    for (rows, columns), names in layers.items():
        timings = products(rows, columns, kernels, given.device, given.precision, given.batch_size)
        report.append({"layers": names, "rows": rows, "columns": columns, "timings": timings})
        print(f"{', '.join(dict.fromkeys(names))} {rows} × {columns}: memory was read at "
              f"{timings.bandwidth / 1e9:.1f} GB/s by {timings.bandwidth_probe}")  # fmt: skip
        if timings.bandwidth_caveat:
            print(f"  {timings.bandwidth_caveat}")
        if timings.rotated < timings.cache:
            print("  some weights may have come from the cache: too little memory for copies")
        for one in timings.products:
            label = f"  {one.scheme:14} {one.kernel:10}"
            if one.seconds is None:
                failed = True
                print(label, one.why_not)
                continue
            low, middle, high = (1e6 * (t or 0) for t in (
                one.seconds_low, one.seconds, one.seconds_high))  # fmt: skip
            speed = (one.bytes or 0) / one.seconds
            print(f"{label} {middle:9.1f} µs ({low:.1f} to {high:.1f}), {speed / 1e9:6.1f} GB/s, "
                  f"{speed / timings.bandwidth:5.0%} of the limit")  # fmt: skip
    write_json(given.json, {"options": vars(given), "layers": report})
    return 1 if failed else 0


def ratios(
    shapes: list[tuple[int, int]],
    kernels: dict[str, str],
    rows: list[int],
    device: Any,
    dtype: Any,
    turns: int,
) -> dict[str, Any]:
    """By number of rows and scheme: quartiles of full precision's time ÷ the scheme's, and the
    products a second. Each turn multiplies by every layer of a block once."""
    import torch
    from torch import nn

    from quantbench import devices
    from quantbench.ops.cpu import build
    from quantbench.quantize.registry import Quantizer
    from quantbench.quantize.spec import parse_scheme

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    blocks: dict[str, list[nn.Module]] = {scheme: [] for scheme in kernels}
    for outputs, inputs in shapes:
        plain = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
        nn.init.normal_(plain.weight, std=0.02)
        for scheme, kernel in kernels.items():
            quantize = Quantizer(parse_scheme(scheme), device, dtype, kernel)
            like = nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)
            like.weight = plain.weight
            layer = quantize("layer", like).requires_grad_(False)
            blocks[scheme].append(layer)
    found: dict[str, Any] = {}
    print(f"{build.isa()}, {torch.get_num_threads()} threads, {clock.__name__}")
    for count in rows:
        inputs = [torch.randn(count, layer.in_features, device=device).to(dtype)
                  for layer in blocks["none"]]  # fmt: skip
        products = sum(count * layer.in_features * layer.out_features for layer in blocks["none"])
        seconds: dict[str, list[float]] = {scheme: [] for scheme in kernels}
        limits: dict[str, list[float]] = {scheme: [] for scheme in kernels}
        for turn in range(turns + 1):
            order = list(kernels) if turn % 2 else list(kernels)[::-1]
            for scheme in order:
                started = clock()
                for layer, x in zip(blocks[scheme], inputs, strict=True):
                    layer(x)
                devices.synchronize(device)
                if turn:
                    seconds[scheme].append(clock() - started)
                    limits[scheme].append(limit(blocks[scheme][0], dtype, count, clock))
        for scheme in kernels:
            each = [a / b for a, b in zip(seconds["none"], seconds[scheme], strict=True)]
            low, middle, high = statistics.quantiles(each, n=4)
            speed = products / statistics.median(seconds[scheme])
            found.setdefault(str(count), {})[scheme] = {
                "ratio": (low, middle, high),
                "products_per_second": speed,
                "limit": (most := statistics.median(limits[scheme])),
            }
            share = f", {speed / most:4.0%} of the limit" if most else ""
            print(f"{count:5} rows  {scheme:16} ÷ none {middle:5.2f} ({low:.2f} to {high:.2f}), "
                  f"{speed / 1e9:6.1f} G products/s{share}")  # fmt: skip
    return found


def limit(layer: Any, dtype: Any, count: int, clock: Callable[[], float]) -> float:
    """Products a second of the instructions with which our C++ kernel multiplies `count` rows by a
    layer's weight, repeated on numbers at hand; 0 for other kernels."""
    from quantbench.ops.cpu import bandwidth, plain
    from quantbench.quantize.kernel import fused_weight

    weight, started = fused_weight(layer), clock()
    if weight is None or weight.device.type != "cpu":
        return 0
    if weight.dtype == dtype and not plain.ours(dtype, count, weight.shape[1]):
        return 0
    return bandwidth.spin(weight, dtype, count, SPINS) / (clock() - started)


if __name__ == "__main__":
    sys.exit(main())
