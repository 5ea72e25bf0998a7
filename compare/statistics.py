"""How sure one may be of a ratio of two speeds, from rounds in which each arm was timed once.

    logs = paired(target, baseline)         # one log ratio a round
    estimate(logs)                          # ratio 0.81, 95 % interval 0.80 to 0.82
    verdict(logs, candidates=1)             # "faster"

A machine drifts, so only samples of one round are compared: what slows both arms cancels in their
ratio, and the order within a round is drawn anew each time, so that what drifts during a round
favours nobody. What is left may hold outliers (a trimmed mean ignores up to a fifth on either
side) and may depend on the round before (whole blocks of rounds are resampled).

The run stops when intervals are narrow, never when they exclude 1: for symmetric errors a width
tells nothing about which side of 1 a mean fell on, so that stopping by it leaves the share of false
verdicts where it was (Chow and Robbins 1965). Widths are looked at on a schedule that thins out.
An interrupted run was stopped by somebody who saw the intervals; its verdict is held to a level
that allows for every look there was. tests/compare/test_statistics.py tries all that on data whose
truth is known.
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
BETWEEN_PROCESSES = 0.02  # two processes of the same arm can differ by it; see docs/LOG.md
LEAST_DIFFERENCE = 0.01  # what may remain of that between arms of several processes each
LEAST_ROUNDS = 10
TRIM = 0.2
RESAMPLES = 1000


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
        return math.sqrt(self.high / self.low) - 1


def paired(target: Mapping[int, Sequence[float]], baseline: Mapping[int, Sequence[float]]) -> Array:
    """Log of target ÷ baseline, (N,), one number for every round that both have a sample of.

    An arm with several samples in a round counts with their median.
    """
    rounds = sorted(target.keys() & baseline.keys())
    medians = [(np.median(target[r]), np.median(baseline[r])) for r in rounds]
    return np.array([math.log(mine / theirs) for mine, theirs in medians])


def estimate(logs: Array, confidence: float = CONFIDENCE, seed: int = 0) -> Estimate:
    """The ratio and its interval; infinitely wide for fewer than three rounds."""
    rounds = len(logs)
    if rounds == 0:
        return Estimate(math.nan, 0.0, math.inf, 0)
    centre = float(trimmed_mean(logs))
    if rounds < 3:
        return Estimate(math.exp(centre), 0.0, math.inf, rounds)
    error, freedom = standard_error(logs, seed)
    reach = student(1 - (1 - confidence) / 2, freedom) * error
    return Estimate(math.exp(centre), _exp(centre - reach), _exp(centre + reach), rounds)


def verdict(
    logs: Array,
    candidates: int = 1,
    looks: int | None = None,
    least: float = LEAST_DIFFERENCE,
    seed: int = 0,
) -> Verdict:
    """Whether the target is faster or slower by more than `least`, as far as can be told.

    `candidates` arms share FALSE_VERDICTS (Bonferroni). `looks`: None if the run ended by its own
    rules; otherwise how often the intervals were shown before somebody ended it. Look k may err
    with probability 1 / (k (k + 1)) of the whole, which sums to 1 however many there are.
    """
    level = FALSE_VERDICTS / max(1, candidates)
    if looks is not None:
        level /= max(1, looks) * (max(1, looks) + 1)
    if len(logs) < LEAST_ROUNDS // 2:
        return "no difference shown"
    found = estimate(logs, 1 - level, seed)
    if found.high < 1 / (1 + least):
        return "faster"
    if found.low > 1 + least:
        return "slower"
    return "no difference shown"


def least_difference(processes: int) -> float:
    """What a ratio has to exceed 1 by, as far as chance gave each arm its processes' speeds."""
    return max(LEAST_DIFFERENCE, BETWEEN_PROCESSES / max(1, processes))


def is_look(rounds: int) -> bool:
    """Whether widths are looked at after so many rounds: 10, 12, 14, 16, 19, 22, … (a fifth more).

    Each look is a chance to stop on a width that is small by luck; few looks are few chances.
    """
    look = LEAST_ROUNDS
    while look < rounds:
        look += max(1, look // 5)
    return look == rounds


def looks_until(rounds: int) -> int:
    """How many looks there have been."""
    return sum(map(is_look, range(LEAST_ROUNDS, rounds + 1)))


def is_precise(estimates: Sequence[Estimate], precision: float) -> bool:
    """Whether every interval reaches no further than `precision` to either side."""
    return all(found.half_width <= precision for found in estimates)


def trimmed_mean(values: Array) -> Array:
    """Mean along the last axis without the fifth on either side."""
    count = values.shape[-1]
    cut = int(TRIM * count)
    kept: Array = np.sort(values, axis=-1)[..., cut : count - cut]
    return np.asarray(kept.mean(-1))


def standard_error(logs: Array, seed: int = 0) -> tuple[float, int]:
    """Of the trimmed mean, by circular block bootstrap, and its degrees of freedom.

    Blocks of L rounds leave N / L independent ones, of which trimming keeps three fifths to learn
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
    spread = float(trimmed_mean(logs[rows]).std(ddof=1))
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
