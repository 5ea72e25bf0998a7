"""Ratios of seconds per token between arms and their baseline, with standard errors from processes.

    timings = [process_timing(arm, block, samples), ...]    # one for each process of each arm
    fitted = fit(contrasts(timings, "seconds_per_token"))
    families.intervals(fitted, level=0.02)

**Estimand.** Seconds per token over whole samples, prompt and every step included, nothing trimmed:
the total time of a process's samples ÷ their tokens. It is what a person waits for, and a mean is
the only location whose ratio is the ratio of throughputs: BenchmarkDotNet's removal of outliers has
hidden half of a heavy-tailed mean. An arm is compared with the baseline by the difference of the
logarithms of these means, process by process, averaged over processes (delta method: for a
coefficient of variation v of a process's mean this differs from the log ratio of the expectations
by v² / 2, 0.1 % for v = 5 %). The median step is shown next to it, never instead.

**Unit of replication.** Two processes of one arm differ for as long as they live (docs/LOG.md), so
rounds of one process are not independent replicates, however many: the observations are processes.
A block is what happens between two restarts. Side by side, it has one process of every arm, sampled
in rounds, and the machine's drift is common to all. In turn, it has one process of every arm and
several of the baseline (A B A, or A B C D A): the logarithm of the baseline is interpolated in time
between the two that enclose the arm, which removes drift that is linear in between.

**Model.** With W the weights by which the block's baseline processes enter each contrast,

    y = log(arm) - W log(baseline),    Cov(y) = s² C,    C = diag(g) + W diag(g_0) Wᵀ,

a randomized complete block design where there is one baseline. Generalized least squares gives the
log ratios; s² comes from the residuals of *this* run, pooled over arms, with n - J degrees of
freedom for n contrasts of J arms (P - 1 for two arms). No value of s² is assumed beforehand. An
interval needs at least LEAST_FREEDOM of them; below, only the range of the processes is reported.

**Unequal arms.** g is an arm's variance relative to the others': what processes differ by (pooled,
by moments) plus the variance of a process's mean that its own samples show, so an arm with late
steps gets a wider interval and the others do not. In complete blocks g does not move the estimates:
a quiet process counts no more than another. What remains is tested (F, UNEVEN): an arm whose
processes scatter grossly more than the pooled variance says, or a baseline that does, is judged by
its own P - 1 degrees of freedom.

Kackar and Harville 1984 on GLS with estimated weights; Cochran and Cox 1957, chapter 4, on blocks;
Kalibera and Jones 2013, "Rigorous benchmarking in reasonable time", on replicating processes.
All functions from `fit` on accept leading axes, so that simulations run the code that is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

Array = np.ndarray
Quantity = Literal["seconds_per_token", "typical_step", "bandwidth"]
BASELINE = 0  # the baseline's arm number
LEAST_FREEDOM = 3  # below, Student's t at 99 % exceeds 6: a range is more honest than an interval
UNEVEN = 0.01  # level of the test for an arm whose variance is not the pooled one


@dataclass(frozen=True)
class SampleTimes:
    """One sample: the prompt's seconds and those of each decoding step, and its start."""

    prefill_seconds: float
    token_seconds: Sequence[float]
    started: float = 0.0  # seconds on any clock that all processes of the run share


@dataclass(frozen=True)
class ProcessTiming:
    """What one process of one arm measured in one block."""

    arm: int  # BASELINE or above
    block: int
    time: float  # seconds: mean start of its samples, for interpolation between baselines
    seconds_per_token: float  # all seconds of all samples ÷ all tokens
    typical_step: float  # seconds: mean over samples of their median step
    relative_variance: float  # of seconds_per_token, from the samples' scatter; nan for one sample
    bandwidth: float = math.nan  # bytes per second, read next to this process; nan where it was not
    process: int | None = None  # number of the arm's process; None: not shared with another timing


@dataclass(frozen=True)
class Contrasts:
    """Values (P, J): arms' logarithms minus the baseline's, nan where a block lacks an arm.

    `weights` (P, J, K): by which the block's up to K baseline processes enter each value.
    `noise` (J + 1): relative variance of a process's mean within itself, baseline first; zeros
    where unknown. `arms`: the arm number of each of the J columns. `speed`: optionally (P, J), the
    same contrast of the logarithms of bandwidth readings, as a covariate.
    """

    arms: tuple[int, ...]
    values: Array
    weights: Array
    noise: Array
    speed: Array | None = None


