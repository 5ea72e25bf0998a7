"""How many standard errors an interval needs so that it holds at every cycle, not only at the last.

An interval of 1.96 standard errors leaves out the truth in far more than 5 % of sessions if every
cycle is a look. `reach` is wider by what the looks cost: with probability 1 - level all
intervals of a session hold together (a confidence sequence), so that it may stop, be stopped or be
resumed for any reason.

**Boundary.** A random walk S(n) of unit variance crosses, at any n, with probability `level`

    sqrt((n + TUNED) (log(1 + n / TUNED) - 2 log level))

(Robbins 1970's normal mixture; Howard, Ramdas, McAuliffe and Sekhon 2021; of means, the asymptotic
confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021). At 5 % that is 3.4
standard errors after 12 cycles, 3.0 after 50 to 100 and 3.3 after 1000: less than stitching, or
Pocock's constant over the same range, where sessions really end.

**Few batches.** The standard error is estimated, so that multiple becomes Student's t of the same
tail probability, as in group sequential t tests (Pocock 1977; Jennison and Turnbull 2000, section
4.4). tests/stats and tests/trust measure that sequences keep their level.
"""

import functools
import math

import numpy as np
from scipy import special  # scipy.stats would take every command a second longer

FIRST = 12  # cycles: no interval before
TUNED = 8  # cycles: relative to the looks so far, intervals are narrowest after ten times this
QUANTILES = 500  # of a chi-squared distribution, in the place of an integral over it


def reach(cycles: int, freedom: int, level: float) -> float:
    """Half-width of a two-sided interval in standard errors; infinite before FIRST cycles.

    freedom: degrees of freedom of the standard error. level: the share of sessions in which the
    interval leaves out the truth at any cycle.
    """
    if cycles < FIRST or freedom < 1:
        return math.inf
    grown = cycles / TUNED
    multiple = math.sqrt((1 + 1 / grown) * (math.log1p(grown) - 2 * math.log(level)))
    return -float(special.stdtrit(freedom, special.ndtr(-multiple)))


def largest(level: float, count: int, freedom: float) -> float:
    """What the largest of `count` |t| statistics exceeds with probability `level`, at most: they
    share the estimate in their denominator, and may be correlated in any way (Sidak 1967; the
    studentized maximum modulus). At 5 %, one statistic and endless degrees of freedom, 1.96."""
    return _largest(level, count, round(freedom, 1))


@functools.lru_cache(maxsize=1024)
def _largest(level: float, count: int, freedom: float) -> float:
    probabilities = (np.arange(QUANTILES) + 0.5) / QUANTILES
    deviations = np.sqrt(special.gammaincinv(freedom / 2, probabilities) * 2 / freedom)
    low, high = 0.0, 1e3
    for _ in range(50):
        middle = (low + high) / 2
        inside = 1 - 2 * special.ndtr(-middle * deviations)
        low, high = (low, middle) if 1 - (inside**count).mean() < level else (middle, high)
    return high
