"""What a session of measuring has seen: in memory, and in a folder that is only ever appended to.

    DIR/meta.json       what is measured, with which settings, by which commit on which machine
    DIR/samples.jsonl   a line for each event: {"turn": {"arm": 1, "cycle": 7, "seconds": 0.093, …}}

Resuming is reading both. A kill loses the line that was being written, at most.
"""

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TextIO

from quantbench import files
from quantbench.bench.answers import ArmFacts, Reading, TimedSample
from quantbench.errors import LogError, UsageError
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.log.origin import Origin, about
from quantbench.quality.thresholds import TOKENS
from quantbench.quality.types import Likeliest, NoQuality, Quality, QualityReference
from quantbench.run.facts import Facts
from quantbench.stats import Floor
from quantbench.text import cleaned, counted, shown
from quantbench.typed_json import from_json, omitted, parsed, require, to_json

FORMAT = 1
META, SAMPLES = "meta.json", "samples.jsonl"
UNCHANGED = {"argv", "text", "settings", "config", "models", "write_result"}  # not only printed
MOST_NAMED = 5  # arms that failed, in a message
Kind = Literal["decode", "prompt"]


@dataclass(frozen=True)
class Settings:
    """When to stop, and what else to measure. See the options of the same names."""

    half_width: float = 0.03  # of an interval that is narrow enough
    max_minutes: float = 10  # of the session, loading included
    processes: int = 4  # of each arm, at most
    cycles: int | None = None  # of each process, whatever the figures show; None: as many as needed
    tokens: int = TOKENS  # 0: no quality
    text: str | None = None
    reference: QualityReference | None = omitted()  # of --same_model; None: the baseline
    floor: Floor | None = omitted()  # of this machine's processes; None: as assumed


# ---------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Started:
    """A process of an arm is loaded and warm."""

    arm: int
    process: int
    facts: ArmFacts
    machine: str | None = omitted()  # where it is another one than meta.json's: a node of Ray


@dataclass(frozen=True)
class Scored:
    """An arm's quality, and what is known of the model that was judged (quality/types.py)."""

    arm: int
    quality: Quality | NoQuality
    likeliest: Likeliest | None = omitted()
    weight_bytes: int | None = omitted()
    kernel: str | None = omitted()


@dataclass(frozen=True)
class Turn:
    """Tokens of each row, and their seconds. Turns of one cycle are compared with each other."""

    arm: int
    process: int
    cycle: int
    kind: Kind
    tokens: int
    seconds: float
    steps: list[float] | None = omitted()  # seconds of each decoding step, in latency


@dataclass(frozen=True, kw_only=True)
class ArmSample(TimedSample):
    """A whole sample as generate.py takes it: of these are the log line and the peak memory."""

    arm: int
    process: int


@dataclass(frozen=True)
class Left:
    """An arm of which no more is measured. failed: for an error; else the answer needs no more."""

    arm: int
    why: str
    failed: bool = False


@dataclass(frozen=True)
class Bandwidth:
    device: str
    reading: Reading


@dataclass(frozen=True)
class Ended:
    """The end of a session; another may go on."""

    why: str  # answered, processes, max_minutes, baseline failed, nothing to compare, interrupted
    seconds: float  # of this session
    loading: float | None = omitted()  # of them, for loading arms and their quality


EVENTS: dict[str, type] = {
    "ready": Started,
    "scored": Scored,
    "turn": Turn,
    "sample": ArmSample,
    "left": Left,
    "bandwidth": Bandwidth,
    "ended": Ended,
}
KEYS = {kind: key for key, kind in EVENTS.items()}


# --------------------------------------------------------------------------------------- results


@dataclass
class Planned:
    """An arm before anything is measured, as in meta.json."""

    name: str
    text: str  # as the person wrote it
    argv: list[str]  # options of generate.py, or for another runtime its own
    unable: str | None = omitted()  # why it cannot run here, known before anything was measured


@dataclass
class ArmResult(Planned):
    """An arm and what was measured of it."""

    facts: ArmFacts | None = None  # None until the first process is ready
    quality: Quality | NoQuality | None = None
    judged: Scored | None = None  # with which quality came
    turns: list[Turn] = field(default_factory=list)
    samples: list[ArmSample] = field(default_factory=list)
    processes: int = 0  # that were ready
    machine: str | None = None  # the node of Ray that measured it
    failed: str | None = None  # why there are no more samples
    dropped: str | None = None  # why no more are needed

    def __post_init__(self) -> None:
        self.failed = self.failed or self.unable

    @cached_property
    def config(self) -> RunConfig:
        """The arm's options. Raises UsageError for an arm of another runtime."""
        return parse(self.argv)

    @property
    def run(self) -> Facts | None:
        """What is known of its run; None before it is ready, and of another runtime."""
        return self.facts.run if self.facts else None


