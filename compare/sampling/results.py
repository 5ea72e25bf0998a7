"""All that a comparison knows, as it goes along: what --output keeps and --resume reads back.

`results.json` is replaced whole, after each round, so that a kill leaves the last one.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import files
from benchlog.config import argv
from compare.sampling.arm import Arm
from errors import LogError, UsageError

FORMAT = 2
FILE = "results.json"


@dataclass(frozen=True)
class Settings:
    """When to stop, and what to measure besides. See the options of the same names."""

    precision: float = 0.02
    max_rounds: int = 100
    max_minutes: float = 10
    tokens: int = 2048
    text: str | None = None
    in_turn: bool = False
    processes: int = 10
    order_seed: int = 0


@dataclass
class ArmResult:
    """An arm and what it gave: `facts` before its first sample, `quality`, a dict a sample. Each
    sample has its "round" and "process"; `failed` says why there are no more."""

    name: str
    text: str
    argv: list[str]
    facts: dict[str, Any] | None = None
    quality: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    failed: str | None = None

    @property
    def processes(self) -> int:
        """How many took the samples."""
        return len({sample["process"] for sample in self.samples})

    def in_round(self, number: int) -> int:
        return sum(sample["round"] == number for sample in self.samples)


@dataclass(frozen=True)
class Reading:
    """One reading of a device's memory bandwidth."""

    bytes_per_s: float
    round: int | None  # taken just before this round; None: after the last one
    probe: str  # the op that read
    caveat: str | None = None  # why this is not the memory's speed; None where it is


@dataclass
class Results:
    """`rounds` are whole ones. `ended` says why it stopped: precise, max_rounds, max_minutes,
    baseline failed, interrupted, or None while it runs. `bandwidth`: readings by device."""

    settings: Settings
    arms: list[ArmResult]
    write_result: str
    in_turn: bool = False
    rounds: int = 0
    ended: str | None = None
    bandwidth: dict[str, list[Reading]] = field(default_factory=dict)
    logged_rounds: int = 0

    @staticmethod
    def begin(settings: Settings, arms: Sequence[Arm], write_result: str) -> "Results":
        found = [
            ArmResult(
                arm.name,
                arm.text,
                argv(arm.config, said=True) if arm.config else [],
                failed=arm.problem,
            )
            for arm in arms
        ]
        return Results(settings, found, write_result, in_turn=settings.in_turn)

    @property
    def baseline(self) -> ArmResult:
        return self.arms[0]

    @property
    def alive(self) -> list[ArmResult]:
        return [arm for arm in self.arms if arm.failed is None]

    def save(self, folder: Path | None, rows: Sequence[dict[str, Any]] | None = None) -> None:
        """Into the folder, if there is one; `rows`, the figures of the report, beside the rest.

        Raises LogError where that cannot be written.
        """
        if folder is None:
            return
        value = {"format": FORMAT, **dataclasses.asdict(self)} | ({"rows": rows} if rows else {})
        scratch = folder / f".{FILE}"
        try:
            with open(scratch, "w") as file:
                json.dump(value, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, folder / FILE)
        except OSError as error:
            raise LogError(f"cannot write {folder / FILE}: {error.strerror}") from None

    @staticmethod
    def load(folder: Path) -> "Results":
        """What `save` wrote. Raises UsageError where there is nothing of the kind."""
        path = folder / FILE
        try:
            if why := files.problem(path):
                raise UsageError(f"--resume {folder}: {FILE}: {why}")
            value = json.loads(files.read_text("--resume", path))
            if value.pop("format") != FORMAT:
                raise UsageError(f"--resume {folder}: another version wrote its {FILE}")
            value.pop("rows", None)
            value["settings"] = Settings(**value["settings"])
            value["arms"] = [ArmResult(**arm) for arm in value["arms"]]
            value["bandwidth"] = {
                device: [Reading(**reading) for reading in readings]
                for device, readings in value["bandwidth"].items()
            }
            return Results(**value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"--resume {folder}: {FILE} is not what --output writes") from None


def write_json(path: str, value: Any) -> None:
    """What --json asks for. Raises LogError where that cannot be written."""
    files.write_text("--json", path, json.dumps(value, indent=1) + "\n")
