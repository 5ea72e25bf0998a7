"""The limit that memory sets to decoding: every step reads all weights and all of the cache.

    limit = bandwidth / step_bytes(facts)       # steps per second; each makes a token in every row

With one row, a product takes two operations for each weight, which any of today's processors does
faster than its memory delivers the weight. So the bytes decide, until rows or positions are many.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from quantbench.bench.answers import Reading
from quantbench.compare.figures.between_days import level
from quantbench.compare.sampling.results import ArmResult, ArmSample
from quantbench.quality.block_errors import Estimate
from quantbench.run.facts import Facts


def step_bytes(run: Facts) -> float:
    """Bytes that the mean decoding step of a sample has to read.

    The weights once, whatever the batch (of experts those that are chosen), and every row's keys
    and values so far. The first of
    N - 1 steps reads positions 0 to depth + prompt, the last N - 2 more: depth + prompt + N / 2 in
    the mean. The one row of the embedding's table that a token reads is left out.
    """
    config = run.config
    positions = config.context_depth + run.prompt_tokens + config.max_new_tokens / 2
    return run.step_weight_bytes + run.kv_cache_bytes / run.cache_size * positions


def seconds(sample: ArmSample, name: str) -> float:
    """token_latency: of a decoding step, the mean; where only one token is asked for, the time to
    it. prefill_seconds: of the prompt."""
    steps = sample.token_seconds
    if name == "prefill_seconds" or not steps:
        return sample.prefill_seconds
    return statistics.fmean(steps)


def share(arm: ArmResult, bytes_a_step: float, readings: Sequence[Reading]) -> Estimate | None:
    """How much of the limit an arm's decoding reached: the mean logarithm over processes, each of
    the geometric mean over its samples; `exp` of it is 0.85 for 85 %.

    Each sample's speed is divided by the limit of its round; samples of rounds without a reading
    are left out. None without any. Above 1 where a cache held some of the weights.
    """
    rates = {reading.round: reading.bytes_per_s for reading in readings}
    shares = _by_block(
        (sample.block, bytes_a_step / rates[sample.round] / seconds(sample, "token_latency"))
        for sample in arm.samples
        if sample.round in rates
    )
    return level(list(shares.values())) if shares else None


def over(arm: ArmResult, baseline: ArmResult, name: str) -> Estimate | None:
    """The arm's speed ÷ the baseline's, block by block; above 1 the arm is faster. The mean
    logarithm over processes; None where no block has both. name: as in
    `seconds`."""
    own, other = (
        _by_block((sample.block, seconds(sample, name)) for sample in one.samples)
        for one in (arm, baseline)
    )
    ratios = [other[block] / own[block] for block in own if block in other]
    return level(ratios) if ratios else None


def _by_block(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The geometric mean of each block's values."""
    groups: dict[int, list[float]] = {}
    for block, value in values:
        groups.setdefault(block, []).append(math.log(value))
    return {block: math.exp(statistics.fmean(logs)) for block, logs in groups.items()}
