"""What the two tiers did: a few counters, and sentences about them."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from quantbench.text import counted, size


@dataclass
class Traffic:
    """Counters. An assignment is a token and one of its experts in a layer."""

    assignments: int = 0
    hits: int = 0  # assignments whose expert was in fast memory when its layer was computed
    fetched: int = 0  # assignments whose expert was fetched
    there: int = 0  # assignments whose expert was computed in the slow tier
    fetches: int = 0  # experts copied into fast memory
    bytes_moved: int = 0
    waiting_seconds: float = 0.0  # in which nothing was computed because a copy was under way
    expert_seconds: float = 0.0  # for the experts of all layers, waiting included

    def since(self, before: "Traffic") -> "Traffic":
        """What was counted after `before`."""
        return Traffic(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))

    @property
    def hit_rate(self) -> float:
        """Hits ÷ assignments; 0 without assignments."""
        return self.hits / max(1, self.assignments)

    def sentence(self) -> str:
        """Without a full stop: "hits 812 of 1000 assignments (81.2 %), …"."""
        parts = [f"hits {self.hits} of {self.assignments} assignments ({self.hit_rate:.1%})"]
        if self.fetched:
            parts.append(f"{self.fetched} fetched when needed")
        if self.there:
            parts.append(f"{self.there} computed where they lie")
        parts.append(f"{counted(self.fetches, 'expert')} moved, {size(self.bytes_moved)}")
        return ", ".join(parts)


def total(parts: Sequence[Traffic]) -> Traffic:
    """The sum of all counters."""
    return Traffic(*map(sum, zip(*map(astuple, parts), strict=True)))


@dataclass(frozen=True)
class Phases:
    """What the tiers did for one sample."""

    prompt: Traffic  # and the first new token
    decode: Traffic  # of the other new tokens


@dataclass(frozen=True)
class PhaseFigures:
    """What the tiers did for all prompts of a run, or for all of its decoding steps."""

    passes: int  # prompts or steps
    ms: float  # of a pass
    expert_ms: float  # of these, for the experts of all layers
    layer_ms: float  # for the experts of one layer
    waiting_ms: float  # of expert_ms, with nothing to compute
    hit_rate: float  # hits ÷ assignments
    traffic: Traffic

    @staticmethod
    def of(traffic: Traffic, seconds: float, passes: int, layers: int) -> "PhaseFigures":
        """seconds: of all passes. layers: number of layers with experts."""
        each = 1e3 / max(1, passes)
        expert_ms, waiting_ms = traffic.expert_seconds * each, traffic.waiting_seconds * each
        times = seconds * each, expert_ms, expert_ms / max(1, layers), waiting_ms
        return PhaseFigures(passes, *times, traffic.hit_rate, traffic)

    def sentence(self) -> str:
        """Without a full stop: what was moved, and the milliseconds of a pass."""
        return (
            f"{self.traffic.sentence()}; each takes {self.ms:.2f} ms, its experts "
            f"{self.expert_ms:.2f} ms: {self.layer_ms:.3f} ms a layer, {self.waiting_ms:.2f} ms of "
            "it waiting"
        )


@dataclass(frozen=True)
class TwoTiers:
    """Where a run's experts are."""

    fast: int  # experts in fast memory, of all layers, without those being fetched
    landing: int  # experts that can be fetched at a time
    every: int  # experts in slow memory: all of them
    by_layer: list[int]  # `fast` by layer, of layers that have experts
    expert_bytes: int  # of each, as it is moved
    slow: str  # disk or RAM
    slow_place: str  # the folder, and how it is read
    policy: str  # as the option names it
    followed: str  # the policy that `policy` auto has chosen, or `policy`
    placement: str
