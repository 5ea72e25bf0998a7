"""Time each scheme's product with the linear layers of a model, alone, against the speed of memory.

    python -m benchmarks.kernels --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    python -m benchmarks.kernels --schemes int8wo,fp6 --batch_size 4 --json build/kernels.json

For each distinct shape of layer, our kernel and the stock one of every scheme take turns, and the
memory is read in the same rounds. Weights come from memory: between two uses of a copy more is read
than the last-level cache holds. Times are medians, with quartiles in brackets; shares are of a
weight's bytes ÷ time to the speed of memory. They say where a kernel loses time; which scheme is
faster says `quantbench ab`, in whole steps. Exit code 1: a kernel failed, and its line says why.
"""

import argparse
import sys

from quantbench import environment
from quantbench.log.origin import write_json
from quantbench.quantize.spec import COMPARED

STOCK = ("torchao", "torch")  # kernels that are not part of this project


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint_path", default="dummy:TinyLlama-1.1B-Chat-v1.0")
    parser.add_argument("--schemes", default=",".join(COMPARED))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--batch_size", type=int, default=1)
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
    for scheme in dict.fromkeys(["none", *given.schemes.split(",")]):
        running = kernels_for(parse_scheme(scheme), "auto", device, dtype)
        stock = [name for name in running if name in STOCK]
        kernels[scheme] = list(dict.fromkeys([running[0], *stock]))

    layers: dict[tuple[int, int], list[str]] = {}  # names of layers by shape, outputs × inputs
    for name, shape in load_config(given.checkpoint_path).linear_shapes().items():
        layers.setdefault(shape, []).append(name.rpartition(".")[2])
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


if __name__ == "__main__":
    sys.exit(main())
