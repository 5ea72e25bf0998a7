"""What workers answer, typed: bench/worker.py and compare/peers/worker.py give these.

    worker.answer(TimedSample, "sample", index=3).token_seconds

Nothing here needs torch, so that commands which only ask workers start at once.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from quantbench.compare.figures import block_errors
from quantbench.compare.figures.block_errors import Estimate
from quantbench.run.energy import Energy, NotCounted
from quantbench.run.facts import Facts, Peak, Ready, Sample
from quantbench.run.why import Limit
from quantbench.typed_json import from_json, omitted, to_json

Peaks = dict[str, Peak]  # by phase: load, warm_up, generate


@dataclass(frozen=True)
class ArmFacts:
    """What is known of an arm before its first sample."""

    device: str
    weight_bytes: int  # bytes of weights that a decoding step reads
    ready: Ready
    peak_memory_bytes: Peaks
    run: Facts | None = None  # of a model of ours; None for another runtime
    kernels: dict[str, str | None] | None = None  # why each of the scheme's cannot run, if so
    about: str | None = None  # version and settings of another runtime
    # For each of the arm's processes the seconds from its start to its first sample, by phase:
    # import, load (reading weights), quantize (and pack), quality, compile, warm_up, energy.
    start_seconds: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # A sample's energy, counted in each of the arm's processes before its first sample; or why not.
    energy: list[Energy | NotCounted] = dataclasses.field(default_factory=list)
    # What was estimated, by the keys of `estimate`; None: nothing was.
    estimate: dict[str, float] | None = None
    limit: Limit | None = None  # of a step, where there is an estimate
    no_estimate: str | None = None  # why there is none

    @staticmethod
    def of_run(
        run: Facts,
        ready: Ready,
        kernels: dict[str, str | None],
        peaks: Peaks,
        seconds: dict[str, float] | None = None,
    ) -> "ArmFacts":
        return ArmFacts(
            run.config.device,
            run.weight_bytes,
            ready,
            peaks,
            run,
            kernels,
            None,
            [seconds] if seconds else [],
        )

    def to_json(self) -> dict[str, object]:
        """A flat JSON object: the keys of `run` and of `ready` are side by side with our own."""
        value: dict[str, object] = {
            "config": {"device": self.device},
            "weight_bytes": self.weight_bytes,
        }
        value |= to_json(self.run) if self.run else {}
        value |= to_json(self.ready)
        value |= {} if self.kernels is None else {"kernels": self.kernels}
        value |= {} if self.about is None else {"about": self.about}
        if self.start_seconds:
            value["start_seconds"] = self.start_seconds
        value |= {"energy": to_json(self.energy)} if self.energy else {}
        for name in ("estimate", "limit", "no_estimate"):
            own = getattr(self, name)
            value |= {} if own is None else {name: to_json(own)}
        return value | {"peak_memory_bytes": self.peak_memory_bytes}

    @staticmethod
    def from_json(value: Mapping[str, object]) -> "ArmFacts":
        """What `to_json` gave. Raises ValueError or KeyError where it is something else."""
        arm = from_json(_ArmKeys, value)
        return ArmFacts(
            arm.config.device,
            arm.weight_bytes,
            from_json(Ready, value),
            arm.peak_memory_bytes,
            None if arm.kernels is None else from_json(Facts, value),
            arm.kernels,
            arm.about,
            arm.start_seconds or [],
            arm.energy or [],
            arm.estimate,
            arm.limit,
            arm.no_estimate,
        )


@dataclass(frozen=True)
class _Device:
    device: str


@dataclass(frozen=True)
class _ArmKeys:
    """The keys of an ArmFacts' JSON that are neither a Facts' nor a Ready's alone."""

    config: _Device
    weight_bytes: int
    peak_memory_bytes: Peaks
    kernels: dict[str, str | None] | None
    about: str | None
    start_seconds: list[dict[str, float]] | None
    energy: list[Energy | NotCounted] | None
    estimate: dict[str, float] | None = None
    limit: Limit | None = None
    no_estimate: str | None = None


@dataclass(frozen=True)
class TimedSample(Sample):
    """A sample, and of each decoding step but the first its seconds."""

    token_seconds: list[float]
    peak_memory_bytes: Peak = dataclasses.field(default_factory=dict)  # so far; by kind


@dataclass(frozen=True)
class TurnTime:
    """A turn: so many tokens of each row, and their seconds."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Reading:
    """One reading of a device's memory bandwidth."""

    bytes_per_s: float
    cycle: int | None  # the reading was taken just before this cycle; None: after the last one
    probe: str  # the op that read
    caveat: str | None = None  # why this is not the memory's speed; None where it is


