"""How often real sessions err: arms that are alike, and one that is slower by a known 5 %.

    python -m tests.trust.sessions --sessions 40 --minutes 0.5
    python -m tests.trust.sessions --checkpoint_path smollm2 --scheme int8wo --json smollm2.json

Session, rule, workers and turns are those of `ab`; every arm has the same options. Workers stay
loaded, and each process of an arm is one of them, drawn at random, so that two arms differ by what
two processes differ by. A slower arm's seconds are counted as 5 % more: were it to wait for them,
its threads would fall asleep, and its next turn would begin slower than the other arm's.
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

from quantbench.bench.answers import ArmFacts, Reading, TurnTime
from quantbench.bench.process import Process, WorkerFailed
from quantbench.bench.session import Session
from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.stop import Enough
from quantbench.log.origin import about
from tests.trust.simulation import ERRS, ROOT, bounds

SLOWER = 1.05
SHARES, MEDIANS = ("false", "covers", "found"), ("ratio", "half_width", "seconds", "cycles")
ANSWERS = {Reading: Reading(1e9, None, "none")}  # no interval depends on it


class Kept:
    """As bench.process.Process; a loaded worker that is idle plays the process of an arm."""

    idle: list[tuple[Process, ArmFacts]] = []

    def __init__(self, words: Sequence[str]) -> None:
        self.slower, self.drawn = float(words[0]), None

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
            answer = dataclasses.replace(answer, seconds=self.slower * answer.seconds)
        return answer

    def close(self) -> None:
        if self.drawn:
            self.idle.append(self.drawn)
            self.drawn = None


def session(argv: Sequence[str], minutes: float, true: float) -> dict[str, Any]:
    """One session of two arms, the second slower by `true`."""
    arms = [ArmResult(name, "", list(argv)) for name in ("baseline", "arm")]
    results, started = Results(Settings(max_minutes=minutes, tokens=0), arms), time.monotonic()
    replaced, quiet = mock.patch("quantbench.bench.pool.Process", Kept), io.StringIO()
    with replaced, contextlib.redirect_stderr(quiet):
        commands = lambda number: (str(true if number else 1.0),)  # noqa: E731
        Session(Store(results, None), Enough(Limits()), commands).run()
    if results.ended == "interrupted":
        raise KeyboardInterrupt
    if failure := results.failure():
        raise WorkerFailed(failure)
    one, none = Compared(results).whole[1], "no difference shown"
    right = "slower" if true > 1 else none
    seconds, covers = time.monotonic() - started, one.low <= true <= one.high
    judged = {"covers": covers, "found": one.verdict == right,
              "false": one.verdict not in (right, none)}  # fmt: skip
    return {**vars(one), "true": true, "seconds": seconds, "half_width": one.half_width, **judged}


def summary(sessions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares with their bounds, and medians."""
    columns = {name: [one[name] for one in sessions] for name in sessions[0]}
    shares = {name: bounds(sum(columns[name]), len(sessions)) for name in SHARES}
    medians = {name: statistics.median(columns[name]) for name in MEDIANS}
    return {"true": sessions[0]["true"], "sessions": len(sessions), **shares, **medians}


@click.command()
@click.option("--sessions", type=click.IntRange(1), default=40, help="Of either kind [40]")
@click.option("--minutes", default=0.5, help="--max_minutes of each [0.5]")
@click.option("--checkpoint_path", default="tiny")
@click.option("--scheme", default="none")
@click.option("--workers", type=click.IntRange(2), default=6, help="Processes that stay loaded [6]")
@click.option("--json", "path", type=Path, default=ROOT / "docs/data/trust_sessions.json")
def main(
    sessions: int, minutes: float, checkpoint_path: str, scheme: str, workers: int, path: Path
) -> None:
    """Measure; print and write the summary of either kind, and every session."""
    argv = ["--checkpoint_path", checkpoint_path, "--quantization", scheme, "--compile"]
    argv += ["--max_new_tokens", "32", "--write_result", "none"]
    with contextlib.ExitStack() as stack:
        for _ in range(workers):
            worker = Process()
            stack.callback(worker.close)
            worker.ask("load", argv=argv)
            Kept.idle.append((worker, worker.answer(ArmFacts, "get_ready")))
        done: list[dict[str, Any]] = []
        with contextlib.suppress(KeyboardInterrupt):  # what there is counts
            while len(done) < 2 * sessions:
                done.append(session(argv, minutes, (1.0, SLOWER)[len(done) % 2]))
                click.echo(f"{len(done)} of {2 * sessions}: {json.dumps(done[-1])}", err=True)
    rows = [summary(done[first::2]) for first in (0, 1) if done[first::2]]
    click.echo("\n".join(map(json.dumps, rows)))
    about_it = {"about": dataclasses.asdict(about()), "argv": argv, "minutes": minutes}
    path.write_text(json.dumps({**about_it, "rows": rows, "sessions": done}, indent=1) + "\n")
    missed = [r for r in rows if r["false"]["low"] > ERRS or r["covers"]["high"] < 1 - ERRS]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
