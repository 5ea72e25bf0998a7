"""What `quantbench calibrate` measured on one machine, and its JSON file.

    machine = Calibration.load(path)
    machine.products[0].seconds
    machine.warnings(device, versions)          # where it is of another machine, or of old software

Every time is the median of several, in seconds. Next to each stands the speed of memory and of
arithmetic read just before it, because machines drift: `Speed`. The file keeps what was measured;
estimate/curves.py fits it anew whenever it is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import files
from benchlog.config import PRECISIONS
from errors import QuantbenchError, UsageError
from estimate.datasheets import Datasheet
from quantize.autoquant.cache import default_cache
from text import shown
from typed_json import from_json, omitted, require, to_json

FORMAT = 3  # of the file
DISTURBED = 0.65  # share of the median of arithmetic; in each of a machine's states it is above
ABOVE_DATASHEET = 1.02  # a reading above this multiple of the datasheet's figure is an error
# Bytes of copies of a weight, or of a cache, that are read in turn where one is measured alone.
STREAMED = 128 << 20
MOST_COPIES = 32  # of a cache
WATCHED = ("torch", "torchao")  # packages whose version changes the speed of what was measured


@dataclass(frozen=True)
class Speed:
    """What the machine gave at one moment, read by a fixed piece of work."""

    read: float  # bytes per second from memory, a block larger than any cache
    multiply: float  # operations per second of one fixed product, in the calibration's precision


@dataclass(frozen=True)
class BandwidthPoint:
    """Reading and copying a block of some size again and again."""

    bytes: int  # of the block; copying reads as many and writes as many
    read: float  # bytes per second
    copy: float  # bytes per second, read and written together, each counted once
    speed: Speed | None = omitted()  # beside reading


@dataclass(frozen=True)
class ProductPoint:
    """x (rows, inner) times a weight (outer, inner), by the kernel that a run would take."""

    scheme: str
    kernel: str
    rows: int
    inner: int
    outer: int
    bytes: int  # of the weight as the kernel holds it
    seconds: float
    speed: Speed


@dataclass(frozen=True)
class StackPoint:
    """Equal weights, or caches, that are read one after another, again and again."""

    name: str  # of the weights' scheme, or the kind of cache: none, int8wo, …; dense, int8, int4
    rows: int
    bytes: int  # of all of them: what caches of the processor hold a part of
    seconds: float  # of reading all of them once
    speed: Speed


@dataclass(frozen=True)
class AttentionPoint:
    """Attention of `queries` positions per row to themselves and to `depth` earlier ones."""

    cache: str  # dense, int8, int4
    rows: int
    queries: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes: int  # of the earlier keys and values
    seconds: float
    speed: Speed


@dataclass(frozen=True)
class RestPoint:
    """A layer of a prompt without its products and without attention: norms, rotation, gates."""

    rows: int  # batch · positions
    dim: int
    heads: int  # all: queries, keys and values, times head_dim
    ffn_dim: int
    normed: int  # query and key heads that are normed, times head_dim; 0 in most models
    seconds: float
    speed: Speed


@dataclass(frozen=True)
class DrawPoint:
    """Choosing the next token of every row from logits (rows, vocabulary)."""

    greedy: bool
    rows: int
    vocabulary: int
    seconds: float


@dataclass(frozen=True)
class WholePoint:
    """A decoding step, or a prompt, of a whole calibration model."""

    scheme: str
    model: str  # a key of machine.MODELS
    kv_cache: str
    decoder: str
    rows: int  # batch
    tokens: int  # of the prompt; 1 for a decoding step
    depth: int  # positions before it
    seconds: float
    speed: Speed


@dataclass(frozen=True)
class ExchangePoint:
    """What the ranks of one model exchange, between ranks on this machine."""

    kind: str  # all_reduce, all_gather
    through: str  # shared memory, gloo, nccl
    ranks: int
    bytes: int  # of one rank's tensor
    seconds: float


@dataclass(frozen=True)
class Power:
    """What the device draws, in watts. None: nothing here says it."""

    limit: float | None  # that its firmware or driver holds it to
    counter: str | None  # what counted the next two: RAPL (package-0), NVML (1 GPU)
    prompt: float | None  # while it reads prompts, more than the idle machine
    step: float | None  # while it decodes, more than the idle machine


@dataclass(frozen=True)
class LeftBehind:
    """What a process on the CPU keeps of a prompt, in bytes for each byte of the activations that
    are alive at its peak: room that kernels work in, and freed blocks of the heap. The defaults are
    those of a machine with AVX-512 (docs/LOG.md), for files that do not say it."""

    one_pass: float = 1.0  # of a prompt of one pass
    several: float = 2.0  # of more: attention to earlier passes works in more

    def bytes(self, activations: int, passes: int) -> int:
        return round(activations * (self.one_pass if passes == 1 else self.several))


@dataclass(frozen=True)
class Calibration:
    """One machine, as measured on one day."""

    date: str  # UTC, ISO 8601
    device: dict[str, str | int]  # type, name, threads or driver
    precision: str
    versions: dict[str, str | None]
    bandwidth: list[BandwidthPoint]
    products: list[ProductPoint]
    attention: list[AttentionPoint]
    rest: list[RestPoint]
    draws: list[DrawPoint]
    wholes: list[WholePoint]
    weight_stacks: list[StackPoint] = field(default_factory=list)
    cache_stacks: list[StackPoint] = field(default_factory=list)
    call_seconds: float = 0.0  # of the cheapest call of an op from Python
    base_bytes: int = 0  # peak memory of a run whose model has next to no bytes
    left_behind: LeftBehind = LeftBehind()  # by prompts, beyond that
    memory_bytes: int | None = omitted()  # of the device
    exchanges: list[ExchangePoint] = field(default_factory=list)
    power: Power | None = omitted()
    seconds: float = 0.0  # that calibrating took
    format: int = FORMAT

    @property
    def name(self) -> str:
        return str(self.device["name"])

    @property
    def speed(self) -> Speed:
        """The median of all readings."""
        speeds = [p.speed for p in self.products] + [w.speed for w in self.wholes]
        return Speed(_median([s.read for s in speeds]), _median([s.multiply for s in speeds]))

    def undisturbed(self, speed: Speed) -> bool:
        """Whether both cores were free at a reading: where another process has one of them,
        arithmetic is half as fast, and what is measured there says nothing of the machine."""
        return speed.multiply >= DISTURBED * self.speed.multiply

    def save(self, option: str, path: str) -> None:
        files.write_text(option, path, json.dumps(to_json(self), indent=1) + "\n")

    @staticmethod
    def load(path: str, what: str = "--calibration") -> "Calibration":
        """Raises UsageError, one line, for a file that `calibrate` did not write. what: names the
        file in it."""
        value = files.read_json(what, path, UsageError, "`calibrate` writes one")
        if not isinstance(value, Mapping) or "products" not in value or "wholes" not in value:
            raise UsageError(
                f"{what} {path}: no calibration; `quantbench calibrate --json PATH` writes one"
            )
        if value.get("format") != FORMAT:
            raise UsageError(
                f"{what} {path}: format {shown(value.get('format'))}, and this version "
                f"reads {FORMAT}; calibrate again"
            )
        try:
            calibration = from_json(Calibration, value)
            calibration.check()
        except ValueError as error:
            raise UsageError(f"{what} {path}: damaged: {error}; calibrate again") from None
        return calibration

    def check(self) -> None:
        """Raise ValueError, with the value, for what no machine is measured to be."""
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision takes {', '.join(PRECISIONS)}; given: {self.precision!r}")
        timed: list[ProductPoint | StackPoint | AttentionPoint | RestPoint | WholePoint]
        timed = [*self.products, *self.weight_stacks, *self.cache_stacks, *self.attention]
        timed += [*self.rest, *self.wholes]
        for point in timed:
            require(f"seconds of a {type(point).__name__}", point.seconds)
            require("a speed of memory", point.speed.read)
            require("a speed of arithmetic", point.speed.multiply)
        for stack in (*self.weight_stacks, *self.cache_stacks):
            require("bytes of a stack", stack.bytes)
        for point in self.attention:
            if point.queries == 1:
                require("bytes that a step's attention reads", point.bytes)
        for draw in self.draws:
            require("seconds of a draw", draw.seconds)
        for exchange in self.exchanges:
            require("seconds of an exchange", exchange.seconds)
        for block in self.bandwidth:
            require("a speed of memory", block.read, block.copy)
        for each in (self.left_behind.one_pass, self.left_behind.several):
            if not each >= 0 or math.isinf(each):
                raise ValueError(f"what prompts leave behind takes 0 or more; given: {each}")
        if not 0 <= self.call_seconds < math.inf:
            raise ValueError(f"the seconds of a call take 0 or more; given: {self.call_seconds}")
        if "name" not in self.device:
            raise ValueError("its device has no name")

    def warnings(
        self, device: Mapping[str, object], versions: Mapping[str, str | None]
    ) -> list[str]:
        """Why its figures may not hold here; each a few words, for every line of the output."""
        said = []
        for key in ("name", "threads"):
            if key in self.device and key in device and self.device[key] != device[key]:
                said.append(f"calibrated with {key} {self.device[key]}, here {device[key]}")
        for package in WATCHED:
            if self.versions.get(package) != versions.get(package):
                said.append(
                    f"calibrated with {package} {self.versions.get(package)}, "
                    f"here {versions.get(package)}"
                )
        return said


def copies_of(size: int) -> int:
    """How many caches of `size` bytes are read in turn where attention is measured alone."""
    return max(1, min(MOST_COPIES, STREAMED // size))


def contradictions(calibration: Calibration, sheet: Datasheet | None) -> list[str]:
    """What cannot be: faster than the card's datasheet, or slower than zero."""
    wrong = [
        f"a product of {p.scheme} took {p.seconds} s"
        for p in calibration.products
        if p.seconds <= 0
    ]
    if sheet is None or not calibration.bandwidth:
        return wrong
    largest = calibration.bandwidth[-2:]  # blocks that no cache holds
    rates = {"read": max(p.read for p in largest), "copied": max(p.copy for p in largest)}
    wrong += [
        f"memory was {done} at {rate / 1e9:.0f} GB/s, above the datasheet's "
        f"{sheet.bandwidth / 1e9:.0f} GB/s"
        for done, rate in rates.items()
        if rate > ABOVE_DATASHEET * sheet.bandwidth
    ]
    peak = sheet.peaks.get(calibration.precision)
    fastest = max((s.speed.multiply for s in calibration.products), default=0.0)
    if peak and fastest > ABOVE_DATASHEET * peak:
        wrong.append(
            f"{calibration.precision} was multiplied at {fastest / 1e12:.0f} Tflop/s, above the "
            f"datasheet's {peak / 1e12:.0f}"
        )
    return wrong


def refuse(calibration: Calibration, sheet: Datasheet | None) -> None:
    """Raise QuantbenchError where a calibration contradicts the device's datasheet."""
    if wrong := contradictions(calibration, sheet):
        raise QuantbenchError(
            f"calibrate: {wrong[0]}; nothing is written: measure again with nothing else running"
        )


def default_path() -> Path:
    """Where `calibrate` writes, and where commands look for this machine's calibration."""
    return default_cache().with_name("calibration.json")


def of_this_machine(device_type: str) -> Calibration | None:
    """The calibration in the default place; None where there is none, or one of another kind of
    device. Raises UsageError, one line that names the file, where it cannot be read."""
    path = default_path()
    if not path.exists():
        return None
    found = Calibration.load(str(path), "this machine's calibration,")
    return found if found.device.get("type") == device_type else None


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
