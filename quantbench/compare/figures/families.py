"""Many arms at once: against the baseline (Dunnett) and against the best of the others (Hsu).

    against_baseline(fitted, level=0.02)        # an Interval for each arm
    against_best(fitted, level=0.02)            # which arms may be the fastest

A verdict is read off the interval that is shown: "faster" means that the whole interval lies below
1. The intervals of one call hold simultaneously: with probability 1 - level all of them contain the
truth, so that with 33 equal arms, too, at most a share `level` of the runs declares any difference.

Against the baseline: Dunnett (1955). The statistics share the baseline's error, correlation 1/2 in
a complete design, so Dunnett's critical value is smaller than Bonferroni's. In designs that are not
quite balanced all correlations are taken to be the smallest among them, which can only widen the
intervals (Slepian's inequality for t of product structure: Das Gupta et al. 1972).

Against the best: Hsu (1984), constrained multiple comparisons with the best. The best of J ratios
is biased upwards, so "the fastest" is a claim of its own: an arm is a candidate for the best unless
another arm is shown to be faster. The set of candidates contains the truly fastest arm with
probability 1 - level.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special  # scipy.stats would take every command a second longer

from quantbench.compare.figures.contrasts import BASELINE, LEAST_FREEDOM, Fit

Array = np.ndarray
Verdict = Literal["faster", "slower", "no difference shown"]
FALSE_VERDICTS = 0.02  # at most this share of runs without any difference declares one
CORRELATION_STEP = 0.05  # correlations are rounded down to a multiple, so that values are reused


@dataclass(frozen=True)
class Interval:
    """A ratio of seconds, below 1 where the arm is faster than what it is compared with.

    `confidence` is None for a range: the lowest and the highest process, where there are too few
    for an interval. It must then be printed as "range" and gives no verdict.
    """

    arm: int
    ratio: float
    low: float
    high: float
    confidence: float | None  # simultaneous over arms and, in a plan, over looks
    blocks: int
    freedom: int

    @property
    def half_width(self) -> float:
        """Relative: 0.02 for 1.00 with 0.98 to 1.02; infinite for a range."""
        if self.confidence is None or self.low <= 0:
            return math.inf
        return math.sqrt(self.high / self.low) - 1

    @property
    def verdict(self) -> Verdict:
        if self.confidence is None or self.low <= 1 <= self.high:
            return "no difference shown"
        return "faster" if self.high < 1 else "slower"

    @property
    def word(self) -> str:
        """What the two ends are to be called."""
        return "range" if self.confidence is None else f"{100 * self.confidence:.4g} % interval"


@dataclass(frozen=True)
class AgainstBest:
    """An arm's seconds ÷ those of the fastest of the other arms; ends at 1 are constrained: an arm
    whose `low` is 1 is beaten, one whose `high` is 1 is the fastest."""

    arm: int
    low: float
    high: float
    can_be_best: bool


def against_baseline(
    fitted: Fit,
    level: float = FALSE_VERDICTS,
    count: int | None = None,
    confidence: float | None = None,
) -> list[Interval]:
    """Simultaneous intervals for the ratio of every arm that has been measured.

    level: the share of runs in which at least one of the intervals misses the truth. count: of how
    many arms, where some were dropped before; else those of the fit.
    """
    measured = [n for n in range(len(fitted.arms)) if fitted.blocks[n] > 0]
    correlation = smallest_correlation(fitted.covariance[np.ix_(measured, measured)])
    result = []
    named: float | None
    for n in measured:
        freedom, blocks = int(fitted.freedom[n]), int(fitted.blocks[n])
        centre, arm = float(fitted.log_ratios[n]), fitted.arms[n]
        if freedom < LEAST_FREEDOM:
            low, high, named = float(fitted.lowest[n]), float(fitted.highest[n]), None
        else:
            reach = critical(level, count or len(measured), freedom, correlation)
            reach *= float(fitted.standard_errors[n])
            low, high = centre - reach, centre + reach
            named = 1 - level if confidence is None else confidence
        ends = (math.exp(centre), _exp(low), _exp(high))
        result.append(Interval(arm, *ends, named, blocks, freedom))
    return result


def against_best(
    fitted: Fit, level: float = FALSE_VERDICTS, among: Sequence[int] | None = None
) -> list[AgainstBest]:
    """Hsu's intervals for each arm of `among` (arm numbers, the baseline's too; all by default).

    Without enough degrees of freedom every arm can be the best, with infinite ends.
    """
    numbers = [BASELINE, *(a for n, a in enumerate(fitted.arms) if fitted.blocks[n] > 0)]
    numbers = [arm for arm in numbers if among is None or arm in among]
    if len(numbers) == 1:
        return [AgainstBest(numbers[0], 1.0, 1.0, True)]
    logs, variances, correlation, freedom = _differences(fitted, numbers)
    if freedom < LEAST_FREEDOM:
        return [AgainstBest(arm, 0.0, math.inf, True) for arm in numbers]
    reach = critical(level, len(numbers) - 1, freedom, correlation, sides=1) * np.sqrt(variances)
    result = []
    for n, arm in enumerate(numbers):
        others = [m for m in range(len(numbers)) if m != n]
        apart = logs[n] - logs[others]
        low = min(0.0, float((apart - reach[n, others]).max()))
        high = max(0.0, float((apart + reach[n, others]).max()))
        result.append(AgainstBest(arm, _exp(low), _exp(high), low < 0))
    return result


def critical(
    level: float, count: int, freedom: int, correlation: float = 0.5, sides: int = 2
) -> float:
    """Quantile of the largest of `count` equicorrelated t statistics: |t| with two sides.

    P(max > result) = level. Raises ValueError for a level or a correlation outside of [0, 1).
    """
    if not 0 < level < 1 or not 0 <= correlation < 1:
        raise ValueError(f"level {level}, correlation {correlation}: both from 0, below 1")
    if count == 1:
        return _student(level / sides, freedom)
    rounded = math.floor(correlation / CORRELATION_STEP + 1e-9) * CORRELATION_STEP
    return _critical(level, count, freedom, rounded, sides)


@functools.lru_cache(maxsize=4096)
def _critical(level: float, count: int, freedom: int, correlation: float, sides: int) -> float:
    from scipy.optimize import brentq

    low = _student(min(0.5, level / sides), freedom)
    high = _student(level / sides / count, freedom) * 1.001  # Bonferroni
    return float(
        brentq(lambda value: _beyond(value, count, freedom, correlation, sides) - level, low, high)
    )


def _beyond(value: float, count: int, freedom: int, correlation: float, sides: int) -> float:
    """Probability that the largest statistic exceeds `value`: integrated over the common normal
    part and over the logarithm of the estimated standard deviation."""
    half = freedom / 2  # freedom × scale² has a chi-squared distribution
    low, high = special.gammaincinv(half, 1e-13) / half, special.gammainccinv(half, 1e-13) / half
    logs = np.linspace(math.log(low) / 2, math.log(high) / 2, 121)
    scale = np.exp(logs)[:, None]
    squares = half * scale**2
    density = 2 * np.exp(half * np.log(squares) - squares - special.gammaln(half))
    normal = np.linspace(-8, 8, 129)
    shared, own = math.sqrt(correlation) * normal, math.sqrt(1 - correlation)
    inside = special.ndtr((value * scale - shared) / own)
    if sides == 2:
        inside = inside - special.ndtr((-value * scale - shared) / own)
    outside = -np.expm1(count * np.log(np.maximum(inside, 1e-300)))
    bell = np.exp(-(normal**2) / 2) / math.sqrt(2 * math.pi)
    over_normal = np.trapezoid(outside * bell, normal, axis=1)
    return float(np.trapezoid(over_normal * density[:, 0], logs))


def _student(tail: float, freedom: int) -> float:
    """The value that Student's t exceeds with this probability."""
    return -float(special.stdtrit(freedom, tail))


