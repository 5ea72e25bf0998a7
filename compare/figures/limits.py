"""The limit that memory sets to decoding: every step reads all weights and all of the cache.

    limit = bandwidth / step_bytes(facts)       # steps a second; each makes a token in every row

A product of one row takes two operations for each weight, which any processor of today does faster
than its memory brings the weight. So bytes are what counts, until rows or positions are many.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from compare.figures.rows import seconds
from compare.figures.statistics import Estimate, estimate, paired
from compare.sampling.results import ArmResult, Reading


def step_bytes(facts: Mapping[str, Any]) -> float:
    """Bytes that the mean decoding step of a sample has to read, from an arm's facts.

    The weights once, whatever the batch, and every row's keys and values so far. The first of
    N - 1 steps reads positions 0 to depth + prompt, the last N - 2 more: depth + prompt + N / 2 in
    the mean. The one row of the embedding's table that a token reads is left out.
    """
    config = facts["config"]
    positions = config["context_depth"] + facts["prompt_tokens"] + config["max_new_tokens"] / 2
    return float(facts["weight_bytes"] + facts["kv_cache_bytes"] / facts["cache_size"] * positions)


def share(arm: ArmResult, bytes_a_step: float, readings: Sequence[Reading]) -> Estimate:
    """How much of the limit an arm's decoding reached, 0.85 for 85 %, with its interval.

    Each round's speed is divided by the limit of that round. A round without a reading is left
    out. Above 1 where a cache held some of the weights.
    """
    taken = seconds(arm, "token_latency")
    rates = {reading.round: reading.bytes_per_s for reading in readings}
    limits = {key: [bytes_a_step / rates[key[1]]] for key in taken if key[1] in rates}
    return estimate(paired(limits, taken))


def over(ours: ArmResult, theirs: ArmResult, name: str) -> Estimate:
    """Our speed ÷ theirs, with its interval, of a figure of `rows.seconds`; above 1 ours is
    faster."""
    return estimate(paired(seconds(theirs, name), seconds(ours, name)))
