"""Process timings, the observations of the statistics, computed from a comparison's samples.

    fitted = fit(of(results))                   # seconds per token, arms ÷ baseline

A block has one process of every arm. Side by side its rounds go through all arms; in turn each
round is one arm's turn, and the baseline has several turns in a block.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from quantbench.compare.figures.contrasts import (
    Contrasts,
    ProcessTiming,
    SampleTimes,
    contrasts,
    process_timing,
    with_bandwidth,
)
from quantbench.compare.sampling.results import ArmResult, ArmSample, Results


def of(results: Results) -> Contrasts:
    """Contrasts of seconds per token; bandwidth is a covariate for arms loaded one by one."""
    timings = process_timings(results)
    return with_bandwidth(timings) if results.in_turn else contrasts(timings)


def process_timings(results: Results) -> list[ProcessTiming]:
    """Whole samples: the prompt and every step."""
    return _timings(results, _whole)


def decode_timings(results: Results) -> list[ProcessTiming]:
    """Decoding steps alone; of arms that generate a single token, nothing."""
    return _timings(results, _steps)


def _timings(
    results: Results, times: Callable[[ArmSample], SampleTimes | None]
) -> list[ProcessTiming]:
    """A timing for each process of the whole blocks; of the first block as far as it has come."""
    timings = []
    for number, arm in enumerate(results.arms):
        for (block, _), samples in _groups(results, arm).items():
            many = [time for sample in samples if (time := times(sample)) is not None]
            if not many:
                continue
            bandwidth = _bandwidth(results, arm, samples)
            process = samples[0].process
            timings.append(process_timing(number, block, many, bandwidth, process))
    return timings


def _groups(results: Results, arm: ArmResult) -> dict[tuple[int, int | None], list[ArmSample]]:
    """The samples that become one timing, by block and, for arms loaded one by one, by round."""
    groups: dict[tuple[int, int | None], list[ArmSample]] = {}
    for sample in arm.samples:
        if not results.blocks or sample.block < results.blocks:
            place = sample.round if results.in_turn else None
            groups.setdefault((sample.block, place), []).append(sample)
    return groups


def _whole(sample: ArmSample) -> SampleTimes:
    return SampleTimes(sample.prefill_seconds, sample.token_seconds, sample.started)


def _steps(sample: ArmSample) -> SampleTimes | None:
    """The first step in the place of the prompt, so that N steps are N tokens."""
    if not sample.token_seconds:
        return None
    first, *others = sample.token_seconds
    return SampleTimes(first, others, sample.started)


def _bandwidth(results: Results, arm: ArmResult, samples: Sequence[ArmSample]) -> float:
    """The median bandwidth, bytes per second, that was read just before these samples were taken;
    nan where nothing was read."""
    rounds = {sample.round for sample in samples}
    readings = results.bandwidth.get(arm.facts.device, []) if arm.facts else []
    rates = [reading.bytes_per_s for reading in readings if reading.round in rounds]
    return statistics.median(rates) if rates else math.nan
