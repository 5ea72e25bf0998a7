"""Lines of a log: how each is run again, and the run measured.

how = partial(mapped, changes={"device": "cpu"}, checkpoint_root=None, dummy=True)
lines, problems = chosen("benchmarks.txt", [7], False, [], how)
measured(lines[0].config, processes=1).tok_s
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench.bench import ranks
from quantbench.bench.answers import ArmFacts, TimedSample
from quantbench.bench.process import COMMAND, Process
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log import log
from quantbench.log.config import RunConfig, argv
from quantbench.log.record import LINE, Record
from quantbench.run.facts import Facts, make_record

# Options of the logged run that do not apply to a replay. Whoever wrote the log chooses no place on
# this disk to write to.
DROPPED = (
    *("write_result", "output_json_path", "profile", "memory_profile"),
    *("save", "format", "dry_run", "expert_folder"),
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


def measured(config: RunConfig, processes: int) -> Record:
    """Run it now, in `processes` processes in sequence. Raises what keeps it from running."""
    facts: Facts | None = None
    samples: list[TimedSample] = []
    for _ in range(processes):
        with closing(Process(ranks.of(COMMAND, config.tp))) as worker:
            worker.ask("load", argv=argv(config, said=True))
            facts = worker.answer(ArmFacts, "get_ready").run
            assert facts  # of a worker of ours
            samples += [
                worker.answer(TimedSample, "sample", index=n) for n in range(config.num_samples)
            ]
    assert facts
    kinds = samples[0].peak_memory_bytes
    peak = {kind: max(sample.peak_memory_bytes[kind] for sample in samples) for kind in kinds}
    tok_s = statistics.fmean(sample.tok_s for sample in samples)
    # Rounded as in the log: 0.0106 GB is no more than 0.01.
    return Record.parse(make_record(facts, tok_s, peak).render())