@dataclass
class Results:
    """Everything that was measured so far."""

    settings: Settings
    arms: list[ArmResult]
    write_result: str = "none"
    about: Origin | None = None
    limits: dict[str, Any] = field(default_factory=dict)  # from the command line, by option
    plan: dict[str, Any] | None = None  # of latency: its cells are the arms (latency/cell_plan.py)
    cycles: int = 0  # numbers that were given
    bandwidth: dict[str, list[Reading]] = field(default_factory=dict)  # by device
    ended: str | None = None
    end: Ended | None = None  # of the last session
    kept = (0, 0)  # bytes of samples.jsonl when it was read, and of its whole lines

    def __post_init__(self) -> None:
        self.elapsed: Callable[[], float] | None = None  # seconds of a first session that runs
        self.resumed = False  # whether a session went on with what another had left

    @staticmethod
    def begin(settings: Settings, arms: Sequence[ArmResult], write_result: str) -> "Results":
        return Results(settings, [*arms], write_result, about())

    @property
    def baseline(self) -> ArmResult:
        return self.arms[0]

    @property
    def alive(self) -> list[ArmResult]:
        return [arm for arm in self.arms if arm.failed is None]

    def turns(self, arm: int, kind: Kind) -> list[Turn]:
        """The arm's turns of this kind, in the order in which they were taken."""
        return [turn for turn in self.arms[arm].turns if turn.kind == kind]

    def apply(self, event: object) -> None:
        """Take in what happened."""
        match event:
            case Started(number, process, facts, machine):
                arm = self.arms[number]
                arm.machine = machine
                if arm.facts:  # the first process read the model as generate.py does
                    facts = dataclasses.replace(
                        facts,
                        peak_memory_bytes=arm.facts.peak_memory_bytes,
                        start_seconds=[*arm.facts.start_seconds, *facts.start_seconds],
                        energy=[*arm.facts.energy, *facts.energy],
                    )
                arm.facts, arm.processes = facts, process + 1
            case Scored(number, quality):
                self.arms[number].quality, self.arms[number].judged = quality, event
            case Turn():
                self.arms[event.arm].turns.append(event)
                self.cycles = max(self.cycles, event.cycle + 1)
            case ArmSample():
                self.arms[event.arm].samples.append(event)
            case Left(number, why, True):
                self.arms[number].failed = why
            case Left(number, why, False):
                self.arms[number].dropped = why
            case Bandwidth(device, reading):
                self.bandwidth.setdefault(device, []).append(reading)
            case Ended(why):
                self.resumed |= self.end is not None
                self.ended, self.end = why, event

    def failure(self) -> str | None:
        """One line for arms that failed, with what to do; None where all went well. What was known
        to be unable before anything was measured has not failed."""
        failed = [arm for arm in self.arms if arm.failed is not None and arm.unable is None]
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


# ----------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Meta:
    """What meta.json holds."""

    format: int
    settings: Settings
    arms: list[Planned]
    write_result: str
    about: Origin
    limits: dict[str, Any]
    plan: dict[str, Any] | None = omitted()
    process: int | None = omitted()  # that measures, or measured last


class Store:
    """Results, and the folder that keeps them, if there is one."""

    def __init__(self, results: Results, folder: Path | None) -> None:
        """Begin or go on. Raises LogError where the folder cannot be written, or where another
        process measures there or has since it was read."""
        self.results, self.folder = results, folder
        self.file: TextIO = io.StringIO()  # in the place of a folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = files.opened(folder / SAMPLES, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self.file = open(descriptor, "a", buffering=1, encoding="utf-8")
            self._own(folder, descriptor)
        except OSError as error:
            why = files.reason(folder / SAMPLES, error)
            raise LogError(f"--output {folder}: {SAMPLES}: {why}") from None
        _write_meta(results, folder)

    def _own(self, folder: Path, descriptor: int) -> None:
        """Hold the folder while this process lives, and cut off the line that a kill left."""
        size, whole = self.results.kept
        if not files.take(descriptor):
            raise LogError(f"{folder}: {_holder(folder)} measures there now; wait for its end, or "
                           "give another folder")  # fmt: skip
        if os.fstat(descriptor).st_size != size:
            raise LogError(f"{folder}: another process has measured there since it was read; run "
                           "this again")  # fmt: skip
        if whole < size:
            os.ftruncate(descriptor, whole)

    def add(self, event: object) -> None:
        """Take the event in, and append it. Raises LogError where it cannot be written."""
        self.results.apply(event)
        line = json.dumps({KEYS[type(event)]: to_json(event)}) + "\n"  # of ASCII alone
        try:
            self.file.write(line)
            self.results.kept = (self.results.kept[1] + len(line),) * 2
        except OSError as error:
            raise LogError(f"cannot write {self.folder}/{SAMPLES}: {error.strerror}") from None