@dataclass(frozen=True)
class Fit:
    """Estimates of J arms' log ratios; every array may have leading axes of trials."""

    arms: tuple[int, ...]
    log_ratios: Array  # (J)
    covariance: Array  # (J, J), pooled
    standard_errors: Array  # (J), the arm's own where it is uneven
    freedom: Array  # (J) degrees of freedom of each standard error
    scatter: Array  # () standard deviation of the logarithm of one process's mean, pooled
    uneven: Array  # (J) bool: judged by its own processes
    blocks: Array  # (J) how many blocks each arm has been in
    lowest: Array  # (J) of the arm's log ratios by block
    highest: Array  # (J)
    slope: float | None = None  # of the covariate, if the fit uses it


def process_timing(
    arm: int,
    block: int,
    samples: Sequence[SampleTimes],
    bandwidth: float = math.nan,
    process: int | None = None,
) -> ProcessTiming:
    """Summary of a process's samples. Raises ValueError without samples or with negative times.

    bandwidth: bytes per second, where it was read beside this process. The first token of a sample
    comes from the prompt, so a sample has one token more than steps.
    """
    if not samples:
        raise ValueError(f"arm {arm}, block {block}: no samples, at least one is needed")
    seconds = np.array([sample.prefill_seconds + sum(sample.token_seconds) for sample in samples])
    tokens = np.array([len(sample.token_seconds) + 1 for sample in samples])
    if not (seconds > 0).all():
        raise ValueError(f"arm {arm}, block {block}: a sample of {seconds.min()} s, above 0 needed")
    steps = [np.asarray(sample.token_seconds) for sample in samples if len(sample.token_seconds)]
    medians = [float(np.median(sample)) for sample in steps]
    typical = np.mean(medians) if steps else (seconds / tokens).mean()
    mean = float(seconds.sum() / tokens.sum())
    count = len(samples)
    residuals = seconds - mean * tokens
    variance = float(residuals @ residuals) * count / (count - 1) if count > 1 else math.nan
    return ProcessTiming(
        arm=arm,
        block=block,
        time=float(np.mean([sample.started for sample in samples])),
        seconds_per_token=mean,
        typical_step=float(typical),
        relative_variance=variance / float(seconds.sum()) ** 2,
        bandwidth=bandwidth,
        process=process,
    )


def contrasts(
    timings: Sequence[ProcessTiming], quantity: Quantity = "seconds_per_token"
) -> Contrasts:
    """Contrasts with the baseline, block by block, for arms side by side and in turn alike.

    A block without a baseline process is left out. Two processes of an arm in a block are averaged.
    A baseline that stays loaded while others take turns is one process: what it differs by from
    others of its kind is common to the whole block, so its weights are added up.
    """
    arms = tuple(sorted({timing.arm for timing in timings} - {BASELINE}))
    blocks = sorted({timing.block for timing in timings if timing.arm == BASELINE})
    baselines = {block: _of(timings, block, BASELINE) for block in blocks}
    most = max(map(len, baselines.values()), default=1)
    values = np.full((len(blocks), len(arms)), np.nan)
    weights = np.zeros((len(blocks), len(arms), most))
    for row, block in enumerate(blocks):
        base = baselines[block]
        levels = np.array([_level(timing, quantity) for timing in base])
        for column, arm in enumerate(arms):
            own = _of(timings, block, arm)
            if not own:
                continue
            time = float(np.mean([timing.time for timing in own]))
            weights[row, column, : len(base)] = interpolation(
                [timing.time for timing in base], time
            )
            level = np.mean([_level(timing, quantity) for timing in own])
            values[row, column] = level - weights[row, column, : len(base)] @ levels
        weights[row] = weights[row] @ _same_process(base, most)
    noise = np.array([_noise(timings, arm) for arm in (BASELINE, *arms)])
    known = quantity == "seconds_per_token" and bool(np.isfinite(noise).all())
    return Contrasts(arms, values, weights, noise if known else np.zeros(len(arms) + 1))


def _same_process(base: Sequence[ProcessTiming], size: int) -> Array:
    """The matrix (size, size) that adds the weights of timings of one process to its first's."""
    names = [n if timing.process is None else ("process", timing.process)
             for n, timing in enumerate(base)]  # fmt: skip
    matrix = np.eye(size)
    for place, name in enumerate(names):
        matrix[place] = np.eye(size)[names.index(name)]
    return matrix


def with_bandwidth(timings: Sequence[ProcessTiming]) -> Contrasts:
    """Contrasts of seconds per token with the bandwidth readings as covariate, where there are any:
    for arms in turn. `fit` keeps it only if it explains scatter."""
    plain = contrasts(timings)
    if all(math.isnan(timing.bandwidth) for timing in timings):
        return plain
    return replace(plain, speed=contrasts(timings, "bandwidth").values)


