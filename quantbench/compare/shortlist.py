"""Which arms `recommend` times: once all are judged, at most six that the answer may name.

An arm is not timed where another one has the same kernels, no more bytes and no more KL: it is
hardly faster, and neither smaller nor better. From the others those are taken that are predicted to
be the fastest, with the smallest and the best compromise among them. A step reads every weight
once, so its predicted seconds are bytes ÷ the share of the memory's speed that its kernels reach.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quantbench.bench.store import ArmResult, Results
from quantbench.compare.recommend import BEATEN, KL_WEIGHT, SLOWER, UNJUDGED
from quantbench.compare.stop import Enough
from quantbench.quality.types import Quality
from quantbench.quantize.spec import RECIPE, parse_scheme

MOST = 6
SHARES = {"reference": 0.1, "torch": 1.0}  # of the memory's speed, by the kernel's name
SHARE = 0.8  # of all other kernels


@dataclass(frozen=True)
class _Candidate:
    number: int
    bytes: int
    kl: float
    kernels: tuple[str, ...]
    rounds_activations: bool

    @property
    def seconds(self) -> float:
        """A decoding step, in arbitrary units."""
        return self.bytes / min(SHARES.get(name, SHARE) for name in self.kernels)

    @property
    def merit(self) -> float:
        """As of a compromise (compare/recommend.py)."""
        return -math.log(self.seconds) - math.log(self.bytes) - KL_WEIGHT * self.kl

    def beats(self, other: "_Candidate") -> bool:
        same = (self.kernels, self.rounds_activations) == (other.kernels, other.rounds_activations)
        mine, theirs = (self.bytes, self.kl), (other.bytes, other.kl)
        no_more = self.bytes <= other.bytes and self.kl <= other.kl
        return same and no_more and (mine != theirs or self.number < other.number)


@dataclass(frozen=True)
class Shortlist(Enough):
    """The rule of a recommendation that chooses what it times."""

    details = False

    def untimed(self, results: Results) -> Mapping[int, str]:
        waiting, why = [], {}
        for number, arm in enumerate(results.arms):
            if number == 0 or arm.failed is not None or arm.dropped is not None:
                continue
            if candidate := _candidate(number, arm):
                waiting.append(candidate)
            elif not arm.turns:
                why[number] = UNJUDGED
        able = [one for one in waiting if not any(other.beats(one) for other in waiting)]
        chosen = able
        if len(able) > MOST:
            first = [min(able, key=lambda one: one.bytes), max(able, key=lambda one: one.merit)]
            by_speed = sorted(able, key=lambda one: one.seconds)
            chosen = list(dict.fromkeys([*first, *by_speed]))[:MOST]
        left = [one for one in waiting if one not in chosen]
        return why | {one.number: SLOWER if one in able else BEATEN for one in left}


def _candidate(number: int, arm: ArmResult) -> _Candidate | None:
    """None of an arm whose quality is not known."""
    quality, judged = arm.quality, arm.judged
    if not isinstance(quality, Quality) or quality.kl is None:
        return None
    if judged is None or judged.weight_bytes is None or judged.kernel is None:
        return None
    name = str(arm.config.quantization)
    is_known = not RECIPE.fullmatch(name) and name != "as-is"
    kernels = tuple(sorted({*re.sub(r" \(.*?\)", "", judged.kernel).split(", ")}))
    rounds = is_known and parse_scheme(name).rounds_activations
    return _Candidate(number, judged.weight_bytes, quality.kl, kernels, rounds)
