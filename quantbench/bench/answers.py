"""What workers answer, typed: bench/worker.py and peers/worker.py give these.

    worker.answer(TimedSample, "sample", index=3).token_seconds

Nothing here needs torch, so that commands which only ask workers start at once.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantbench.run.energy import Energy, NotCounted
from quantbench.run.facts import Facts, Peak, Peaks, Sample, WarmUp
from quantbench.typed_json import from_json, omitted, to_json


@dataclass(frozen=True, kw_only=True)
class _Keys:
    """The keys of an ArmFacts' JSON that are not those of its `run` and `ready`."""

    weight_bytes: int  # bytes of weights that a decoding step reads
    peak_memory_bytes: Peaks
    kernels: dict[str, str | None] | None = None  # why each of the scheme's cannot run, if so
    about: str | None = None  # version and settings of another runtime
    notes: list[str] = dataclasses.field(default_factory=list)  # how its texts are read
    # For each of the arm's processes the seconds from its start to its first sample, by phase:
    # import, load (reading weights), quantize (and pack), compile, warm_up, energy.
    start_seconds: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # A sample's energy, counted in each of the arm's processes before its first sample; or why not.
    energy: list[Energy | NotCounted] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ArmFacts(_Keys):
    """What is known of an arm before its first sample."""

    device: str
    ready: WarmUp
    run: Facts | None = None  # of a model of ours, whose `kernels` are known; None: another runtime

    def to_json(self) -> dict[str, object]:
        """A flat JSON object: the keys of `run` and of `ready` are side by side with our own."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Keys)}
        run = to_json(self.run) if self.run else {"config": {"device": self.device}}
        known = {name: to_json(value) for name, value in own.items() if value not in (None, [])}
        return {**run, **to_json(self.ready), **known}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "ArmFacts":
        """What `to_json` gave. Raises ValueError or KeyError where it is something else."""
        own = from_json(_Keys, value)
        return ArmFacts(
            **vars(own),
            device=from_json(str, value["config"]["device"]),
            ready=from_json(WarmUp, value),
            run=None if own.kernels is None else from_json(Facts, value),
        )


@dataclass(frozen=True)
class TimedSample(Sample):
    """A sample, and of each decoding step but the first its seconds."""

    token_seconds: list[float]
    peak_memory_bytes: Peak = dataclasses.field(default_factory=dict)  # so far; by kind


@dataclass(frozen=True)
class TurnTime:
    """A turn: the tokens of each row, and their seconds."""

    tokens: int
    seconds: float
    steps: list[float] | None = omitted()  # seconds of each decoding step; None: not asked for


@dataclass(frozen=True)
class Reading:
    """One reading of a device's memory bandwidth."""

    bytes_per_s: float
    cycle: int | None  # the reading was taken just before this cycle; None: after the last one
    probe: str  # the op that read
    caveat: str | None = None  # why this is not the memory's speed; None where it is


@dataclass(frozen=True)
class Runnable:
    """Whether a run can be carried out, known before its weights are read."""

    problem: str | None = None  # why it cannot
    kind: str | None = None  # usage, where the options are wrong; refused


# ----------------------------------------------------------------------------------------- layers


@dataclass(frozen=True, kw_only=True)
class Product:
    """One layer's product by one kernel: median seconds and quartiles, or why there are none."""

    scheme: str
    kernel: str
    seconds: float | None = omitted()
    seconds_low: float | None = omitted()
    seconds_high: float | None = omitted()
    rounds: int | None = omitted()
    bytes: int | None = omitted()  # of the weight
    why_not: str | None = omitted()


@dataclass(frozen=True)
class ShapeTimings:
    """Every scheme's product with a weight of one shape."""

    products: list[Product]
    bandwidth: float  # bytes per second, read in the same rounds
    bandwidth_probe: str
    bandwidth_caveat: str | None
    rotated: int  # bytes that are read before any weight is read again
    cache: int  # bytes of the last-level cache
