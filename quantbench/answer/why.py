"""Reasons, from the measurements, for an arm's speed."""

from quantbench.answer.row import Row
from quantbench.bench.answers import ArmFacts
from quantbench.run.why import held_back

# Shares of the read bandwidth at which an arm reads its weights. Decoding reads activations and
# caches as well, so a memory-bound arm stays below 1.
MEMORY_BOUND, NOT_MEMORY_BOUND = 0.6, 0.4


def reasons(row: Row, arm: ArmFacts) -> list[str]:
    """Sentences without a full stop; none for an arm that is faster than the baseline."""
    run, share = arm.run, row.bandwidth_share
    if row.verdict == "faster" or run is None:
        return []
    sentences = held_back(run, arm.kernels or {})
    if share is not None and share >= MEMORY_BOUND:
        sentences.append(
            f"memory-bound: it reads its weights at {share:.0%} of the memory's bandwidth; only "
            "fewer bytes make it faster"
        )
    elif share is not None and share < NOT_MEMORY_BOUND:
        sentences.append(
            f"not memory-bound: it reads its weights at {share:.0%} of the memory's bandwidth, so "
            "arithmetic or the cost of each call sets its speed"
        )
    if arm.limit and row.decode_tok_s:
        sentences.append(arm.limit.sentence(1 / row.decode_tok_s))
    return sentences