def smallest_correlation(covariance: Array) -> float:
    """Smallest off-diagonal correlation, at least 0; 0 for a single arm."""
    deviations = np.sqrt(np.diagonal(covariance))
    if len(deviations) < 2 or not (deviations > 0).all():
        return 0.0
    correlations = covariance / np.outer(deviations, deviations)
    lowest = float(correlations[~np.eye(len(deviations), dtype=bool)].min())
    return min(max(lowest, 0.0), 0.95)


def _differences(fitted: Fit, numbers: Sequence[int]) -> tuple[Array, Array, float, int]:
    """Log seconds relative to the baseline, variances of all differences (J, J), the smallest
    correlation of two differences with a common arm, and the degrees of freedom."""
    size = len(fitted.arms) + 1
    covariance = np.zeros((size, size))  # the baseline first: it is 0 without error
    covariance[1:, 1:] = fitted.covariance
    logs = np.concatenate([[0.0], fitted.log_ratios])
    own = np.concatenate([[0.0], fitted.standard_errors**2])
    places = [0 if arm == BASELINE else fitted.arms.index(arm) + 1 for arm in numbers]
    for place in range(1, size):  # an uneven arm: what its own processes say
        extra = own[place] - covariance[place, place]
        if np.isfinite(extra):
            covariance[place, place] += extra
    covariance = covariance[np.ix_(places, places)]
    diagonal = np.diagonal(covariance)
    variances = np.maximum(diagonal[:, None] + diagonal[None, :] - 2 * covariance, 0.0)
    freedom = min(
        (int(fitted.freedom[place - 1]) for place in places if place), default=LEAST_FREEDOM
    )
    lowest = 0.5 if len(places) > 2 else 0.0
    for n in range(len(places)):
        # Cov(n - a, n - b) = Var(n) - Cov(n, a) - Cov(n, b) + Cov(a, b)
        common = diagonal[n] - covariance[n][:, None] - covariance[n][None, :] + covariance
        others = [m for m in range(len(places)) if m != n]
        common, deviations = common[np.ix_(others, others)], np.sqrt(variances[n, others])
        if (deviations > 0).all() and len(others) > 1:
            ratio = common / np.outer(deviations, deviations)
            lowest = min(lowest, float(ratio[~np.eye(len(others), dtype=bool)].min()))
    return logs[places], variances, min(max(lowest, 0.0), 0.95), freedom


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # finite, as JSON has no infinity
