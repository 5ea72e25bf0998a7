"""How fast generate.py of this checkout is, beside another commit's.

    python -m tests.run.commits --against e07e894 --rounds 6 --schemes none,int8wo -- \\
        --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0 --prefill_size 128 --max_new_tokens 33

A process of each commit in turns (A B, B A), with the options after `--`, which both commits have
to know. A line gives the medians over all samples, and the new commit's speed divided by the old
one's: median and quartiles of the rounds' ratios. `quantbench replay --against` does this
with the statistics of a verdict, for commits that have its worker; this is for all others.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from quantbench.bench.old_commit import checked_out
from quantbench.run import environment

ROOT = Path(__file__).parents[2]
SPEEDS = {"prompt": "prefill_tok_s", "decode": "decode_tok_s", "samples": "tok_s"}


def run(folder: Path, options: Sequence[str]) -> dict[str, float]:
    """The speeds that generate.py in `folder` writes into its JSON, tokens/s by SPEEDS' keys."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "run.json")
        variables = {**environment.defaults(os.environ), "PYTHONPATH": str(folder)}
        command = [sys.executable, "generate.py", *options, "--write_result", "none"]
        command += ["--output_json_path", str(file)]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(f"{folder}: {done.stderr.strip().splitlines()[-1]}")
        (record,) = (json.loads(line) for line in file.read_text().splitlines())
    return {name: record[key] for name, key in SPEEDS.items()}


@click.command()
@click.option("--against", required=True)
@click.option("--rounds", default=6)
@click.option("--schemes", default="none,int8wo,int4wo-128")
@click.argument("options", nargs=-1)
def main(against: str, rounds: int, schemes: str, options: tuple[str, ...]) -> None:
    """See above."""
    with checked_out(against) as old:
        folders = (old.folder, ROOT)
        for scheme in schemes.split(","):
            of_scheme = ["--quantization", scheme, *options]
            for folder in folders:  # builds and compiles what is kept for the next process
                run(folder, of_scheme)
            speeds: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
            for turn in range(rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    speeds[which].append(run(folders[which], of_scheme))
            for name in SPEEDS:
                before, after = ([one[name] for one in some] for some in speeds)
                ratios = [new / old for old, new in zip(before, after, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                click.echo(
                    f"{scheme}, {name}: {statistics.median(before):.1f} → "
                    f"{statistics.median(after):.1f} tok/s, ratio {middle:.3f} "
                    f"({low:.3f} to {high:.3f})"
                )


if __name__ == "__main__":
    main()
