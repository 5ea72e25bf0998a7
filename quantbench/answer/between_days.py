"""Speeds of different days, compared through a limit that each of them measured.

    change(level([seconds * limit for …]), level(then)).ends        # 1.03 to 1.07: it became slower

Absolute speeds drift by half from day to day, so two runs are compared only through a limit that
each measured beside itself: log(seconds × limit) for each process, where the limit is bytes or
operations per second read next to that process. What slows both cancels. The two runs' means are
compared by Welch's t. What differs from day to day beyond that is unknown from two runs; where the
shares of several earlier days are at hand, `day_scatter` estimates it and it is added.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from quantbench.answer.compared import CONFIDENCE
from quantbench.answer.interval import Ratio
from quantbench.quality.block_errors import LEAST_BLOCKS, Estimate


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
    confidence: float = CONFIDENCE,
) -> Ratio:
    """Seconds now ÷ then, each relative to the limit of its own day; above 1 it became slower.

    days: what `day_scatter` made of earlier days. Errors add in squares, degrees of freedom as
    Welch and Satterthwaite have it. Without a standard error on either side there is no interval,
    and a gate must not fire.
    """
    centre = now.mean - then.mean
    parts = [(now.standard_error, now.freedom), (then.standard_error, then.freedom)]
    if days is not None:
        parts.append((math.sqrt(2) * days.standard_error, days.freedom))
    variance = sum(error**2 for error, _ in parts)
    if not math.isfinite(variance):
        return Ratio(math.exp(centre), math.exp(centre), math.exp(centre))
    shares = sum(error**4 / freedom for error, freedom in parts)
    freedom = variance**2 / shares if shares else float(sum(freedom for _, freedom in parts))
    reach = float(stats.t.isf((1 - confidence) / 2, freedom)) * math.sqrt(variance)
    low, high = math.exp(centre - reach), math.exp(min(centre + reach, 700.0))
    return Ratio(math.exp(centre), low, high, confidence)


def day_scatter(days: Sequence[Estimate]) -> Estimate:
    """Standard deviation of a run's level from day to day, beyond its own error, by moments:
    `standard_error` holds it. Raises ValueError for fewer than LEAST_BLOCKS days."""
    if len(days) < LEAST_BLOCKS:
        raise ValueError(f"{len(days)} days: at least {LEAST_BLOCKS} are needed")
    means = np.array([day.mean for day in days])
    within = np.mean([d.standard_error**2 if math.isfinite(d.standard_error) else 0 for d in days])
    between = max(0.0, float(means.var(ddof=1)) - float(within))
    return Estimate(float(means.mean()), math.sqrt(between), len(days) - 1)