def interpolation(times: Sequence[float], time: float) -> Array:
    """Weights, summing to 1, of values at `times` (ascending) that interpolate linearly to `time`;
    beyond either end the nearest counts alone."""
    weights = np.zeros(len(times))
    after = int(np.searchsorted(times, time))
    if after == 0 or after == len(times):
        weights[min(after, len(times) - 1)] = 1.0
        return weights
    share = (time - times[after - 1]) / (times[after] - times[after - 1])
    weights[after - 1], weights[after] = 1 - share, share
    return weights


def fit(contrasts: Contrasts) -> Fit:
    """Generalized least squares as in the module's docstring.

    With one contrast an arm there are no degrees of freedom: standard errors are infinite.
    A covariate is kept where its slope differs from 0 at the level UNEVEN; otherwise it costs a
    degree of freedom and helps nobody.
    """
    if contrasts.speed is not None:
        return _fit_with_covariate(contrasts)
    values, weights = contrasts.values, contrasts.weights
    arms = values.shape[-1]
    level = np.ones((*contrasts.noise.shape[:-1], arms + 1))
    scale = _gls(values, _structure(weights, level))[2]
    known = np.where(np.isfinite(scale), scale, 0.0)
    between = np.maximum(known - contrasts.noise.mean(-1), 0)
    level = between[..., None] + contrasts.noise
    mean = level.mean(-1, keepdims=True)
    level = np.where(mean > 0, level / np.where(mean > 0, mean, 1), 1.0)
    structure = _structure(weights, level)
    return _checked(contrasts.arms, values, structure, *_gls(values, structure))


def _structure(weights: Array, level: Array) -> Array:
    """C of each block, (..., P, J, J), from relative variances (..., J + 1), baseline first."""
    arms = weights.shape[-2]
    own = level[..., None, 1:, None] * np.eye(arms)
    base = level[..., None, :1, None]
    result: Array = own + base * (weights @ np.swapaxes(weights, -1, -2))
    return result


def _gls(values: Array, structure: Array) -> tuple[Array, Array, Array, Array]:
    """Estimates (..., J), their covariance ÷ scale, the scale s², and its degrees of freedom."""
    precision = _precision(values, structure)
    filled = np.nan_to_num(values)[..., None]
    inverse = np.linalg.pinv(precision.sum(-3), hermitian=True)
    estimates = (inverse @ (precision @ filled).sum(-3))[..., 0]
    present = np.isfinite(values)
    residuals = np.where(present, values - estimates[..., None, :], 0.0)[..., None]
    total = (np.swapaxes(residuals, -1, -2) @ precision @ residuals).sum((-3, -2, -1))
    freedom = present.sum((-1, -2)) - present.any(-2).sum(-1)
    scale = np.where(freedom > 0, total / np.maximum(freedom, 1), np.inf)
    return estimates, inverse, scale, freedom


def _precision(values: Array, structure: Array) -> Array:
    """Inverse of each block's C, over the arms that the block has; zeros elsewhere."""
    present = np.isfinite(values).astype(float)
    both = present[..., :, None] * present[..., None, :]
    arms = values.shape[-1]
    masked = structure * both + np.eye(arms) * (1 - present)[..., None]
    result: Array = np.linalg.inv(masked) * both
    return result


def _checked(
    arms: tuple[int, ...],
    values: Array,
    structure: Array,
    estimates: Array,
    inverse: Array,
    scale: Array,
    freedom: Array,
) -> Fit:
    """The fit, with uneven arms by their own standard errors."""
    present = np.isfinite(values)
    blocks = present.sum(-2)
    finite = np.where(np.isfinite(scale), scale, 0.0)
    covariance = inverse * finite[..., None, None]
    pooled = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
    pooled = np.where((freedom > 0)[..., None], pooled, np.inf)
    residuals = np.where(present, values - estimates[..., None, :], 0.0)
    own = (residuals**2).sum(-2) / np.maximum(blocks - 1, 1)
    diagonal = np.diagonal(structure, axis1=-2, axis2=-1)
    expected = np.where(present, diagonal, 0).sum(-2) / np.maximum(blocks, 1) * finite[..., None]
    others = freedom[..., None] - (blocks - 1)
    uneven = (blocks > 1) & (_exceeds(own, expected, blocks - 1, others))
    uneven |= _baseline_is_uneven(residuals, present, structure, finite, freedom)[..., None]
    uneven &= blocks - 1 < freedom[..., None]  # a single arm is its own pool
    errors = np.where(uneven, np.sqrt(own / np.maximum(blocks, 1)), pooled)
    return Fit(
        arms=arms,
        log_ratios=np.where(blocks > 0, estimates, np.nan),
        covariance=covariance,
        standard_errors=np.where(blocks > 0, errors, np.inf),
        freedom=np.where(uneven, blocks - 1, freedom[..., None]),
        scatter=np.sqrt(np.where(freedom > 0, finite, np.nan)),
        uneven=uneven,
        blocks=blocks,
        lowest=np.where(present, values, np.inf).min(-2, initial=np.inf),
        highest=np.where(present, values, -np.inf).max(-2, initial=-np.inf),
    )


