"""How many processes to run, when to look, and what each look may claim.

    plan = Plan(candidates=1, most_blocks=16)
    looks = []
    blocks = plan.first_blocks                       # run this many blocks, then
    while blocks is not None:
        looks.append(plan.look(looks, fitted))       # fitted: of all blocks so far
        blocks = plan.next_blocks(looks, fitted)     # None: the run is over
    shown(looks)                                     # the interval of each arm

**The level is spent over looks.** A run in which nothing differs declares something with
probability `level` at most, all looks and all arms together. Each look has a share of the level
that is fixed before its data are compared (Lan and DeMets 1983, with increments added up, so that
it holds whatever the correlation of looks); the intervals of a look are Dunnett's at that share.
All intervals of all looks hold simultaneously (repeated confidence intervals, Jennison and Turnbull
1989), so a run may end after any of them for whatever reason, and the narrowest may be shown.

**Sizes follow from variances only**, as in Stein (1945): the first look estimates the scatter of
processes on this machine, and the size of the whole run is what makes the final intervals as narrow
as `precision`; a middle look half way re-estimates it (blinded re-estimation, Wittes and Brittain
1990). A look is final when the size is reached; it then has all of the level that is left. Stein's
own statistic would keep the first stage's 3 degrees of freedom for ever and cost four times the
processes; the pooled variance is used instead. What that costs in level is simulated in
tests/compare/trust_simulation.py, over the whole range of scatter.

**Effort follows the question.** An arm is settled, and need not be measured further, where a
difference of PLAIN or more is declared, or where its interval is narrower than `wanted`: the
precision near ratio 1, a fifth of the effect far from it. Arms that are settled and cannot be the
fastest are dropped; those in the running stay for the comparison with the best.

**Unplanned looks.** --resume of a run that had ended is an extension: the k-th has EXTENSIONS /
2^k of the level. Ctrl-C is an interruption, which the person chose after seeing the progress: a run
interrupted after k blocks has INTERRUPTIONS × 2 / (k (k + 1)), which sums to INTERRUPTIONS over all
k, so that choosing the moment gains nothing. A run that is interrupted and resumed goes on
with its plan, and the planned looks keep their shares.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quantbench.compare.figures.contrasts import LEAST_FREEDOM, Fit
from quantbench.compare.figures.families import (
    FALSE_VERDICTS,
    AgainstBest,
    Interval,
    against_baseline,
    critical,
    smallest_correlation,
)

Kind = Literal["first", "middle", "final", "extension", "interrupted"]
# Shares of the level: for the first and the middle look, and for all planned looks together. A
# tenth is left because the size is chosen by the variance that the verdict then uses.
EARLY = (0.15, 0.25)
PLANNED = 0.8
EXTENSIONS, INTERRUPTIONS = 0.05, 0.05
PLAIN = math.log(1.25)  # settled once declared; below 1.3, as estimates of 1.3 scatter
RELATIVE_PRECISION = 0.2  # half-width of an interval ÷ the logarithm of the ratio


@dataclass(frozen=True)
class Look:
    """What was seen at one look; kept in the results, as it has used up its level."""

    kind: Kind
    blocks: int
    level: float
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Plan:
    """`candidates`: arms besides the baseline. `most_blocks`: what the budget allows. `precision`:
    half-width wanted near ratio 1, relative. `level`: share of runs with a false verdict."""

    candidates: int
    most_blocks: int
    precision: float = 0.02
    level: float = FALSE_VERDICTS

    @property
    def first_blocks(self) -> int:
        """An even number, as arms are loaded in one order and then in the other, with the degrees
        of freedom for an interval: 4 for one candidate, 4 for two, 2 from three on."""
        blocks = 2
        while self.candidates * (blocks - 1) < LEAST_FREEDOM or blocks < 2:
            blocks += 2
        return min(blocks, self.most_blocks)

    def look(self, looks: Sequence[Look], fitted: Fit) -> Look:
        """A planned look at all blocks so far, or an extension where the plan had ended."""
        blocks = int(fitted.blocks.max())
        planned = [look for look in looks if look.kind in ("first", "middle", "final")]
        if any(look.kind == "final" for look in planned):
            before = sum(look.kind == "extension" for look in looks)
            return self._at("extension", EXTENSIONS / 2 ** (before + 1), fitted)
        left = PLANNED - sum(look.level for look in planned) / self.level
        ends = blocks >= self.most_blocks or len(planned) == len(EARLY)
        if ends or (planned and self._is_precise(looks, fitted, left)):
            return self._at("final", left, fitted)
        return self._at(("first", "middle")[len(planned)], EARLY[len(planned)], fitted)

    def interrupted(self, fitted: Fit) -> Look:
        """A look that a person chose by ending the run."""
        blocks = max(1, int(fitted.blocks.max()))
        return self._at("interrupted", INTERRUPTIONS * 2 / (blocks * (blocks + 1)), fitted)

    def next_blocks(self, looks: Sequence[Look], fitted: Fit) -> int | None:
        """After how many blocks in all to look next; None where the run is over.

        Interruptions change nothing: a run that is resumed goes on as it was planned. One that had
        ended is extended by running as many blocks as the person asks for, and `look`.
        """
        planned_looks = [look for look in looks if look.kind != "interrupted"]
        if not planned_looks:
            return self.first_blocks
        last, done = planned_looks[-1], settled_arms(planned_looks, self.precision)
        blocks = last.blocks
        open_arms = [interval.arm for interval in last.intervals if interval.arm not in done]
        if last.kind in ("final", "extension") or not open_arms or blocks >= self.most_blocks:
            return None
        size = self.size(fitted, open_arms)
        middle = _even((blocks + size) / 2)
        following = middle if len(planned_looks) == 1 and middle < size else size
        return min(max(following, blocks + 2), self.most_blocks)

    def size(self, fitted: Fit, arms: Sequence[int]) -> int:
        """Blocks that make the final intervals of these arms as narrow as `precision`, from the
        scatter so far; at most `most_blocks`."""
        places = [fitted.arms.index(arm) for arm in arms]
        deviations = fitted.standard_errors * np.sqrt(fitted.blocks)
        deviation = float(deviations[places].max())
        share = PLANNED - sum(EARLY)
        for blocks in range(2, self.most_blocks, 2):
            freedom = max(1, self.candidates * (blocks - 1))
            reach = critical(share * self.level, self.candidates, freedom)
            if reach * deviation <= math.log1p(self.precision) * math.sqrt(blocks):
                return blocks
        return self.most_blocks

    def _is_precise(self, looks: Sequence[Look], fitted: Fit, share: float) -> bool:
        """Whether all open arms are precise at what is left of the level; from standard errors
        alone. Not asked at the first look: of few degrees of freedom, those that look precise are
        mostly those whose scatter is underestimated."""
        done = settled_arms(looks, self.precision)
        correlation = smallest_correlation(fitted.covariance)
        for arm, error, freedom in zip(
            fitted.arms, fitted.standard_errors, fitted.freedom, strict=True
        ):
            if arm in done:
                continue
            if freedom < LEAST_FREEDOM:
                return False
            reach = critical(share * self.level, self.candidates, int(freedom), correlation)
            if reach * error > math.log1p(self.precision):
                return False
        return True

    def _at(self, kind: Kind, share: float, fitted: Fit) -> Look:
        level = share * self.level
        intervals = against_baseline(fitted, level, self.candidates, 1 - self.level)
        return Look(kind, int(fitted.blocks.max()), level, tuple(intervals))


def wanted(ratio: float, precision: float) -> float:
    """The half-width that answers the question about an effect of this size."""
    return max(precision, math.expm1(RELATIVE_PRECISION * abs(math.log(ratio))))


def settled_arms(looks: Sequence[Look], precision: float) -> set[int]:
    """Arms that some look has answered: see the module's docstring."""
    return {
        interval.arm
        for look in looks
        for interval in look.intervals
        if interval.half_width <= wanted(interval.ratio, precision)
        or (interval.verdict != "no difference shown" and abs(math.log(interval.ratio)) >= PLAIN)
    }


def arms_to_drop(looks: Sequence[Look], best: Sequence[AgainstBest], precision: float) -> set[int]:
    """Settled arms that another arm is shown to beat. `best`: at the level of the last look."""
    beaten = {one.arm for one in best if not one.can_be_best}
    return settled_arms(looks, precision) & beaten


def shown(looks: Sequence[Look]) -> dict[int, Interval]:
    """The narrowest interval of each arm, whose verdict is the arm's; the last range where it
    has none. The confidence is that of all looks together, 1 - the plan's level."""
    result: dict[int, Interval] = {}
    for look in looks:
        for interval in look.intervals:
            known = result.get(interval.arm)
            if known is None or interval.half_width <= known.half_width:
                result[interval.arm] = interval
    return result


def _even(value: float) -> int:
    return 2 * math.ceil(value / 2)
