"""Lines of a log that are to be run again, and how each is run here.

chosen, refused = read("benchmarks.txt", lines=[7], everything=False, conditions=[])
config = mapped(chosen[0][1], {"device": "cpu"}, checkpoint_root=None, dummy=True)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.log import config_of
from quantbench.log.log import read as read_log
from quantbench.log.record import LINE, Record

# Options of the logged run that do not apply to a replay.
DROPPED = (
    *("write_result", "output_json_path", "profile", "memory_profile"),
    *("save", "format", "dry_run"),
)


@dataclass(frozen=True)
class Line:
    """A line of the log that can be run again."""

    number: int  # from 1
    record: Record
    config: RunConfig  # how it is run now

    @property
    def name(self) -> str:
        return f"line {self.number}: {self.record.quant}, {self.record.mod}"


def read(
    path: str, lines: Sequence[int], everything: bool, conditions: Sequence[str]
) -> tuple[list[tuple[int, Record]], list[tuple[int, str]]]:
    """The records that are asked for, and the lines that are no records; each with its number.

    Raises LogError for an unreadable or empty log, UsageError where nothing in it is meant.
    """
    reading = read_log(path)
    if not reading.records and not reading.bad:
        raise LogError(f"{path} holds no line of a run")
    wanted = [_condition(text) for text in conditions]
    if not (lines or everything or wanted):
        raise UsageError("which lines? --all, --line N or --where quant=int8wo")
    numbers = {number for number, _ in reading.records}
    unread = [(number, reason) for number, reason in reading.bad if number not in numbers]
    for number in lines:
        if number not in numbers and number not in dict(unread):
            raise UsageError(f"--line {number}: there is no run in line {number} of {path}")
    records = [
        (number, record)
        for number, record in reading.records
        if (not lines or number in lines)
        and all(_shown(record, name) == value for name, value in wanted)
    ]
    unread = [(n, reason) for n, reason in unread if n in lines or (everything and not wanted)]
    if not records and not unread:
        raise UsageError(f"no line of {path} has {' and '.join(conditions)}")
    return records, unread


def runnable(
    records: Sequence[tuple[int, Record]],
    changes: Mapping[str, Any],
    checkpoint_root: str | None,
    dummy: bool,
) -> tuple[list[Line], list[tuple[int, str]]]:
    """The records as lines to run, and why others cannot be run."""
    lines, problems = [], []
    for number, record in records:
        try:
            config = mapped(record, changes, checkpoint_root, dummy)
            lines.append(Line(number, record, config))
        except QuantbenchError as error:
            problems.append((number, str(error)))
    return lines, problems


def mapped(
    record: Record, changes: Mapping[str, Any], checkpoint_root: str | None, dummy: bool
) -> RunConfig:
    """The run a record asks for, as it is to be run here. Raises UsageError for a command that
    is not generate.py's or not understood."""
    config = config_of(record).without(DROPPED)
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


def _shown(record: Record, name: str) -> str:
    return f"{getattr(record, name):{LINE[name].style}}".strip()
