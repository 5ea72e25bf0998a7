"""How far `python -m compare ab` can be trusted: make trust

Runs the embedded model against itself, in 40 comparisons with fresh processes and another seed
each, and as often against itself slowed by 5 %. At most 4 of the first may declare a difference,
and at least 36 of the second have to find it. Verdicts are appended to a file, so that it can be
run in pieces (--minutes) and goes on where it was; the file is removed by whoever wants a new one.
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import click

from benchlog.config import RunConfig
from compare.figures.rows import rows
from compare.sampling.arm import Arm
from compare.sampling.comparison import Comparison
from compare.sampling.nursery import Nursery
from compare.sampling.process import COMMAND, environment
from compare.sampling.results import Results, Settings
from typed_json import to_json

SLOW = (sys.executable, str(Path(__file__).parent / "slow_worker.py"))
SHARE = 0.05
CONFIG = RunConfig(max_new_tokens=24, device="cpu")


def one_run(seed: int, share: float, nursery: Nursery, folder: Path | None) -> dict:
    """One comparison of two arms that are the same but for the hook; `folder`: for all of it."""
    if folder:
        folder.mkdir(parents=True)
    arms = [Arm("A", "", CONFIG), Arm("B", "", CONFIG)]
    results = Results.begin(Settings(tokens=0, order_seed=seed), arms, "none")
    Comparison(
        results,
        folder,
        lambda line: None,
        lambda number: (*SLOW, str(share)) if number and share else COMMAND,
        nursery,
    ).run()
    row = to_json(rows(results)[1])
    keys = ("verdict", "ratio_throughput", "failed")
    return {"seed": seed, "share": share, "rounds": results.rounds, "ended": results.ended} | {
        key: row.get(key) for key in keys
    }


@click.command()
@click.option("--runs", default=40, show_default=True)
@click.option("--minutes", default=float("inf"), help="Stop after so many, to go on later.")
@click.option("--file", "path", default="trust.jsonl", show_default=True)
@click.option("--keep", help="A folder for every comparison's samples.")
def main(runs: int, minutes: float, path: str, keep: str | None) -> None:
    """See above."""
    os.environ["OMP_NUM_THREADS"] = "1"  # whatever else the machine does has the other cores
    nursery = Nursery(environment())
    file, started = Path(path), time.monotonic()
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    done = {(one["seed"], one["share"]) for one in found}
    wanted = [(seed, share) for seed in range(runs) for share in (0.0, SHARE)]
    for seed, share in wanted:
        if (seed, share) in done:
            continue
        if time.monotonic() > started + 60 * minutes:
            break
        folder = Path(keep, f"{seed}-{share}-{int(time.time())}") if keep else None
        found.append(one_run(seed, share, nursery, folder))
        with file.open("a") as out:
            out.write(json.dumps(found[-1]) + "\n")
        click.echo(json.dumps(found[-1]))
    nursery.close()
    equal = [one for one in found if not one["share"]]
    slowed = [one for one in found if one["share"]]
    for name, some in (("A against A", equal), (f"slowed by {SHARE:.0%}", slowed)):
        rounds = [one["rounds"] for one in some]
        mean = sum(rounds) / max(1, len(rounds))
        click.echo(f"{name}: {dict(Counter(one['verdict'] for one in some))}, {mean:.0f} rounds")
    if len(found) < len(wanted):
        sys.exit("not finished: run it again")
    wrong = sum(one["verdict"] != "no difference shown" for one in equal)
    right = sum(one["verdict"] == "slower" for one in slowed)
    sys.exit(wrong > runs // 10 or right < runs - runs // 10)


if __name__ == "__main__":
    main()
