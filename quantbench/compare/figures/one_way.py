"""Seconds of independent runs, group by group: a Fit without blocks, for what others recorded.

    fitted = one_way([default, first, second])      # seconds of each group's runs
    families.against_baseline(fitted)               # Dunnett, with a range where runs are too few
    families.against_best(fitted)                   # Hsu

Nothing pairs the runs, so each group has its mean logarithm, and all share one variance: the
scatter within groups, pooled, with N - k degrees of freedom for N runs in k groups. A group whose
own variance exceeds that of the others (F, at the level UNEVEN) is judged by its own, with the
degrees of freedom of Welch and Satterthwaite, as Games and Howell (1976) do it for all pairs. A
group of a single run has no scatter of its own that could be checked, so it gets no interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from quantbench.compare.figures.contrasts import UNEVEN, Fit

LEAST_RUNS = 2  # of a group, for an interval


@dataclass(frozen=True)
class Scatter:
    """How far runs of one group scatter: the standard deviation of the logarithm of seconds."""

    deviation: float  # nan where no group has two runs
    freedom: int


def scatter(groups: Sequence[Sequence[float]]) -> Scatter:
    """Pooled over the groups."""
    logs = [np.log(group) for group in groups if len(group)]
    freedom = sum(len(group) - 1 for group in logs)
    if freedom == 0:
        return Scatter(math.nan, 0)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in logs)
    return Scatter(math.sqrt(squares / freedom), freedom)


def one_way(groups: Sequence[Sequence[float]]) -> Fit:
    """Ratios of every group to the first one. Raises ValueError for a group without runs, or with
    seconds that are not above 0."""
    if len(groups) < 2 or any(not len(group) or min(group) <= 0 for group in groups):
        raise ValueError("at least two groups are needed, each with runs of more than 0 seconds")
    logs = [np.log(np.asarray(group, float)) for group in groups]
    counts = np.array([len(group) for group in logs])
    means = np.array([group.mean() for group in logs])
    own = np.array([group.var(ddof=1) if len(group) > 1 else 0.0 for group in logs])
    uneven = _uneven(own, counts)
    pool = [group for group, apart in zip(groups, uneven, strict=True) if not apart]
    pooled = scatter(pool)
    common = 0.0 if math.isnan(pooled.deviation) else pooled.deviation**2
    variances = np.where(uneven, own, common) / counts  # of the groups' means
    freedoms = np.where(uneven, counts - 1, pooled.freedom)
    errors = np.sqrt(variances[0] + variances[1:])
    freedom = np.array([_freedom(variances, freedoms, uneven, n) for n in range(1, len(groups))])
    freedom[(counts[1:] < LEAST_RUNS) | (counts[0] < LEAST_RUNS)] = 0
    return Fit(
        arms=tuple(range(1, len(groups))),
        log_ratios=means[1:] - means[0],
        covariance=variances[0] + np.diag(variances[1:]),
        standard_errors=np.where(freedom > 0, errors, np.inf),
        freedom=freedom,
        scatter=np.asarray(pooled.deviation),
        uneven=uneven[1:] | uneven[0],
        blocks=counts[1:],
        lowest=np.array([group.min() for group in logs[1:]]) - logs[0].max(),
        highest=np.array([group.max() for group in logs[1:]]) - logs[0].min(),
    )


def _uneven(variances: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which groups scatter by more than the others together explain."""
    freedom = counts - 1
    total, squares = int(freedom.sum()), float((variances * freedom).sum())
    result = np.zeros(len(counts), bool)
    for number, (variance, own) in enumerate(zip(variances, freedom, strict=True)):
        others = total - own
        if own > 0 and others > 0:
            rest = max(0.0, squares - variance * own) / others
            limit = float(special.fdtri(own, others, 1 - UNEVEN))
            result[number] = variance > limit * rest
    return result


def _freedom(variances: np.ndarray, freedoms: np.ndarray, uneven: np.ndarray, number: int) -> int:
    """Degrees of freedom of the difference between group `number` and the first one."""
    if not uneven[0] and not uneven[number]:
        return int(freedoms[number])
    parts = [(float(variances[n]), int(freedoms[n])) for n in (0, number)]
    if min(freedom for _, freedom in parts) < 1:
        return 0
    total = sum(variance for variance, _ in parts)
    shares = sum(variance**2 / freedom for variance, freedom in parts)
    return int(total**2 / shares) if shares else min(freedom for _, freedom in parts)
