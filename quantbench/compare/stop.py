"""When there is enough: the rule by which ab and recommend measure
(bench/session.py), and which tests/trust simulates.

An arm needs more turns while its interval is wide because of the turns' noise, and another process
while it is wide because processes differ. Wide is more than `half_width`, or than a tenth of the
effect; for arms that may be the fastest and are not alike, more than `half_width`. With
`answer_only`, as for a recommendation, an arm also has enough once the answer cannot name it:
another one, which is shown to satisfy every limit, is shown to be faster, takes no more memory,
and is the better compromise.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from quantbench.bench.session import Rule
from quantbench.bench.store import ArmResult, Results
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits, exceeded, memory_bytes, ruled_out
from quantbench.compare.recommend import KL_WEIGHT
from quantbench.compare.rows import limited
from quantbench.log.options import parse
from quantbench.quality.types import Quality
from quantbench.quantize.spec import RECIPE, parse_scheme

LEAST_PROCESSES = 2  # of each arm whose speed counts: the second is the check of the first
OF_THE_EFFECT = 0.1
FAR = 2.0  # times the limit of the KL: there a coarser variant of the scheme is not tried
TOO_COARSE = "not tried, as a finer variant's KL is far above {:g}"
ALIKE = 0.05  # arms that differ by less are one answer


@dataclass(frozen=True)
class Enough(Rule):
    """See bench.session.Rule."""

    limits: Limits
    answer_only: bool = False

    def out(self, results: Results, arm: int) -> str | None:
        """If only the answer counts, an arm that a limit excludes whatever its speed is not
        measured any further, and one that is coarser than an arm far beyond the limit not at
        all."""
        own = results.arms[arm]
        if not self.answer_only or own.quality is not None:
            return ruled_out(own.quality, self.limits) if self.answer_only else None
        hopeless = any(self._far(other) and _coarser(own, other) for other in results.arms)
        return TOO_COARSE.format(self.limits.max_kl) if hopeless else None

    def _far(self, arm: ArmResult) -> bool:
        quality, most = arm.quality, self.limits.max_kl
        if most is None or not isinstance(quality, Quality) or quality.kl is None:
            return False
        low = (quality.kl_interval or [0.0])[0]
        return low - (quality.noise or 0.0) > FAR * most

    def wanting(self, results: Results, group: Collection[int], taken: int) -> Collection[int]:
        found = Compared(results)
        return [
            n
            for n in group
            if not self._beaten(found, n)
            and (n not in found.whole or not self._settled(found, n, turns=True))
        ]

    def open(self, results: Results) -> Collection[int]:
        found = Compared(results)
        return [
            n
            for n, arm in enumerate(results.arms)
            if n and arm.failed is None and arm.dropped is None
            and not self._beaten(found, n)
            and (
                arm.processes < LEAST_PROCESSES
                or n not in found.whole
                or not self._settled(found, n, turns=False)
            )
        ]  # fmt: skip

    def _settled(self, found: Compared, number: int, turns: bool) -> bool:
        """Whether the interval is narrow enough; turns: or as narrow as more turns of this process
        make it."""
        one, narrow = found.whole[number], math.log1p(found.results.settings.half_width)
        by_effect = OF_THE_EFFECT * abs(math.log(one.nearer))
        if by_effect > narrow and not self._has_rival(found, number):
            narrow = by_effect
        width = math.log1p(one.half_width)
        noise = math.sqrt(max(0.0, width**2 - one.floor**2)) if math.isfinite(width) else width
        return width <= narrow or (turns and noise <= max(narrow, one.floor) / 2)

    def _has_rival(self, found: Compared, number: int) -> bool:
        """Whether the arm is among those that may be the fastest, and is not like the first."""
        arms = enumerate(found.results.arms)
        able = [n for n, arm in arms if not (arm.failed or ruled_out(arm.quality, self.limits))]
        ratios = {n: found.whole[n].ratio if n else 1.0 for n in found.best(able)}
        return ratios.get(number, 0.0) > (1 + ALIKE) * min(ratios.values(), default=1.0)

    def _beaten(self, found: Compared, number: int) -> bool:
        """Whether the answer cannot name the arm."""
        if not self.answer_only or number not in found.whole:
            return False
        low = found.whole[number].low
        return any(
            found.whole[other].high < low and self._outdoes(found, other, number)
            for other in found.whole
        )

    def _outdoes(self, found: Compared, other: int, number: int) -> bool:
        """Whether the answer takes `other`, which is faster, in the place of `number`."""
        results = found.results
        better, row = (limited(results, n, found) for n in (other, number))
        is_unknown = bool(results.settings.tokens) and better.kl is None
        if better.failed or better.dropped or is_unknown or exceeded(better, self.limits)[0]:
            return False
        less, more = memory_bytes(better) or math.inf, memory_bytes(row) or math.inf
        gain = math.log(found.whole[number].low / found.whole[other].high)
        gain += math.log(more / less) if math.isfinite(more) else 0.0
        return less <= more and gain >= KL_WEIGHT * ((better.kl or 0.0) - (row.kl or 0.0))


def _coarser(arm: ArmResult, than: ArmResult) -> bool:
    """Whether it is the same scheme with no more bits and no smaller groups, and else alike."""
    names = [parse(each.argv).quantization for each in (arm, than)]
    if any(map(RECIPE.fullmatch, names)):
        return False
    one, other = map(parse_scheme, names)
    if type(one) is not type(other) or one == other:
        return False
    rising = {"bits": -1, "group_size": 1}  # the sign by which a field makes a scheme coarser
    return all(
        (value - getattr(other, name)) * rising[name] >= 0
        if name in rising
        else value == getattr(other, name)
        for name, value in vars(one).items()
    )