def _write_meta(results: Results, folder: Path) -> None:
    assert results.about
    kept = [part.name for part in dataclasses.fields(Planned)]
    arms = [Planned(**{name: getattr(arm, name) for name in kept}) for arm in results.arms]
    given = (results.settings, arms, results.write_result, results.about, results.limits)
    meta = Meta(FORMAT, *given, results.plan, os.getpid())
    text = json.dumps(to_json(meta), indent=1) + "\n"
    files.write_text("--output", folder / META, text, follow=False)


def _holder(folder: Path) -> str:
    """The process that measures into this folder."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        return f"process {int(parsed(files.read_ours(folder / META))['process'])}"
    return "another process"


def load(folder: Path, option: str = "--resume", command: str = "ab") -> Results:
    """What a Store kept in this folder. option: that named it. command: ab, for recommend
    as well, or latency. Raises UsageError, one line, where nothing of the kind is there."""
    named, written = f"{option} {folder}", f"{command} --output writes it"
    path = folder / META
    if why := files.missing(folder):
        raise UsageError(f"{named}: {why}; {written}")
    if why := files.problem(path):
        raise UsageError(f"{named}: {META}: {why}; {written}")
    value = files.read_json(option, path, UsageError, written)
    if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
        raise UsageError(f"{named}: another version wrote its {META}; measure again")
    try:
        if not isinstance(value, dict):
            raise ValueError("it is no JSON object")
        meta = from_json(Meta, cleaned(value, UNCHANGED))
        arms = [ArmResult(**vars(planned)) for planned in meta.arms]
        if not arms:
            raise ValueError("it has no arms")
        names = [arm.name for arm in arms]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two arms have the name {min(twice)!r:.80}")
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{named}: {META} is not what {command} --output writes: {error}"
        ) from None
    if (meta.plan is not None) != (command == "latency"):
        kept = "latency" if meta.plan is not None else "ab"
        raise UsageError(f"{named}: its {META} is of {kept}; {command} --output writes its own")
    results = Results(meta.settings, arms, meta.write_result, meta.about, meta.limits, meta.plan)
    _replay(results, folder / SAMPLES, named)
    return results


def _replay(results: Results, path: Path, named: str) -> None:
    """Apply every event of the file, but not a last line without its end, which a kill left."""
    data = b""
    try:
        data = files.read_ours(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"{named}: {SAMPLES}: {files.reason(path, error)}") from None
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        if line.startswith(b'{"repeated"'):  # of an earlier version: its cycles count, too
            continue
        try:
            event = event_of(cleaned(parsed(line), UNCHANGED))
            _check(event, len(results.arms))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{named}: line {number} of {SAMPLES} is not what --output writes: {error}"
            ) from None
        results.apply(event)
    results.kept = len(data), len(whole)


def event_of(value: object) -> Any:
    """The event in a line's JSON. Raises ValueError, KeyError or TypeError where it holds none."""
    if not (isinstance(value, dict) and len(value) == 1 and EVENTS.keys() >= value.keys()):
        raise ValueError(f"an event is one of {', '.join(EVENTS)}; given: {value!r:.80}")
    ((key, inner),) = value.items()
    return from_json(EVENTS[key], inner)


def _check(event: object, arms: int) -> None:
    """Raise ValueError, with the value, for what nothing measures."""
    if not 0 <= getattr(event, "arm", 0) < arms:
        raise ValueError(f"there are arms 0 to {arms - 1}; given: {event.arm}")  # type: ignore
    match event:
        case Turn():
            require("seconds of a turn", event.seconds)
            require("tokens of a turn", event.tokens)
            require("seconds of a step", *(event.steps or ()))
        case ArmSample():
            require("seconds of a sample", event.prefill_seconds, *event.token_seconds)
            require("seconds of a sample", event.decode_seconds, above=-1e-9)
            require("a speed", event.tok_s, event.prefill_tok_s, event.decode_tok_s)
            require("memory", *event.peak_memory_bytes.values(), above=-1)
        case Bandwidth():
            require("bandwidth", event.reading.bytes_per_s)
        case Scored(_, Quality() as quality):
            require("perplexity", quality.perplexity, quality.perplexity_ratio)


def same_origin(results: Results, option: str) -> None:
    """Raise UsageError where samples that are taken now would be of another commit, torch or
    machine than those that are there: an interval over both would be of neither."""
    then, here = results.about, about()
    if then is None:
        return
    pairs = {
        "commit": (_clean(then.commit), _clean(here.commit)),
        "machine": (then.machine, here.machine),
        "torch": (then.versions.get("torch"), here.versions.get("torch")),
        "torchao": (then.versions.get("torchao"), here.versions.get("torchao")),
    }
    for what, (old, new) in pairs.items():
        if old != new:
            raise UsageError(
                f"{option}: it was measured with {what} {old}, and this is {new}; "
                "samples of both would be mixed: begin anew with --output"
            )


def _clean(commit: str | None) -> str | None:
    """A commit without "-dirty": a log that grows in the checkout makes it so, too."""
    return commit and commit.removesuffix("-dirty")
