"""All that a comparison knows, as it goes along: what --output keeps and --resume reads back.

`results.json` is replaced whole, after each round, so that a kill leaves the last one.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from quantbench import files
from quantbench.compare.figures.choices import Recommendation, TuneAnswer
from quantbench.compare.figures.plan import Look, Plan
from quantbench.compare.sampling.answers import ArmFacts, Reading, TimedSample
from quantbench.compare.sampling.arm import Arm
from quantbench.errors import LogError, UsageError
from quantbench.log.about import About, about
from quantbench.log.config import argv
from quantbench.quality.thresholds import TOKENS
from quantbench.quality.types import NoQuality, Quality
from quantbench.text import counted, shown
from quantbench.typed_json import from_json, omitted, require, to_json

T = TypeVar("T")
FORMAT = 4
FILE = "results.json"
MOST_NAMED = 5  # arms that failed, in a message
MOST_BESIDE = 8  # arms side by side: the machine drifts within longer rounds


@dataclass(frozen=True)
class Settings:
    """When to stop, and what else to measure. See the options of the same names."""

    precision: float = 0.02
    max_minutes: float = 10
    processes: int | None = None  # of each arm, at most; None: schedule.PROCESSES
    samples: int | None = None  # of each process; None: comparison.SAMPLES
    tokens: int = TOKENS  # 0: no quality
    text: str | None = None
    in_turn: bool = False
    order_seed: int = 0
    fixed: bool = False  # run all processes, whatever the figures show meanwhile

    @staticmethod
    def of_rounds(rounds: int, processes: int, max_minutes: float = 10) -> "Settings":
        """Settings for this many rounds in all, shared among the processes, whatever the figures
        show; no quality is measured."""
        count = min(rounds, processes)
        return Settings(
            max_minutes=max_minutes,
            processes=count,
            samples=-(-rounds // count),
            tokens=0,
            fixed=True,
        )


@dataclass(frozen=True, kw_only=True)
class ArmSample(TimedSample):
    """A sample that counts."""

    block: int  # from 0; a block has one process of every arm
    round: int  # from 0, over all blocks; when arms are loaded one by one, each turn is a round
    process: int  # from 0: which of the arm's processes took it
    started: float  # seconds, time.monotonic() of the coordinator


@dataclass
class ArmResult:
    """An arm and what was measured of it."""

    name: str
    text: str  # as the person wrote it
    argv: list[str]  # options of generate.py, or for another runtime its own
    facts: ArmFacts | None = None  # None until the first process is ready
    quality: Quality | NoQuality | None = None
    samples: list[ArmSample] = field(default_factory=list)
    failed: str | None = None  # why there are no more samples
    unable: bool | None = omitted()  # whether that was known before anything was measured
    dropped: bool = False  # settled, and another arm is shown to be faster: not measured further
    also: list[str] | None = omitted()  # of a tune: other settings of the same plan, not measured

    def check(self) -> None:
        """Raise ValueError, with the value, for what no run measures."""
        for sample in self.samples:
            require("seconds of a sample", sample.prefill_seconds, *sample.token_seconds)
            require("seconds of a sample", sample.decode_seconds, above=-1e-9)
            require("a speed", sample.tok_s, sample.prefill_tok_s, sample.decode_tok_s)
            require("memory", *sample.peak_memory_bytes.values(), above=-1)
        if isinstance(self.quality, Quality):
            ratios = (
                self.quality.perplexity_ratio,
                *(self.quality.perplexity_ratio_interval or ()),
            )
            require("perplexity", self.quality.perplexity, *ratios)
        if self.facts and self.facts.run:
            run = self.facts.run
            require("bytes", run.weight_bytes, run.step_weight_bytes, run.kv_cache_bytes)

    @property
    def processes(self) -> int:
        """How many took the samples."""
        return len({sample.process for sample in self.samples})


@dataclass
class Results:
    """Everything that a comparison measured so far."""

    settings: Settings
    arms: list[ArmResult]
    write_result: str
    in_turn: bool = False
    blocks: int = 0  # whole ones
    rounds: int = 0  # whole ones
    plan: Plan | None = None  # None until the first block has shown how long one takes
    looks: list[Look] = field(default_factory=list)  # what was seen and spent, oldest first
    measuring_seconds: float = 0.0  # spent on samples, in all sessions
    samples: int | None = None  # of a process: as many as are worth its start, and in the budget
    # precise, processes, max_minutes, baseline failed, nothing to compare with, interrupted; None
    # while it runs
    ended: str | None = None
    bandwidth: dict[str, list[Reading]] = field(default_factory=dict)  # by device
    logged_rounds: int = 0
    recommendation: Recommendation | None = None  # of the last report
    tune: TuneAnswer | None = omitted()  # of the last report of a tune
    about: About | None = None

    @staticmethod
    def begin(settings: Settings, arms: Sequence[Arm], write_result: str) -> "Results":
        arm_results = [
            ArmResult(
                arm.name,
                arm.text,
                argv(arm.config, said=True),
                failed=arm.problem,
                unable=True if arm.problem else None,
            )
            for arm in arms
        ]
        return Results(settings, arm_results, write_result, in_turn=settings.in_turn, about=about())

    @property
    def baseline(self) -> ArmResult:
        return self.arms[0]

    @property
    def alive(self) -> list[ArmResult]:
        return [arm for arm in self.arms if arm.failed is None]

    @property
    def running(self) -> list[ArmResult]:
        """Arms of which more samples are taken."""
        return [self.arms[number] for number in self.numbers]

    @property
    def numbers(self) -> list[int]:
        """Numbers, from 0, of the arms of which more samples are taken."""
        arms = enumerate(self.arms)
        return [n for n, arm in arms if arm.failed is None and not arm.dropped]

    def failure(self) -> str | None:
        """One line for arms that failed, with what to do; None where all went well. What was known
        to be unable before anything was measured has not failed."""
        failed = [arm for arm in self.arms if arm.failed is not None and not arm.unable]
        if not failed:
            return None
        names = [f"{'the baseline, ' * (arm is self.baseline)}{shown(arm.name)}" for arm in failed]
        what = f"{names[0]} failed: {failed[0].failed}"
        if len(failed) > 1:
            listed = ", ".join(names[:MOST_NAMED]) + " …" * (len(names) > MOST_NAMED)
            every = counted(len(self.arms), "arm")
            what = f"{len(failed)} of {every} failed ({listed}); {names[0]}: {failed[0].failed}"
        compared = len(self.alive) > 1 and self.baseline not in failed
        left = "the others were compared" if compared else "nothing was compared"
        return (
            f"{what}; {left}: change or leave out what failed; `quantbench generate` runs it alone"
        )

    def forget_unfinished(self) -> None:
        """Drop what was measured of a block that was cut short. In turn, whole groups of turns with
        the baseline's before and after them stay."""
        base = [sample.round for sample in self.baseline.samples if sample.block >= self.blocks]
        whole = {number for number in base if base.count(number) == max(map(base.count, base))}
        last = max(whole) if self.in_turn and len(whole) > 1 else -1
        for arm in self.arms:
            arm.samples = [s for s in arm.samples if s.block < self.blocks or s.round <= last]
        taken = [sample.round for arm in self.arms for sample in arm.samples]
        self.rounds = 1 + max(taken, default=-1)
        for device, readings in self.bandwidth.items():
            kept = [r for r in readings if r.round is not None and r.round < self.rounds]
            self.bandwidth[device] = kept

    def check(self) -> None:
        """Raise ValueError, with the value, for what no comparison measures."""
        if not self.arms:
            raise ValueError("it has no arms")
        names = [arm.name for arm in self.arms]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two arms have the name {min(twice)!r:.80}")
        if self.looks and not self.arms[0].samples:
            raise ValueError("the arms were compared, and the baseline has no samples")
        for reading in (reading for every in self.bandwidth.values() for reading in every):
            require("bandwidth", reading.bytes_per_s)
        for arm in self.arms:
            arm.check()

    def as_json(self, rows: Sequence[object] | None = None) -> dict[str, object]:
        """What the file holds."""
        value = {"format": FORMAT, **to_json(self)}
        return value | ({"rows": to_json(rows)} if rows else {})

    def save(self, folder: Path | None, rows: Sequence[object] | None = None) -> None:
        """Write results.json into the folder, if there is one. rows: the report's figures.

        Raises LogError where that cannot be written.
        """
        if folder is None:
            return
        scratch = folder / f".{FILE}"
        try:
            with open(scratch, "w") as file:
                json.dump(self.as_json(rows), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, folder / FILE)
        except OSError as error:
            raise LogError(f"cannot write {folder / FILE}: {error.strerror}") from None

    def go_on(self, stops: Mapping[str, Any], option: str) -> None:
        """Take these settings of when to stop, and measure on where the run was not finished.

        Raises UsageError where more would be measured and `require_same_origin` refuses.
        """
        self.settings = replace(self.settings, **stops)
        if stops or self.ended == "interrupted":
            self.ended = None
        if self.ended is None:
            self.require_same_origin(option)

    def require_same_origin(self, option: str) -> None:
        """Raise UsageError where samples that are taken now would be of another commit, torch or
        machine than those that are there: an interval over both would be of neither."""
        if self.about is None:  # written before files said where they are from
            return
        here = about()
        pairs = {
            "commit": (_clean(self.about.commit), _clean(here.commit)),
            "machine": (self.about.machine, here.machine),
            "torch": (self.about.versions.get("torch"), here.versions.get("torch")),
            "torchao": (self.about.versions.get("torchao"), here.versions.get("torchao")),
        }
        for what, (then, now) in pairs.items():
            if then != now:
                raise UsageError(
                    f"{option}: it was measured with {what} {then}, and this is {now}; "
                    "samples of both would be mixed: begin anew with --output"
                )

    @staticmethod
    def load(folder: Path, option: str = "--resume") -> "Results":
        """What `save` wrote. option: that named the folder. Raises UsageError where nothing of the
        kind is there."""

        def accept(value: Any) -> Results:
            if "format" not in value:
                raise ValueError("it has no format")
            if value["format"] != FORMAT:
                raise UsageError(f"{option} {folder}: another version wrote its {FILE}")
            results = from_json(Results, value)
            results.check()
            return results

        return read_results(option, folder, "ab", accept)


