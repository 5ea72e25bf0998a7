"""What `quantbench calibrate` measured on one machine, and its JSON file.

    machine = calibration_file.load(path)       # Calibration
    machine.products[0].seconds
    machine.warnings(device, versions)          # where it is of another machine, or of old software

Every time is the median of several, in seconds. Next to each stands the speed of memory and of
arithmetic read just before it, because machines drift: `Speed`. The file keeps what was measured;
estimate/curves.py fits it anew whenever it is read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from quantbench import files
from quantbench.typed_json import omitted, to_json

FORMAT = 3  # of the file
DISTURBED = 0.65  # share of the median of arithmetic; in each of a machine's states it is above
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


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
