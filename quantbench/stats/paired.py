"""The mean log ratio of two arms' turns, and the noise of that mean.

**Estimand.** The mean over cycles of log(seconds of the arm ÷ seconds of the baseline in the same
cycle), in the states that the machine was in. Nothing is trimmed and no rank is taken: the logarithm
already bounds what one late turn of 100 ms can do, the same estimand holds for any distribution, and
a trimmed mean of an arm with late steps answers a question that nobody asked.

**Noise.** States of the machine last 0.5 to 30 s and slow some arms more than others, so neighbouring
cycles are alike, and their scatter divided by their number is too small a variance. Consecutive
cycles are averaged into batches, which grow with the session (Alexopoulos and Seila 1998;
Flegal and Jones 2010): at least LEAST batches, fewer than twice as many. The variance is the largest
of the estimates from batches of b, 2b and 4b cycles: equal up to chance where batches are
independent, and the longest where they are not. A batch never spans a restart: what processes differ
by is in `processes`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST = 16  # batches, where there are as many cycles
SCALES = (1, 2, 4)  # batches merged for the further estimates of the variance
LEAST_FREEDOM = 3  # of a further estimate


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

    processes: tuple[int, int]  # of the arm, of the baseline
    logs: NDArray[np.float64]  # (N,) of the arm's seconds ÷ the baseline's


@dataclass(frozen=True)
class Contrast:
    """The log ratio of an arm's seconds and another's."""

    segments: tuple[Segment, ...]
    mean: float
    cycles: int
    variance: float  # of one cycle in the long run: of the mean it is variance / cycles
    freedom: int  # of the variance
    noise: float  # standard deviation of one cycle's log ratio

    @property
    def error(self) -> float:
        """Standard error of the mean, without what processes differ by."""
        return float(np.sqrt(self.variance / self.cycles)) if self.cycles else np.inf

    def shares(self, side: int) -> dict[int, float]:
        """The share of cycles that each process of the arm (side 0) or the baseline (1) has."""
        result: dict[int, float] = {}
        for segment in self.segments:
            process = segment.processes[side]
            result[process] = result.get(process, 0.0) + len(segment.logs) / self.cycles
        return result

    @property
    def process_share(self) -> float:
        """The variance of the mean that processes cause, in units of one process's: 1 with two
        processes on either side and as many cycles of each, 2 with one."""
        return sum(share**2 for side in (0, 1) for share in self.shares(side).values())


def contrast(arm: Turns, baseline: Turns) -> Contrast:
    """Compare the turns of cycles that both arms have.

    Raises ValueError for seconds that are not above 0, which have no logarithm.
    """
    _, of_arm, of_baseline = np.intersect1d(arm.cycle, baseline.cycle, return_indices=True)
    seconds = arm.seconds[of_arm], baseline.seconds[of_baseline]
    if not all(np.all((part > 0) & np.isfinite(part)) for part in seconds):
        raise ValueError("a turn without seconds per token above 0 was given: it has no logarithm")
    logs = np.log(seconds[0]) - np.log(seconds[1])
    pairs = np.stack([arm.process[of_arm], baseline.process[of_baseline]], axis=1)
    starts = np.flatnonzero((pairs[1:] != pairs[:-1]).any(axis=1)) + 1
    segments = tuple(
        Segment((int(pairs[first, 0]), int(pairs[first, 1])), logs[first:last])
        for first, last in zip([0, *starts], [*starts, len(logs)], strict=True)
        if last > first
    )
    size = max(1, len(logs) // LEAST)
    size = 2 ** (size.bit_length() - 1)  # a power of two: batches are merged in pairs
    estimates = [_batch_variance(segments, scale * size) for scale in SCALES]
    usable = [variance for variance, freedom in estimates[1:] if freedom >= LEAST_FREEDOM]
    variance, freedom = estimates[0]
    return Contrast(
        segments=segments,
        mean=float(logs.mean()) if len(logs) else 0.0,
        cycles=len(logs),
        variance=max([variance, *usable]),
        freedom=freedom,
        noise=float(np.sqrt(_batch_variance(segments, 1)[0])),
    )


def _batch_variance(segments: tuple[Segment, ...], size: int) -> tuple[float, int]:
    """Variance of one cycle estimated from batches of `size` cycles, with its degrees of freedom.

    Batches scatter around the mean of their segment, weighted by their cycles.
    """
    squares, freedom = 0.0, 0
    for segment in segments:
        cycles = len(segment.logs)
        starts = np.arange(max(1, cycles // size)) * size  # what is left over joins the last batch
        lengths = np.diff(starts, append=cycles)
        means = np.add.reduceat(segment.logs, starts) / lengths
        squares += float(lengths @ (means - segment.logs.mean()) ** 2)
        freedom += len(starts) - 1
    return (squares / freedom, freedom) if freedom else (np.inf, 0)