def _clean(commit: str | None) -> str | None:
    """A commit without "-dirty": a log that grows in the checkout makes it so, too."""
    return commit and commit.removesuffix("-dirty")


def read_results(option: str, folder: Path, command: str, accept: Callable[[Any], T]) -> T:
    """What `accept` makes of results.json, which --output of a command wrote into a folder.

    accept: of the file's JSON, an object; a ValueError of it says what is damaged.
    Raises UsageError, one line, where nothing of the kind is there.
    """
    path, named = folder / FILE, f"{option} {folder}: {FILE}"
    if why := files.problem(path):
        raise UsageError(f"{named}: {why}; {command} --output writes it")
    value = files.read_json(option, path, UsageError, f"{command} --output writes it")
    try:
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        return accept(value)
    except ValueError as error:
        raise UsageError(f"{named} is not what {command} --output writes: {error}") from None


def report_output(path: str | None) -> files.Output:
    """What `write_json` will write, for files.check_outputs."""
    return files.Output("--json", path, files.json_with("about"), "JSON of such a command")


def write_json(path: str, value: object) -> None:
    """What --json asks for: the value's keys, or "rows" where it is a list, and what it says of
    itself, "about". Raises LogError where that cannot be written."""
    fields = to_json(value)
    fields = {"rows": fields} if isinstance(fields, list) else fields
    fields = {"about": to_json(about()), **fields}
    files.write_text("--json", path, json.dumps(fields, indent=1) + "\n")
