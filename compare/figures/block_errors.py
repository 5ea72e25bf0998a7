"""Standard errors of means over dependent values, and of speeds of different days.

    kl = block_mean(kl_sums, token_counts)                  # by windows or files
    more = perplexity_ratio(nll_sums, baseline_sums, token_counts)
    now = level([seconds * limit for ...]); change(now, then).verdict

**Perplexity and KL.** Tokens of one text are not independent: what is hard to predict comes in
passages. The mean over tokens is a ratio of sums over blocks (windows or files), and its standard
error is the ratio estimator's, from the blocks' residuals (Cochran 1977, section 6.3). Neighbouring
windows are merged in pairs until their residuals are no longer correlated (Flyvbjerg and Petersen
1989). Student's t has B - 1 degrees of freedom for B blocks.

**Different days.** Absolute speeds drift by half, so two runs are compared only through a limit
that each measured beside itself: log(seconds × limit) for each process, where the limit is bytes or
operations per second read next to that process. What slows both cancels. The two runs' means are
compared by Welch's t. What differs from day to day beyond that is unknown from two runs; where the
shares of several earlier days are at hand, `day_scatter` estimates it and it is added.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from compare.figures.contrasts import LEAST_FREEDOM
from compare.figures.families import FALSE_VERDICTS, Interval

LEAST_BLOCKS = LEAST_FREEDOM + 1
MERGE_FROM = 16  # blocks: fewer are not merged, as 7 degrees of freedom are the least worth having


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; infinite with fewer than LEAST_BLOCKS observations."""

    mean: float
    standard_error: float
    freedom: int

    def ends(self, confidence: float = 0.95) -> tuple[float, float]:
        """The interval's ends; infinite where there is no standard error."""
        if not math.isfinite(self.standard_error):
            return -math.inf, math.inf
        reach = float(stats.t.isf((1 - confidence) / 2, self.freedom)) * self.standard_error
        return self.mean - reach, self.mean + reach


def block_mean(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Mean per token from each block's sum and its number of tokens, blocks in the text's order.

    Raises ValueError for different lengths or a block without tokens.
    """
    if len(sums) != len(counts) or not counts:
        raise ValueError(f"{len(sums)} sums and {len(counts)} counts: one of each per block needed")
    if min(counts) <= 0:
        raise ValueError(f"a block of {min(counts)} tokens: at least one token each")
    total, weight = np.asarray(sums, float), np.asarray(counts, float)
    mean = float(total.sum() / weight.sum())
    residuals = total - mean * weight
    while len(residuals) >= MERGE_FROM and _lag_one(residuals) > 1.64 / math.sqrt(len(residuals)):
        pairs = len(residuals) // 2
        merged = residuals[: 2 * pairs].reshape(pairs, 2).sum(1)
        merged[-1] += residuals[2 * pairs :].sum()
        residuals = merged
    blocks = len(residuals)
    if blocks < LEAST_BLOCKS:
        return Estimate(mean, math.inf, blocks - 1)
    error = math.sqrt(blocks / (blocks - 1) * float(residuals @ residuals)) / float(weight.sum())
    return Estimate(mean, error, blocks - 1)


def perplexity_ratio(
    sums: Sequence[float],
    baseline: Sequence[float],
    counts: Sequence[float],
    confidence: float = 0.95,
) -> tuple[float, float, float]:
    """Perplexity ÷ the baseline's on the same blocks, and its interval's ends.

    `sums` and `baseline`: negative log-likelihoods, nats, summed by block.
    """
    differences = np.asarray(sums, float) - np.asarray(baseline, float)
    estimate = block_mean(differences.tolist(), counts)
    low, high = estimate.ends(confidence)
    return math.exp(estimate.mean), math.exp(low), math.exp(min(high, 700.0))


def level(values: Sequence[float]) -> Estimate:
    """Mean logarithm of one run's values, one for each process: seconds × limit, above 0."""
    if not values or min(values) <= 0:
        raise ValueError(f"{len(values)} values: at least one, and all above 0")
    logs = np.log(values)
    count = len(logs)
    error = float(logs.std(ddof=1)) / math.sqrt(count) if count >= LEAST_BLOCKS else math.inf
    return Estimate(float(logs.mean()), error, count - 1)


def change(
    now: Estimate,
    then: Estimate,
    days: Estimate | None = None,
    confidence: float = 1 - FALSE_VERDICTS,
) -> Interval:
    """Seconds now ÷ then, each relative to the limit of its own day; above 1 it became slower.

    days: what `day_scatter` made of earlier days. Errors add in squares, degrees of freedom as
    Welch and Satterthwaite have it. Without a standard error on either side, a range without
    confidence, which gives no verdict: a gate must not fire then.
    """
    centre = now.mean - then.mean
    parts = [(now.standard_error, now.freedom), (then.standard_error, then.freedom)]
    if days is not None:
        parts.append((math.sqrt(2) * days.standard_error, days.freedom))
    variance = sum(error**2 for error, _ in parts)
    blocks = min(now.freedom, then.freedom) + 1
    if not math.isfinite(variance):
        return Interval(0, math.exp(centre), 0.0, math.inf, None, blocks, 0)
    shares = sum(error**4 / freedom for error, freedom in parts)
    freedom = variance**2 / shares if shares else float(sum(freedom for _, freedom in parts))
    reach = float(stats.t.isf((1 - confidence) / 2, freedom)) * math.sqrt(variance)
    ends = (math.exp(centre - reach), math.exp(min(centre + reach, 700.0)))
    return Interval(0, math.exp(centre), *ends, confidence, blocks, int(freedom))


def day_scatter(days: Sequence[Estimate]) -> Estimate:
    """Standard deviation of a run's level from day to day, beyond its own error, by moments:
    `standard_error` holds it. Raises ValueError for fewer than LEAST_BLOCKS days."""
    if len(days) < LEAST_BLOCKS:
        raise ValueError(f"{len(days)} days: at least {LEAST_BLOCKS} are needed")
    means = np.array([day.mean for day in days])
    within = np.mean([d.standard_error**2 if math.isfinite(d.standard_error) else 0 for d in days])
    between = max(0.0, float(means.var(ddof=1)) - float(within))
    return Estimate(float(means.mean()), math.sqrt(between), len(days) - 1)


def _lag_one(residuals: np.ndarray) -> float:
    """Correlation of neighbouring blocks' residuals."""
    energy = float(residuals @ residuals)
    return float(residuals[1:] @ residuals[:-1]) / energy if energy else 0.0