@dataclass(frozen=True)
class SchemeNames:
    """Every scheme that has a kernel on the worker's device."""

    schemes: list[str]


@dataclass(frozen=True)
class Planned:
    """What a run's options come to before its weights are read (run/identity.py)."""

    identity: dict[str, str] | None  # equal ones do the same work; None where it cannot run
    problem: str | None = None  # why it cannot
    kind: str | None = None  # usage, where the options are wrong; refused


@dataclass(frozen=True)
class PlannedRuns:
    """One for each run in the request."""

    runs: list[Planned]


# ---------------------------------------------------------------------------------------- quality


@dataclass(frozen=True)
class DecodeCheck:
    """How far predictions by decoding steps are from those of reading the same text as a prompt."""

    decoder: str  # that carried out the steps
    tokens: int  # that were predicted both ways
    kl: float | None  # nats, KL(prompt ‖ decoding), mean; None where logits are no numbers
    kl_max: float | None
    perplexity_ratio: float | None  # decoding ÷ prompt
    kl_of_rounding: float  # the largest mean that rounding explains
    differs: bool  # by more than that

    def sentence(self) -> str:
        """What the check found, as a sentence for people without its full stop."""
        kl = "not a number of" if self.kl is None else f"{self.kl:.2g}"
        figures = f"KL {kl} nats on {self.tokens} tokens"
        if self.differs:
            return (
                f"decoding by {self.decoder} differs from reading the text as a prompt by more "
                f"than rounding ({figures}, at most {self.kl_of_rounding:.2g} expected): the "
                "quality shown is not that of generated text; please report it"
            )
        return (
            f"decoding by {self.decoder}, token by token, predicts the same but for rounding "
            f"({figures})"
        )


@dataclass(frozen=True)
class LayerSqnr:
    """SQNR in dB, 10 log10 of the signal's energy ÷ the error's; None where nothing changed."""

    name: str
    weights: float | None
    outputs: float | None


@dataclass(frozen=True)
class Quality:
    """How well an arm predicts a text, and how far its predictions are from a reference's.

    KL is KL(reference ‖ arm) in nats per token; top1 is the share of tokens whose likeliest token
    is the reference's; top5 the share of the reference's five likeliest among the arm's. Standard
    errors and intervals are from windows of the text: None where there are too few.
    """

    tokens: int
    perplexity: float
    perplexity_standard_error: float | None
    perplexity_ratio: float | None = omitted()  # arm ÷ reference, from paired tokens
    perplexity_ratio_standard_error: float | None = omitted()
    perplexity_ratio_freedom: int | None = omitted()  # degrees of freedom of that error
    perplexity_ratio_interval: list[float] | None = omitted()  # the two ends of 95 %
    kl: float | None = omitted()
    kl_standard_error: float | None = omitted()
    kl_median: float | None = omitted()
    kl_p99: float | None = omitted()
    kl_max: float | None = omitted()
    top1: float | None = omitted()
    top5: float | None = omitted()
    bits_per_byte: float | None = omitted()  # of the text in UTF-8
    window: int | None = omitted()  # positions; windows advance by half of them
    # The model that was measured, where it is not the arm's: a scheme's quality is taken on the
    # embedded model where the arm's weights are random.
    model: str | None = omitted()
    decoding: DecodeCheck | None = omitted()
    layers: list[LayerSqnr] | None = omitted()  # each against full precision, in the model's order

    def with_interval(self) -> "Quality":
        """The same with the interval of its ratio of perplexities, where there is one."""
        value, error = self.perplexity_ratio, self.perplexity_ratio_standard_error
        if not value or error is None or self.perplexity_ratio_freedom is None:
            return self
        estimate = Estimate(math.log(value), error / value, self.perplexity_ratio_freedom)
        ends = [block_errors.ratio(end) for end in estimate.ends()]
        return dataclasses.replace(self, perplexity_ratio_interval=ends)


@dataclass(frozen=True)
class NoQuality:
    """Quality that cannot be measured."""

    why_not: str


@dataclass(frozen=True)
class LogitsFile:
    """A file of logits (rows, vocab_size) of a torch dtype, without a header."""

    path: str
    rows: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True)
class QualityAnswer:
    """An arm's quality, and the file of its logits if the request named one."""

    quality: Quality | NoQuality
    logits: LogitsFile | None = None


# ----------------------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class Shape:
    """A shape that several of a model's linear layers have: `rows` outputs, `columns` inputs."""

    names: list[str]
    rows: int
    columns: int
    count: int  # layers of this shape


@dataclass(frozen=True)
class Layers:
    """A model's shapes of linear layers, and the kernels to time for each scheme."""

    kernels: dict[str, list[str]]
    shapes: list[Shape]


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
