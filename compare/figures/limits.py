"""The limit that memory sets to decoding: every step reads all weights and all of the cache.

    limit = bandwidth / step_bytes(facts)       # steps per second; each makes a token in every row

With one row, a product takes two operations for each weight, which any of today's processors does
faster than its memory delivers the weight. So the bytes decide, until rows or positions are many.
"""

from collections.abc import Sequence

from compare.figures.rows import seconds
from compare.figures.statistics import Estimate, estimate, paired
from compare.sampling.answers import Reading
from compare.sampling.results import ArmResult
from run.measure import Facts


def step_bytes(run: Facts) -> float:
    """Bytes that the mean decoding step of a sample has to read.

    The weights once, whatever the batch, and every row's keys and values so far. The first of
    N - 1 steps reads positions 0 to depth + prompt, the last N - 2 more: depth + prompt + N / 2 in
    the mean. The one row of the embedding's table that a token reads is left out.
    """
    config = run.config
    positions = config.context_depth + run.prompt_tokens + config.max_new_tokens / 2
    return run.weight_bytes + run.kv_cache_bytes / run.cache_size * positions


def share(arm: ArmResult, bytes_a_step: float, readings: Sequence[Reading]) -> Estimate:
    """How much of the limit an arm's decoding reached, 0.85 for 85 %, with its interval.

    Each round's speed is divided by the limit of that round; rounds without a reading are left
    out. Above 1 where a cache held some of the weights.
    """
    taken = seconds(arm, "token_latency")
    rates = {reading.round: reading.bytes_per_s for reading in readings}
    limits = {key: [bytes_a_step / rates[key[1]]] for key in taken if key[1] in rates}
    return estimate(paired(limits, taken))


def over(arm: ArmResult, baseline: ArmResult, name: str) -> Estimate:
    """The arm's speed ÷ the baseline's, with its interval; above 1 the arm is faster. name: a
    figure of `rows.seconds`."""
    return estimate(paired(seconds(baseline, name), seconds(arm, name)))
