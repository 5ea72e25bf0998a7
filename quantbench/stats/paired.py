"""The mean log ratio of two arms' turns, and the noise of that mean.

**Estimand.** The mean of log(seconds of the arm ÷ seconds of the baseline in the same cycle), in
the long run: over processes, and over the states that the machine is in. Nothing is trimmed and no
rank is taken: the logarithm already bounds what one late turn can do, and a trimmed mean of an arm
with late steps answers a question that nobody asked.

**Noise.** States of the machine last longer than a cycle and slow some arms more than others, so
neighbouring cycles are alike, and their scatter divided by their number is too small a variance.
Consecutive cycles are averaged into batches: pairs, A B C and C B A, so that no place in the order
counts, or longer ones, so that there are LEAST (Alexopoulos and Seila 1998). While neighbouring
batches are more alike than by chance, batches get twice as long, until there are few; what
correlation is left then, r, raises the variance by (1 + r) / (1 - r) (Andrews and Monahan 1992).
Fewer batches are fewer degrees of freedom: states as long as the session widen the interval. A
batch never spans a restart.

**Processes.** A segment is what lies between two restarts. What its processes differ by
(`processes`) does not average out in it, so segments are weighted by 1 / (2 floor² + variance /
cycles), the random effects of DerSimonian and Laird 1986: by their cycles while turns are noisy,
alike once they are not. A restart may thus come early or late.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

LEAST = 32  # batches; fewer only in sessions of fewer pairs, or where batches are alike
FEWEST = 8  # degrees of freedom of batches that were made longer as they are alike, about
MOST_CORRELATION = 0.9  # of neighbouring batches: an estimate near 1 would have no bound


@dataclass(frozen=True)
class Turns:
    """One arm's turns of one kind, decode or prompt, ascending in time; arrays (N,).

    Turns of two arms with the same cycle are paired. A cycle has at most one turn of an arm.
    """

    cycle: NDArray[np.int64]
    process: NDArray[np.int64]  # which process of the arm
    seconds: NDArray[np.float64]  # per token


@dataclass(frozen=True)
class Segment:
    """Consecutive cycles in which both arms kept their process."""

    process: int  # of the arm
    partner: int  # the baseline's process
    logs: NDArray[np.float64]  # (N,) of the arm's seconds ÷ the baseline's

    @cached_property
    def mean(self) -> float:
        return float(self.logs.mean())


@dataclass(frozen=True)
class Estimate:
    """A log ratio and what its error is made of."""

    mean: float
    error: float  # standard error from the noise of turns
    process_share: float  # variance from processes ÷ floor²: 2 for one process on either side


@dataclass(frozen=True)
class Contrast:
    """The paired turns of an arm and another, with the variance of their log ratio."""

    segments: tuple[Segment, ...]
    cycles: int
    variance: float  # long-run, of one cycle: of a segment's mean it is variance / cycles
    freedom: int  # degrees of freedom of the variance
    noise: float  # standard deviation of one cycle's log ratio

    def estimate(self, floor: float) -> Estimate:
        """The log ratio where processes differ by the standard deviation `floor`."""
        if not self.freedom:
            logs = [value for segment in self.segments for value in segment.logs]
            return Estimate(float(np.mean(logs)) if logs else 0.0, math.inf, 2.0)
        cycles = np.array([len(segment.logs) for segment in self.segments])
        weights = 1 / (2 * floor**2 + self.variance / cycles)
        weights /= weights.sum()
        shares = defaultdict[tuple[str, int], float](float)
        for segment, weight in zip(self.segments, weights, strict=True):
            shares["own", segment.process] += weight
            shares["partner", segment.partner] += weight
        return Estimate(
            mean=float(weights @ [segment.mean for segment in self.segments]),
            error=float(np.sqrt(self.variance * (weights**2 / cycles).sum())),
            process_share=float(sum(share**2 for share in shares.values())),
        )


def contrast(arm: Turns, baseline: Turns) -> Contrast:
    """Pair the turns of the cycles that both arms have.

    Raises ValueError for seconds that are not above 0, which have no logarithm.
    """
    _, of_arm, of_baseline = np.intersect1d(arm.cycle, baseline.cycle, return_indices=True)
    seconds = np.stack([arm.seconds[of_arm], baseline.seconds[of_baseline]])
    if not np.all((seconds > 0) & np.isfinite(seconds)):
        wrong = seconds[~((seconds > 0) & np.isfinite(seconds))][0]
        raise ValueError(f"a turn took {wrong} s per token; finite seconds above 0 are needed")
    logs = np.log(seconds[0]) - np.log(seconds[1])
    pairs = np.stack([arm.process[of_arm], baseline.process[of_baseline]], axis=1)
    starts = np.flatnonzero((pairs[1:] != pairs[:-1]).any(axis=1)) + 1
    segments = tuple(
        Segment(int(pairs[first, 0]), int(pairs[first, 1]), logs[first:last])
        for first, last in zip([0, *starts], [*starts, len(logs)], strict=True)
        if last > first
    )
    variance, freedom = _long_run(segments, len(logs))
    return Contrast(
        segments=segments,
        cycles=len(logs),
        variance=variance,
        freedom=freedom,
        noise=math.sqrt(_batch_variance(segments, 1)[0]),
    )


def _long_run(segments: tuple[Segment, ...], cycles: int) -> tuple[float, int]:
    """Variance of one cycle in the long run, and its degrees of freedom."""
    size = 2 ** max(1, (max(1, cycles // LEAST).bit_length() - 1))
    while True:
        variance, freedom, correlation = _batch_variance(segments, size)
        if not freedom or correlation <= 1 / math.sqrt(freedom + len(segments)):  # one in six
            return variance, freedom
        if freedom < 2 * FEWEST:
            return variance * (1 + correlation) / (1 - correlation), freedom
        size *= 2


def _batch_variance(segments: tuple[Segment, ...], size: int) -> tuple[float, int, float]:
    """From batches of `size` cycles: the variance of one cycle, its degrees of freedom, and the
    correlation of neighbouring batches, 0 to MOST_CORRELATION.

    Batches scatter around the mean of their segment, which lowers the correlation by about
    1 / batches of a segment: added back.
    """
    squares, products, batches = 0.0, 0.0, 0
    for segment in segments:
        cycles = len(segment.logs)
        starts = np.arange(max(1, cycles // size)) * size  # what is left over joins the last batch
        lengths = np.diff(starts, append=cycles)
        means = np.add.reduceat(segment.logs, starts) / lengths
        apart = np.sqrt(lengths) * (means - segment.mean)
        squares += float(apart @ apart)
        products += float(apart[1:] @ apart[:-1])
        batches += len(starts)
    freedom = batches - len(segments)
    if not freedom:
        return math.inf, 0, 0.0
    if not squares:
        return 0.0, freedom, 0.0
    correlation = products / squares + len(segments) / batches
    return squares / freedom, freedom, min(max(0.0, correlation), MOST_CORRELATION)
