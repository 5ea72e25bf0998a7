"""When there is enough: the rule by which ab, recommend and tune measure (bench/session.py).

An arm needs more turns while its interval is wide because of the turns' noise, and another process
while it is wide because processes differ. Wide is more than `half_width`, or than a tenth of the
effect. With `answer_only`, as for a recommendation, an arm also has enough once the nearer end of
its interval shows that it is slower than the fastest, and not smaller than all that are faster: the
answer cannot name it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from quantbench.answer.compared import Compared, compare
from quantbench.answer.limits import Limits, ruled_out
from quantbench.bench.store import Results
from quantbench.stats import Interval

LEAST_PROCESSES = 2  # of each arm whose speed counts: the second is the check of the first
OF_THE_EFFECT = 0.1


@dataclass(frozen=True)
class Enough:
    """See bench.session.Rule."""

    limits: Limits
    answer_only: bool = False

    def out(self, results: Results, arm: int) -> str | None:
        """An arm that a limit excludes whatever its speed is not measured any further, if only the
        answer counts."""
        return ruled_out(results.arms[arm].quality, self.limits) if self.answer_only else None

    def wanting(self, results: Results, group: Collection[int], taken: int) -> Collection[int]:
        found = compare(results)
        return [
            n
            for n in group
            if not self._beaten(results, found, n)
            and (n not in found.whole or not self._settled(results, found.whole[n], turns=True))
        ]

    def open(self, results: Results) -> Collection[int]:
        found = compare(results)
        arms = enumerate(results.arms)
        return [
            n
            for n, arm in arms
            if n and arm.failed is None and arm.dropped is None
            and not self._beaten(results, found, n)
            and (
                arm.processes < LEAST_PROCESSES
                or n not in found.whole
                or not self._settled(results, found.whole[n], turns=False)
            )
        ]  # fmt: skip

    def _settled(self, results: Results, one: Interval, turns: bool) -> bool:
        """Whether the interval is narrow enough; turns: or as narrow as more turns of this process
        make it."""
        narrow = max(
            math.log1p(results.settings.half_width), OF_THE_EFFECT * abs(math.log(one.nearer))
        )
        width = math.log1p(one.half_width)
        noise = math.sqrt(max(0.0, width**2 - one.floor**2)) if math.isfinite(width) else width
        return width <= narrow or (turns and noise <= max(narrow, one.floor) / 2)

    def _beaten(self, results: Results, found: Compared, number: int) -> bool:
        """Whether the answer cannot name the arm: another one that stays within the limits is shown
        to be as fast, and takes less memory."""
        if not self.answer_only or number not in found.whole:
            return False
        return any(
            other != number
            and found.whole[other].high < found.whole[number].low
            and _bytes(results, other) <= _bytes(results, number)
            and results.arms[other].dropped is None
            for other in found.whole
        )


def _bytes(results: Results, number: int) -> float:
    """Weights and KV cache of an arm; infinite where they are not known."""
    facts = results.arms[number].facts
    return facts.run.weight_bytes + facts.run.kv_cache_bytes if facts and facts.run else math.inf
