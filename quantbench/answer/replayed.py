"""Lines of a log: how each is run again, and the run measured, alone or beside an older commit.

how = partial(mapped, changes={"device": "cpu"}, checkpoint_root=None, dummy=True)
lines, problems = chosen("benchmarks.txt", [7], False, [], how)
measured(config, processes=4, read=True).relative       # seconds a token × bytes a second
beside(config, old, half_width=0.02).speed              # now ÷ then, with its interval
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log import log
from quantbench.log.config import RunConfig, argv, repro
from quantbench.log.record import LINE, Record
from quantbench.run.facts import Facts, Peak, make_record

# Options of the logged run that do not apply to a replay.
DROPPED = (
    *("write_result", "output_json_path", "profile", "memory_profile"),
    *("save", "format", "dry_run"),
)


@dataclass(frozen=True)
class Line:
    number: int  # from 1
    record: Record
    config: RunConfig  # how it is run now

    @property
    def name(self) -> str:
        return f"line {self.number}: {self.record.quant}, {self.record.mod}"


def chosen(
    path: str,
    lines: Sequence[int],
    everything: bool,
    conditions: Sequence[str],
    config_of_record: Callable[[Record], RunConfig],
) -> tuple[list[Line], list[str]]:
    """The lines that are asked for, and why others of them cannot be run.

    config_of_record: how a record is run now; it raises QuantbenchError where it cannot be. Raises
    LogError for an unreadable or empty log, UsageError where nothing in it is meant.
    """
    reading = log.read(path)
    if not reading.records and not reading.bad:
        raise LogError(f"{path} holds no line of a run")
    wanted = [_condition(text) for text in conditions]
    if not (lines or everything or wanted):
        raise UsageError("which lines? --all, --line N or --where quant=int8wo")
    numbers = {number for number, _ in reading.records}
    unread = {number: reason for number, reason in reading.bad if number not in numbers}
    for number in lines:
        if number not in numbers and number not in unread:
            raise UsageError(f"--line {number}: there is no run in line {number} of {path}")
    meant = (n for n in unread if n in lines or (everything and not wanted))
    able, problems = [], [f"line {number}: {unread[number]}" for number in meant]
    for number, record in reading.records:
        if lines and number not in lines:
            continue
        shown = {name: f"{getattr(record, name):{LINE[name].style}}".strip() for name, _ in wanted}
        if all(shown[name] == value for name, value in wanted):
            try:
                able.append(Line(number, record, config_of_record(record)))
            except QuantbenchError as error:
                problems.append(f"line {number}: {error}")
    if not able and not problems:
        raise UsageError(f"no line of {path} has {' and '.join(conditions)}")
    return able, problems


def mapped(
    record: Record, changes: Mapping[str, Any], checkpoint_root: str | None, dummy: bool
) -> RunConfig:
    """The run a record asks for, as it is to be run here. Raises UsageError for a command that
    is not generate.py's or not understood."""
    config = log.config_of(record).without(DROPPED)
    if config.interactive:
        raise UsageError("--interactive is a conversation, which cannot be repeated")
    if "checkpoint_path" not in changes:
        path = checkpoint(config.checkpoint_path, record.mod, checkpoint_root, dummy)
        config = dataclasses.replace(config, checkpoint_path=path)
    return dataclasses.replace(config, **changes)


def checkpoint(path: str, model: str, root: str | None, dummy: bool) -> str:
    """Where the checkpoint is now: itself, under `root` by as much of its path as can be found
    there, or random weights of the model of that name."""
    if path in ("tiny", "tiny_moe") or path.startswith("dummy:") or Path(path).exists():
        return path
    parts = [part for part in Path(path).parts if part not in ("..", ".", "/")]
    if root is not None:
        for start in range(len(parts)):
            place = Path(root, *parts[start:])
            # a bare model.pth of the root could be any model's
            if place.exists() and (start < len(parts) - 1 or not place.is_file()):
                return str(place)
        if not dummy:
            raise UsageError(f"--checkpoint_root {root} does not hold {path}; --dummy goes without")
    if dummy:
        return f"dummy:{model}"
    return path  # it may be one of the hub; loading says what would help


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in LINE:
        fields = ", ".join(LINE)
        raise UsageError(f"--where takes FIELD=VALUE, of {fields}; given: {text!r}")
    return name, value


# ------------------------------------------------------------------------------------- measured


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
