"""Run a command of this tree and of another commit in turns: the ratio of their speeds.

    python -m benchmarks.against HEAD~1 generate --checkpoint_path tiny --quantization int8wo
    python -m benchmarks.against --rounds 20 v0.1.0 ab --arm "" --arm "--quantization int8wo"

The commit is checked out into a temporary git worktree, and its command imports only that. Both run
whole, each time in a new process, this tree first and then second: what differs between days,
hours and processes affects both alike. The first round, which may build C++ kernels, does not
count. `generate` has its log line's tok/s; `ab` has tok/s of each arm. With 12 rounds or more there
is a 95 % interval, which holds whenever Ctrl-C ends the rounds.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from quantbench import stats
from quantbench.log import log

ROOT = Path(__file__).parents[1]
# Each run is a new process: what processes differ by is in the scatter of the rounds already.
NO_FLOOR = stats.Floor(deviation=1e-9)
Speeds = dict[str, float]  # tok/s of each arm; of generate, of its scheme


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="generate or ab with its options")
    given = parser.parse_args()
    if given.command[:1] not in (["generate"], ["ab"]):
        parser.error("the command is generate or ab with its options")
    rounds: list[tuple[Speeds, Speeds]] = []
    with tempfile.TemporaryDirectory(prefix="quantbench-against-") as scratch:
        with checkout(given.commit, Path(scratch, "tree")) as other:
            try:
                for number in range(given.rounds + 1):
                    order = [ROOT, other] if number % 2 else [other, ROOT]
                    found = {tree: speeds(tree, given.command, scratch) for tree in order}
                    if number:
                        rounds.append((found[ROOT], found[other]))
                        print(f"round {number} of {given.rounds}", file=sys.stderr)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
    if not rounds:
        return 1
    for arm in rounds[0][0]:
        both = [(now[arm], then[arm]) for now, then in rounds if arm in now and arm in then]
        if both:
            print(f"{arm}: tok/s of this tree ÷ {given.commit}: {ratio(both)}")
    return 0


@contextlib.contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of the commit; it is removed at the end."""
    git = ("git", "-C", str(ROOT), "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def speeds(tree: Path, command: Sequence[str], scratch: str) -> Speeds:
    """Run the command of this tree's files. Of an option that is given twice, the last counts."""
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        written, results = Path(place, "log.txt"), Path(place, "results")
        more = ["--write_result", str(written)]
        if command[0] == "ab":
            more = ["--write_result", "none", "--output", str(results)]
        # PYTHONSAFEPATH: or the current folder would be imported in the place of the tree
        variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        words = [sys.executable, "-m", "quantbench", *command, *more]
        done = subprocess.run(words, env=variables, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            sys.exit(f"{tree}: {last}")
        if command[0] == "ab":
            rows = json.loads((results / "results.json").read_text())["rows"]
            return {row["arm"]: row["tok_s"] for row in rows if row.get("tok_s")}
        return {record.quant: record.tok_s for _, record in log.read(written).records[-1:]}


def ratio(both: Sequence[tuple[float, float]]) -> str:
    """Of (speed now, speed then) for each round."""
    cycle = np.arange(len(both))
    now, then = (
        stats.Turns(cycle, np.zeros_like(cycle), 1 / np.array(each))
        for each in zip(*both, strict=True)
    )
    found = stats.intervals(then, {1: now}, NO_FLOOR)[1]  # of seconds
    ends = f"{1 / found.high:.3f} to {1 / found.low:.3f}" if found.low else "no interval yet"
    return f"{1 / found.ratio:.3f} ({ends}), {len(both)} rounds"


if __name__ == "__main__":
    sys.exit(main())
