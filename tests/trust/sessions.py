"""How often real sessions err: arms that are alike, and one that is slower by a known 5 %.

    python -m tests.trust.sessions --sessions 40 --minutes 0.5
    python -m tests.trust.sessions --checkpoint_path smollm2 --scheme int8wo --json smollm2.json

Session, rule, workers and turns are those of `ab`; every arm has the same options. Workers stay
loaded, and each process of an arm is one of them, drawn at random, so that two arms differ by what
two processes differ by. A slower arm waits, after each turn, for 5 % of the time that the turn took.
Exits with 1 where the sessions show that a requirement of tests/trust/simulation.py is missed.
"""

import contextlib
import dataclasses
import io
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click

from quantbench.answer.compared import Compared
from quantbench.answer.limits import Limits
from quantbench.answer.stop import Enough
from quantbench.bench.answers import ArmFacts, Reading, TurnTime
from quantbench.bench.process import Process, WorkerFailed
from quantbench.bench.session import Session
from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.log.about import about
from quantbench.run.why import Expected
from tests.trust.simulation import COVERAGE, FALSE_UPPER, ROOT, bounds

SLOWER = 1.05
ANSWERS = {Reading: Reading(1e9, None, "none"), Expected: Expected()}  # no interval depends on them


class Kept:
    """As bench.process.Process; a loaded worker that is idle plays the process of an arm."""

    idle: list[tuple[Process, ArmFacts]] = []

    def __init__(self, words: Sequence[str]) -> None:
        self.waits, self.drawn = float(words[0]) - 1, None

    def ask(self, do: str, /, **arguments: Any) -> None:
        self.drawn = self.idle.pop(random.randrange(len(self.idle)))

    def answer(self, kind: type, do: str, /, **arguments: Any) -> Any:
        if kind in ANSWERS:
            return ANSWERS[kind]
        worker, facts = self.drawn
        if kind is ArmFacts:
            return facts
        answer = worker.answer(kind, do, **arguments)
        if kind is TurnTime:
            waited, started = 0.0, time.perf_counter()
            while waited < self.waits * answer.seconds:
                waited = time.perf_counter() - started
            answer = dataclasses.replace(answer, seconds=answer.seconds + waited)
        return answer

    def close(self) -> None:
        if self.drawn:
            self.idle.append(self.drawn)
            self.drawn = None


def session(argv: Sequence[str], minutes: float, true: float) -> dict[str, Any]:
    """One session of two arms, the second slower by `true`."""
    arms = [ArmResult(name, "", list(argv)) for name in ("baseline", "arm")]
    results, started = Results(Settings(max_minutes=minutes, tokens=0), arms), time.monotonic()
    with (
        mock.patch("quantbench.bench.pool.Process", Kept),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        rule, store = Enough(Limits()), Store(results, None)
        Session(store, rule, lambda number: (str(true if number else 1.0),)).run()
    if results.ended == "interrupted":
        raise KeyboardInterrupt
    if failure := results.failure():
        raise WorkerFailed(failure)
    one, expected = Compared(results).whole[1], "slower" if true > 1 else "no difference shown"
    return {
        "true": true, "ratio": one.ratio, "low": one.low, "high": one.high,
        "half_width": one.half_width, "cycles": one.cycles, "processes": one.processes,
        "seconds": time.monotonic() - started, "covers": one.low <= true <= one.high,
        "found": one.verdict == expected,
        "false": one.verdict not in (expected, "no difference shown"),
    }  # fmt: skip


@click.command()
@click.option("--sessions", default=40, show_default=True, help="Of either kind.")
@click.option("--minutes", default=0.5, show_default=True, help="--max_minutes of each.")
@click.option("--checkpoint_path", default="tiny", show_default=True)
@click.option("--scheme", default="none", show_default=True)
@click.option("--workers", type=click.IntRange(2), default=6, show_default=True)
@click.option("--json", "path", type=Path, default=ROOT / "docs/data/trust_sessions.json")
def main(
    sessions: int, minutes: float, checkpoint_path: str, scheme: str, workers: int, path: Path
) -> None:
    """Measure, print and write shares with their bounds, medians, and every session."""
    argv = ["--checkpoint_path", checkpoint_path, "--quantization", scheme, "--compile"]
    argv += ["--max_new_tokens", "32", "--write_result", "none"]
    with contextlib.ExitStack() as stack:
        for _ in range(workers):
            worker = Process()
            stack.callback(worker.close)
            worker.ask("load", argv=argv)
            Kept.idle.append((worker, worker.answer(ArmFacts, "get_ready")))
        done = []
        for number in range(2 * sessions):
            done.append(session(argv, minutes, (1.0, SLOWER)[number % 2]))
            click.echo(f"{number + 1} of {2 * sessions}: {json.dumps(done[-1])}", err=True)
    rows = []
    for true in (1.0, SLOWER):
        own = [one for one in done if one["true"] == true]
        shares = {name: bounds(sum(one[name] for one in own), len(own))
                  for name in ("false", "covers", "found")}  # fmt: skip
        medians = {name: statistics.median(one[name] for one in own)
                   for name in ("ratio", "half_width", "seconds", "cycles", "processes")}  # fmt: skip
        rows.append({"true": true, "sessions": len(own), **shares, **medians})
        click.echo(json.dumps(rows[-1]))
    about_it = {"about": dataclasses.asdict(about()), "argv": argv, "minutes": minutes}
    path.write_text(json.dumps({**about_it, "rows": rows, "sessions": done}, indent=1) + "\n")
    missed = [r for r in rows if r["false"]["low"] > FALSE_UPPER or r["covers"]["high"] < COVERAGE]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