def _baseline_is_uneven(
    residuals: Array, present: Array, structure: Array, scale: Array, freedom: Array
) -> Array:
    """Whether the blocks' mean residuals, which hold the baseline's own error whole, scatter by
    grossly more than the pooled variance gives them."""
    count = np.maximum(present.sum(-1), 1)
    means = residuals.sum(-1) / count
    both = present[..., :, None] & present[..., None, :]
    expected = np.where(both, structure, 0).sum((-1, -2)) / count**2
    blocks = np.maximum(present.any(-1).sum(-1), 1)
    observed = (means**2).sum(-1) / np.maximum(blocks - 1, 1)
    expected = expected.sum(-1) / blocks * scale
    exceeds = _exceeds(observed, expected, blocks - 1, freedom - (blocks - 1))
    return np.asarray((blocks > 1) & exceeds)


def _exceeds(observed: Array, expected: Array, freedom: Array, others: Array) -> Array:
    """F test of a variance against the pooled one without it, at the level UNEVEN."""
    valid = (freedom > 0) & (others > 0) & (expected > 0)
    first, second = np.where(valid, freedom, 1), np.where(valid, others, 1)
    share = np.where(valid, observed / np.where(expected > 0, expected, 1), 0.0)
    pool = (first + second - share * first) / second  # the pooled variance includes the tested one
    statistic = np.where(pool > 0, share / np.where(pool > 0, pool, 1), np.inf)
    return np.asarray(valid & (statistic > special.fdtri(first, second, 1 - UNEVEN)))


def _fit_with_covariate(contrasts: Contrasts) -> Fit:
    """Values minus slope × covariate, the slope by least squares within arms; without leading axes.

    The correction is not refitted in `fit`: with the covariate centred in each arm it moves no
    estimate but through the mean of its readings.
    """
    plain = replace(contrasts, speed=None)
    assert contrasts.speed is not None
    present = np.isfinite(contrasts.values) & np.isfinite(contrasts.speed)
    speed = np.where(present, contrasts.speed, np.nan)
    values = np.where(present, contrasts.values, np.nan)
    if present.sum() - present.any(0).sum() - 1 < LEAST_FREEDOM:
        return fit(plain)
    centred_x = np.nan_to_num(speed - np.nanmean(speed, 0))
    centred_y = np.nan_to_num(values - np.nanmean(values, 0))
    energy = float((centred_x**2).sum())
    freedom = int(present.sum() - present.any(0).sum() - 1)
    if energy == 0:
        return fit(plain)
    slope = float((centred_x * centred_y).sum()) / energy
    rest = float(((centred_y - slope * centred_x) ** 2).sum()) / freedom
    if abs(slope) <= special.stdtrit(freedom, 1 - UNEVEN / 2) * math.sqrt(rest / energy):
        return fit(plain)
    corrected = fit(replace(plain, values=values - slope * speed))
    means = np.nanmean(speed, 0)
    added = np.outer(means, means) * rest / energy  # the slope's own error
    wider = np.sqrt(corrected.standard_errors**2 + np.diagonal(added))
    return replace(
        corrected,
        covariance=corrected.covariance + added,
        standard_errors=wider,
        freedom=np.maximum(corrected.freedom - 1, 1),
        slope=slope,
    )


def _of(timings: Sequence[ProcessTiming], block: int, arm: int) -> list[ProcessTiming]:
    own = [timing for timing in timings if timing.block == block and timing.arm == arm]
    return sorted(own, key=lambda timing: timing.time)


def _level(timing: ProcessTiming, quantity: Quantity) -> float:
    return math.log(float(getattr(timing, quantity)))


def _noise(timings: Sequence[ProcessTiming], arm: int) -> float:
    """Mean over the arm's processes; nan where none has two samples."""
    known = [t.relative_variance for t in timings if t.arm == arm]
    known = [variance for variance in known if math.isfinite(variance)]
    return float(np.mean(known)) if known else math.nan
