"""Reasons, from the measurements, for an arm's speed."""

from quantbench.answer.row import Row
from quantbench.bench.answers import ArmFacts
from quantbench.run.why import held_back

# Shares of the read bandwidth at which an arm reads its weights. Decoding reads activations and
# caches as well, so a memory-bound arm stays below 1.
MEMORY_BOUND, NOT_MEMORY_BOUND = 0.6, 0.4


def reasons(row: Row, arm: ArmFacts) -> list[str]:
    """Sentences without a full stop; none for an arm that is faster than the baseline."""
    run = arm.run
    if row.verdict == "faster" or run is None:
        return []
    speed = [_bandwidth(row.bandwidth_share), _limit(row, arm)]
    return [*held_back(run, arm.kernels or {}), *(sentence for sentence in speed if sentence)]


def _limit(row: Row, arm: ArmFacts) -> str | None:
    """How near a step is to what memory allows."""
    if arm.limit is None or not row.decode_tok_s:
        return None
    return arm.limit.sentence(1 / row.decode_tok_s)


def _bandwidth(share: float | None) -> str | None:
    if share is None or NOT_MEMORY_BOUND <= share < MEMORY_BOUND:
        return None
    if share >= MEMORY_BOUND:
        return (
            f"memory-bound: it reads its weights at {share:.0%} of the memory's bandwidth; only "
            "fewer bytes make it faster"
        )
    return (
        f"not memory-bound: it reads its weights at {share:.0%} of the memory's bandwidth, so "
        "arithmetic or the cost of each call sets its speed"
    )
