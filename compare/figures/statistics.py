"""How sure one may be of a ratio of two speeds, from rounds in which each arm was timed once.

    logs = paired(target, baseline)         # by process, one log ratio a round
    estimate(logs)                          # ratio 0.81, 95 % interval 0.80 to 0.82
    verdict(logs, candidates=1)             # "faster"

A machine drifts, so only samples of one round are compared: what slows both arms cancels in their
ratio, and the order within a round is drawn anew each time, so that what drifts during a round
favours nobody. Rounds may hold outliers: of each process the trimmed mean counts, which ignores
three tenths on either side.

Two processes of one arm differ for as long as they live, so rounds of the same processes are no
independent witnesses, however many there are: what a ratio's error is learnt from are the
processes' means, with Student's t. Few processes tell little of how far they scatter, and what is
known of that beforehand (BETWEEN_PROCESSES) counts as PRIOR_FREEDOM further ones (Smyth 2004). A
process whose rounds scatter widely counts less.

The run stops when intervals are narrow, never when they exclude 1: for symmetric errors a width
tells nothing about which side of 1 a mean fell on, so that stopping by it leaves the share of false
verdicts where it was (Chow and Robbins 1965). An interrupted run was stopped by somebody who saw
the intervals; its verdict is held to a level that allows for every look there was.
tests/compare/test_statistics.py tries all that on data whose truth is known.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

Array = np.ndarray
Verdict = Literal["faster", "slower", "no difference shown"]
CONFIDENCE = 0.95  # of the intervals that are shown
FALSE_VERDICTS = 0.02  # at most this share of runs without any difference declares one
# Standard deviation of the log ratio of two processes of one arm, from docs/LOG.md, and how many
# degrees of freedom it counts for: as many as four pairs of processes have themselves.
BETWEEN_PROCESSES, PRIOR_FREEDOM = 0.02, 3
LEAST_ROUNDS, LEAST_PROCESSES = 10, 3
TRIM = 0.3  # on either side: of ten rounds, three late ones change nothing
STALLED = 0.1  # of the steps of a sample, also on either side
FAR = 3.0  # standard deviations: no process's mean counts as further from the others' than this
RESAMPLES = 200


@dataclass(frozen=True)
class Estimate:
    """A ratio, below 1 where the target is better, and the interval around it."""

    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def half_width(self) -> float:
        """Relative: 0.02 for 1.00 with 0.98 to 1.02."""
        return math.sqrt(self.high / self.low) - 1 if self.low else math.inf


Samples = Mapping[tuple[int, int], Sequence[float]]  # by process and round, the seconds of each


def paired(target: Samples, baseline: Samples) -> list[Array]:
    """Log of target ÷ baseline, one number for every round that both have a sample of: an array for
    each process.

    An arm with several samples in a round counts with their median.
    """
    found: dict[int, list[float]] = {}
    for process, round in sorted(target.keys() & baseline.keys()):
        mine, theirs = np.median(target[process, round]), np.median(baseline[process, round])
        found.setdefault(process, []).append(math.log(mine / theirs))
    return [np.array(logs) for logs in found.values()]


def estimate(processes: Sequence[Array], confidence: float = CONFIDENCE, seed: int = 0) -> Estimate:
    """The ratio and its interval; infinitely wide for fewer than three rounds."""
    rounds = sum(map(len, processes))
    if rounds == 0:
        return Estimate(math.nan, 0.0, math.inf, 0)
    centre, error, freedom = pooled(processes, seed)
    if rounds < 3:
        return Estimate(math.exp(centre), 0.0, math.inf, rounds)
    reach = student(1 - (1 - confidence) / 2, freedom) * error
    return Estimate(math.exp(centre), _exp(centre - reach), _exp(centre + reach), rounds)


def verdict(
    processes: Sequence[Array], candidates: int = 1, interrupted: bool = False, seed: int = 0
) -> Verdict:
    """Whether the target is faster or slower, as far as can be told.

    `candidates` arms share FALSE_VERDICTS (Bonferroni). `interrupted`: somebody who saw the
    intervals ended the run. During the k-th process they may err with probability 1 / (k (k + 1))
    of the whole, which sums to 1 however many there are.
    """
    level = FALSE_VERDICTS / max(1, candidates)
    if interrupted:
        level /= len(processes) * (len(processes) + 1)
    if sum(map(len, processes)) < LEAST_ROUNDS // 2 and len(processes) < LEAST_PROCESSES:
        return "no difference shown"
    found = estimate(processes, 1 - level, seed)
    if found.high < 1:
        return "faster"
    if found.low > 1:
        return "slower"
    return "no difference shown"


def is_look(rounds: int, each: int, processes: int) -> bool:
    """Whether widths are looked at after so many rounds, of which each process but the last takes
    `each`: after every second process, as arms are loaded in one order and then in the other; while
    the last goes on, after a fifth more every time.

    Each look is a chance to stop on a width that is small by luck; few looks are few chances.
    """
    done, rest = divmod(rounds, each)
    if done <= processes and rest == 0 and done % 2 == 0:
        return rounds > 0
    look = max(LEAST_ROUNDS, each * processes)
    while look < rounds:
        look += max(1, look // 5)
    return look == rounds


def is_precise(estimates: Sequence[Estimate], precision: float) -> bool:
    """Whether every interval reaches no further than `precision` to either side."""
    return all(found.half_width <= precision for found in estimates)


def trimmed_mean(values: Array, share: float = TRIM) -> Array:
    """Mean along the last axis without that share of them on either side, rounded down."""
    count = values.shape[-1]
    cut = int(share * count)
    kept: Array = np.sort(values, axis=-1)[..., cut : count - cut]
    return np.asarray(kept.mean(-1))


def typical(seconds: Sequence[float]) -> float:
    """Mean of a sample's decoding steps without the fastest and the slowest tenth: now and then the
    system halts one for several times its length, in whatever arm has its turn (docs/LOG.md)."""
    return float(trimmed_mean(np.array(seconds), STALLED))


def pooled(processes: Sequence[Array], seed: int = 0) -> tuple[float, float, int]:
    """Mean of the processes' means, its standard error, and that one's degrees of freedom.

    Each mean counts by the inverse of the variance that is expected of it: that between processes,
    and that of its own rounds, so that a process which something disturbed counts little. What the
    means then scatter by, P - 1 degrees of freedom, tells by how much the expected variances are
    too large or too small (Hartung and Knapp 2001).
    """
    means = np.array([trimmed_mean(logs) for logs in processes])
    long = [logs for logs in processes if len(logs) > 2]
    within = [bootstrapped(logs, seed) for logs in long]
    variances = [error**2 * len(logs) for (error, _), logs in zip(within, long, strict=True)]
    usual = float(np.median(variances)) if variances else 0.0  # of a round
    found = iter(variances)
    rounds = [(next(found) if len(logs) > 2 else usual) / len(logs) for logs in processes]
    expected = BETWEEN_PROCESSES**2 + np.array(rounds)
    means = drawn_in(means, np.sqrt(expected))
    centre = float(np.average(means, weights=1 / expected))
    prior, known = float(PRIOR_FREEDOM), sum(freedom for _, freedom in within)
    if known:  # few rounds tell little of their own variance (Satterthwaite 1946)
        own = float(np.median(rounds))
        parts = BETWEEN_PROCESSES**4 / PRIOR_FREEDOM + own**2 / known
        prior = min(prior, (BETWEEN_PROCESSES**2 + own) ** 2 / parts)
    others = len(means) - 1
    scatter = float((means - centre) ** 2 @ (1 / expected))
    factor = (prior + scatter) / (prior + others)
    return centre, math.sqrt(factor / (1 / expected).sum()), max(2, int(prior + others))


def drawn_in(means: Array, deviations: Array) -> Array:
    """The processes' means, each no further than FAR of its deviations from their median: one
    that is off by half for as long as it lives is no witness against nine (docs/LOG.md).

    Where processes scatter by more than was expected of them, by their median absolute deviation,
    that much further.
    """
    middle = np.median(means)
    off = (means - middle) / deviations
    reach = FAR * max(1.0, float(np.median(np.abs(off))) / NormalDist().inv_cdf(0.75))
    return np.asarray(middle + np.clip(off, -reach, reach) * deviations)


def bootstrapped(logs: Array, seed: int = 0) -> tuple[float, int]:
    """Standard error of a process's trimmed mean, by circular block bootstrap over its rounds, and
    its degrees of freedom.

    Blocks of L rounds leave N / L independent ones, of which trimming keeps two fifths to learn
    the error from (Tukey and McLaughlin 1963); resampled means vary too little by (m - 1) / m.
    """
    count = len(logs)
    first = autocorrelation(logs)
    block = block_length(first, count)
    pieces = -(-count // block)
    generator = np.random.default_rng(seed)
    starts = generator.integers(count, size=(RESAMPLES, pieces, 1))
    rows = ((starts + np.arange(block)) % count).reshape(RESAMPLES, -1)[:, :count]
    independent = count / block
    kept = independent * (1 - 2 * TRIM)
    low, high = np.quantile(trimmed_mean(logs[rows]), [0.16, 0.84])  # one standard deviation
    spread = float(high - low) / 2  # each, but for resamples that happen to be full of outliers
    widened = independent / max(independent - 1, 0.5) * beyond_blocks(first, block)
    # Two at least: with one, Student's t would not believe a factor of six after twenty rounds.
    return spread * math.sqrt(widened), max(2, int(kept - 1))


def autocorrelation(logs: Array) -> float:
    """How much a round resembles the one before, 0 to 0.95; of values drawn in to the trimmed
    range, so that an outlier does not hide it, and with its bias at few rounds taken out."""
    low, high = np.quantile(logs, [TRIM / 2, 1 - TRIM / 2])
    values = np.clip(logs, low, high)
    values = values - values.mean()
    energy = float(values @ values)
    if energy == 0:
        return 0.0
    first = float(values[1:] @ values[:-1]) / energy
    return min(max(first + (1 + 3 * first) / len(logs), 0.0), 0.95)


def block_length(first: float, count: int) -> int:
    """Rounds per block: the best for the mean of `count` values of an AR(1) process (Carlstein
    1986), given its first autocorrelation; at least three blocks."""
    best: float = (math.sqrt(6) * first / (1 - first**2)) ** (2 / 3) * count ** (1 / 3)
    return max(1, min(round(best), count // 3))


def beyond_blocks(first: float, block: int) -> float:
    """By how much the variance of a mean exceeds what blocks of that length can show: they cut
    the resemblance between rounds of different blocks. Of an AR(1) process."""
    shown = 1 + 2 * sum((1 - lag / block) * first**lag for lag in range(1, block))
    return (1 + first) / (1 - first) / shown


def student(probability: float, freedom: int) -> float:
    """The quantile of Student's t: by bisection on its distribution function for whole degrees of
    freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if freedom > 200:
        return NormalDist().inv_cdf(probability)
    if probability < 0.5:
        return -student(1 - probability, freedom)
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        if _student_below(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_below(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine, cosine) if freedom % 2 else (1.0, 1.0)
    for step in range(2 + freedom % 2, freedom - 1, 2):
        term *= cosine**2 * (step - 1) / step
        total += term
    if freedom % 2:
        inside = angle + (sine * total if freedom > 1 else 0)
        return 0.5 + inside / math.pi
    return 0.5 + sine * total / 2


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
