"""How fast the C++ kernels multiply a few rows by weights in memory, beside another commit's.

    python -m tests.ops.products --against HEAD~1 --shapes 151936x1024,2048x8192 --rows 1,4

A process of each commit holds weights of the same shape; they take turns (A B, B A). A line says at
how many GB/s each reads its weight, and the new commit's speed ÷ the old one's, with the quartiles
of the rounds' ratios. Weights are random; `none` is the kernel of unquantized bfloat16 weights.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import click

from quantbench.bench.old_commit import old_commit
from quantbench.run import environment

ROOT = Path(__file__).parents[2]
# By scheme: format, bits, columns per group, and whether groups have zero points.
FORMS = {
    "int8wo": ("int", 8, None, False),
    "int4wo-128": ("int", 4, 128, True),
    "fp6": ("fp6", 6, None, False),
    "float8wo": ("fp8", 8, None, False),
    "sparse-marlin": ("2:4", 4, 64, False),
    "none": None,
}
COLD_BYTES = 128 << 20  # of copies of a weight that take turns: more than the last-level cache
SAMPLE_SECONDS = 0.1


def work() -> None:
    """A worker: reads [scheme, N, K, rows] a line, multiplies, answers with GB/s."""
    import torch

    from quantbench.ops.cpu import build, linear, plain
    from tests.ops.packed_weights import packed

    build.load()
    torch.set_grad_enabled(False)
    last, copies = None, []
    for line in sys.stdin:
        scheme, N, K, rows = json.loads(line)
        if (scheme, N, K) != last:
            last, copies = (scheme, N, K), []
            form = FORMS[scheme]
            if form is None:
                first = torch.randn(N, K, dtype=torch.bfloat16)
            else:
                *form, zero = form
                first = linear.pack(packed(tuple(form), N, K, zero=zero), K)
            copies = [first.clone() for _ in range(max(1, COLD_BYTES // first.nbytes))]
        x = torch.randn(rows, K, dtype=torch.bfloat16)
        multiply = plain.linear if FORMS[scheme] is None else partial(linear.linear, rows=N)
        # The first pass is not counted: a process that has waited for its turn is slow at first.
        for weight in copies:
            multiply(x, weight)
        start, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < SAMPLE_SECONDS:
            for weight in copies:
                multiply(x, weight)
            count += len(copies)
        print(count * copies[0].nbytes / seconds / 1e9, flush=True)


class Worker:
    """A process that imports the files of `folder`, and of this one only the present file."""

    def __init__(self, folder: Path) -> None:
        program = f"import runpy; runpy.run_path({__file__!r})['work']()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**environment.defaults(os.environ), "PYTHONPATH": str(folder)},
        )

    def speed(self, *task: str | int) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@click.command()
@click.option("--against", required=True)
@click.option("--shapes", default="151936x1024,65536x3072,2048x8192,5632x2048")
@click.option("--rows", default="1,2,4,8,16")
@click.option("--schemes", default=",".join(FORMS))
@click.option("--rounds", default=8)
def main(against: str, shapes: str, rows: str, schemes: str, rounds: int) -> None:
    with old_commit(against) as old:
        workers = [Worker(old.folder), Worker(ROOT)]
        for shape in shapes.split(","):
            N, K = map(int, shape.split("x"))
            for scheme in schemes.split(","):
                for count in map(int, rows.split(",")):
                    task = (scheme, N, K, count)
                    speeds: tuple[list[float], list[float]] = ([], [])
                    for worker in workers:
                        worker.speed(*task)  # warm up
                    for turn in range(rounds):
                        for which in (0, 1) if turn % 2 else (1, 0):
                            speeds[which].append(workers[which].speed(*task))
                    before, after = map(statistics.median, speeds)
                    ratios = [b / a for a, b in zip(*speeds, strict=True)]
                    low, middle, high = statistics.quantiles(ratios, n=4)
                    click.echo(
                        f"{shape} {scheme}, {count} rows: {before:.1f} → {after:.1f} GB/s, "
                        f"ratio {middle:.2f} ({low:.2f} to {high:.2f})"
                    )
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


if __name__ == "__main__":
    main()
