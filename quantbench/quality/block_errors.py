"""Standard errors of means over tokens that depend on each other: of perplexity and KL.

    kl = block_mean(kl_sums, token_counts)                  # by blocks of tokens, or windows

Tokens of one text are not independent: what is hard to predict comes in passages. The mean over
tokens is a ratio of sums over blocks (windows or files), and its standard error is the ratio
estimator's, from the blocks' residuals (Cochran 1977, section 6.3). Neighbouring windows are merged
in pairs until their residuals are no longer correlated (Flyvbjerg and Petersen 1989). Student's t
has B - 1 degrees of freedom for B blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_BLOCKS = 4  # below, Student's t at 99 % exceeds 6: a range is more honest than an interval
MERGE_FROM = 12  # blocks: fewer are not merged, as 5 degrees of freedom are the least worth having


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; infinite with fewer than LEAST_BLOCKS observations."""

    mean: float
    standard_error: float
    freedom: float

    @property
    def known_error(self) -> float | None:
        """The standard error, if there is one."""
        return self.standard_error if math.isfinite(self.standard_error) else None

    def ends(self, confidence: float = 0.95) -> tuple[float, float]:
        """The interval's ends; infinite without a standard error."""
        if self.known_error is None:
            return -math.inf, math.inf
        from scipy import special  # 13 MB: a worker imports this file, and its peak memory counts

        reach = float(special.stdtrit(self.freedom, (1 + confidence) / 2)) * self.standard_error
        return self.mean - reach, self.mean + reach


def block_mean(sums: Sequence[float], counts: Sequence[float]) -> Estimate:
    """Mean per token from each block's sum and its number of tokens, blocks in the text's order."""
    total, weight = np.asarray(sums, float), np.asarray(counts, float)
    mean = float(total.sum() / weight.sum())
    residuals = total - mean * weight
    while len(residuals) >= MERGE_FROM and _correlated(residuals):
        residuals = np.add.reduceat(residuals, range(0, len(residuals) - 1, 2))
    blocks = len(residuals)
    if blocks < LEAST_BLOCKS:
        return Estimate(mean, math.inf, blocks - 1)
    error = math.sqrt(blocks / (blocks - 1) * float(residuals @ residuals)) / float(weight.sum())
    return Estimate(mean, error, blocks - 1)


def _correlated(residuals: np.ndarray) -> bool:
    """Whether neighbours resemble each other: one-sided, at 5 %."""
    products = float(residuals[1:] @ residuals[:-1])
    return products > 1.64 / math.sqrt(len(residuals)) * float(residuals @ residuals)


def mean_of(estimates: Sequence[Estimate], between: bool = False) -> Estimate:
    """The mean of independent means, each counting alike. Its degrees of freedom are those that
    Satterthwaite (1946) derives from the variances.

    between: the means are a sample, such as of texts. Where they scatter by more than their own
    errors explain, the error of their mean is that of a sample, with one degree of freedom less
    than there are means.
    """
    means, errors, freedoms = (
        np.array([getattr(estimate, name) for estimate in estimates])
        for name in ("mean", "standard_error", "freedom")
    )
    mean, variances = float(means.mean()), (errors / len(errors)) ** 2
    total = float(variances.sum())
    if not math.isfinite(total):
        return Estimate(mean, math.inf, 0)
    scatter = float(means.var(ddof=1)) / len(means) if between and len(means) > 1 else 0.0
    if scatter > total:
        return Estimate(mean, math.sqrt(scatter), len(means) - 1)
    freedom = total**2 / (variances**2 / freedoms).sum() if total else freedoms.sum()
    return Estimate(mean, math.sqrt(total), int(freedom))


def ratio(logarithm: float) -> float:
    """exp, up to 700: of more than 709 it is no float; schemes that predict nothing come near."""
    return math.exp(min(logarithm, 700.0))
