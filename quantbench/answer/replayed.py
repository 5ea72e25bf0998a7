"""One run measured again: alone, or beside the same run on an older commit.

measured(config, processes=4, read=True).relative       # seconds a token × bytes a second
beside(config, old, half_width=0.02).speed              # now ÷ then, with its interval
"""

import statistics
from contextlib import closing
from dataclasses import dataclass, field

from quantbench.answer.interval import Interval
from quantbench.answer.limits import Limits
from quantbench.answer.rows import rows
from quantbench.answer.stop import Enough
from quantbench.bench import ranks
from quantbench.bench.answers import ArmFacts, Reading, TimedSample
from quantbench.bench.old_commit import OldCommit
from quantbench.bench.process import COMMAND, Process
from quantbench.bench.session import Session
from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.errors import QuantbenchError
from quantbench.log.config import RunConfig, argv, repro
from quantbench.log.record import Record
from quantbench.run.facts import Facts, Peak, make_record


@dataclass(frozen=True)
class Replayed:
    """A run, measured again: alone, or interleaved with an older commit."""

    record: Record
    # Alone: seconds a token × bytes a second of its memory, for each process.
    relative: list[float] = field(default_factory=list)
    caveat: str | None = None  # why that reading is not the memory's speed
    speed: Interval | None = None  # now ÷ then; above 1 it became faster


def measured(config: RunConfig, processes: int, read: bool) -> Replayed:
    """Run it now, in so many processes, one after the other. read: the memory's speed, too. Raises
    what keeps it from running."""
    facts: Facts | None = None
    samples: list[TimedSample] = []
    relative: list[float] = []
    caveat: str | None = None
    for _ in range(processes):
        with closing(Process(ranks.of(COMMAND, config.tp))) as worker:
            worker.ask("load", argv=argv(config, said=True))
            facts = worker.answer(ArmFacts, "get_ready").run
            assert facts  # of a worker of ours
            own = [worker.answer(TimedSample, "sample", index=n) for n in range(config.num_samples)]
            if read:
                reading = _reading(worker, facts)
                caveat = caveat or reading.caveat
                seconds = statistics.fmean(1 / sample.tok_s for sample in own)
                relative.append(seconds * reading.bytes_per_s)
        samples += own
    assert facts
    kinds = samples[0].peak_memory_bytes
    peak = {kind: max(sample.peak_memory_bytes[kind] for sample in samples) for kind in kinds}
    tok_s = statistics.fmean(sample.tok_s for sample in samples)
    return Replayed(_record(facts, tok_s, peak), relative, caveat)


def _reading(worker: Process, facts: Facts) -> Reading:
    """The speed of the memory, read by the worker; of one that is several ranks, by a process of
    its own with all their threads."""
    device = facts.config.device
    if facts.config.tp == 1:
        return worker.answer(Reading, "bandwidth", device=device)
    with closing(Process()) as alone:
        return alone.answer(Reading, "bandwidth", device=device)


def beside(config: RunConfig, old: OldCommit, half_width: float | None) -> Replayed:
    """Run it on the old commit and on the present one, in turns, until the interval is as narrow as
    half_width.

    Raises QuantbenchError where either of them does not run it, or the old commit's C++ kernels do
    not build.
    """
    if config.tp > 1 and not old.has_ranks:
        raise QuantbenchError(
            f"--against {old.name}: that commit measures no ranks, and the line has --tp "
            f"{config.tp}; take a younger one"
        )
    if config.device in ("auto", "cpu") and (reason := old.not_built()):
        raise QuantbenchError(
            f"--against {old.name}: that commit's C++ kernels do not build here, as the present "
            f"ones do: {reason}"
        )
    run = repro(config), argv(config, said=True)
    arms = [ArmResult(f"commit {old.name}", *run), ArmResult("now", *run)]
    settings = Settings(tokens=0, half_width=half_width or Settings().half_width)
    results = Results.begin(settings, arms, "none")
    store, rule = Store(results, None), Enough(Limits())
    Session(store, rule, old.command_of, has_turns=old.has_turns).run()
    if results.ended == "interrupted":
        raise KeyboardInterrupt
    then, now = results.arms
    if then.failed is not None:
        raise QuantbenchError(f"--against {old.name}: that commit does not run it: {then.failed}")
    row = rows(results)[1]
    facts = now.run
    if now.failed is not None or facts is None or row.tok_s is None or row.speed_up is None:
        raise QuantbenchError(now.failed or "nothing was measured")
    peak = (row.peak_memory_bytes or {})["generate"]
    return Replayed(_record(facts, row.tok_s, peak), speed=row.speed_up)


def _record(facts: Facts, tok_s: float, peak: Peak) -> Record:
    """Rounded as in the log: 0.0106 GB is no more than 0.01."""
    return Record.parse(make_record(facts, tok_s, peak).render())
