"""How many standard errors an interval needs so that it holds at every cycle, not only at the last.

An interval of 1.96 standard errors that is looked at after each cycle leaves out the truth in far
more than 5 % of sessions. `reach` is wider by what the looks cost: with probability 1 - level all
intervals of the session hold together (a confidence sequence), so that a session may stop, be
stopped or be resumed for any reason.

**Boundary.** W(n) / sqrt(n) of a random walk is, in log n, a stationary Ornstein-Uhlenbeck process;
the probability that its absolute value exceeds c between n = a and n = b is close to

    2 (1 - Phi(c)) + c phi(c) log(b / a)          for c > 2    (Siegmund 1985, chapter 4)

One c for all cycles from FIRST to LAST spends SHARE of the level; each doubling after LAST spends
half of what is left (stitching over epochs: Howard, Ramdas, McAuliffe and Sekhon 2021). Where
sessions really end, 10 to 500 cycles, c is 3.1 at 5 %; the mixture boundary of the same paper and
the asymptotic one of Waudby-Smith et al. 2021 need 3.3 to 3.6 there, as they pay for all n at once.

**Few batches.** The standard error is estimated, so c is replaced by Student's t of the same tail
probability: the significance level approach to group sequential t tests (Pocock 1977; Jennison and
Turnbull 2000, section 4.4). tests/stats measures that the whole sequence keeps its level.
"""

import functools
import math

from scipy import special  # scipy.stats would take every command a second longer

FIRST, LAST = 12, 3072  # cycles: no interval before FIRST, constant boundary until LAST
SHARE = 0.9  # of the level, spent until LAST


def reach(cycles: int, freedom: int, level: float) -> float:
    """Half-width of a two-sided interval in standard errors; infinite before FIRST cycles.

    freedom: degrees of freedom of the standard error. level: the share of sessions in which the
    interval leaves out the truth at any cycle.
    """
    if cycles < FIRST or freedom < 1:
        return math.inf
    epoch = max(0, math.ceil(math.log2(cycles / LAST)))
    share = SHARE if epoch == 0 else (1 - SHARE) / 2**epoch
    return student(_boundary(share * level, LAST / FIRST if epoch == 0 else 2.0), freedom)


def student(deviations: float, freedom: float) -> float:
    """Student's t with the tail probability that the normal distribution has at `deviations`."""
    return -float(special.stdtrit(freedom, special.ndtr(-deviations)))


def normal(level: float) -> float:
    """The two-sided normal quantile: 1.96 at 5 %."""
    return -float(special.ndtri(level / 2))


@functools.lru_cache(maxsize=1024)
def _boundary(level: float, span: float) -> float:
    """The c that |W(n)| / sqrt(n) exceeds with probability `level` while n grows `span`-fold."""
    low, high = 0.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        density = math.exp(-(middle**2) / 2) / math.sqrt(2 * math.pi)
        crossing = math.erfc(middle / math.sqrt(2)) + middle * density * math.log(span)
        low, high = (middle, high) if crossing > level else (low, middle)
    return high
