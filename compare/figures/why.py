"""Why an arm is as slow as it is, as far as the measurements can tell."""

from collections.abc import Mapping
from typing import Any

# Shares of the read bandwidth at which an arm reads its weights. Decoding reads activations and
# caches as well, so a memory-bound arm stays below 1.
MEMORY_BOUND, NOT_MEMORY_BOUND = 0.6, 0.4


def reasons(row: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Sentences without a full stop; none for an arm that is faster than the baseline.

    row: the arm's figures (compare.figures.rows). facts: what its worker told when it was ready.
    """
    if row["verdict"] == "faster":
        return []
    sentences = [_kernel(row, facts), _decoder(facts), _attention(facts)]
    if not facts["config"]["compile"]:
        sentences.append("nothing is compiled: each step pays for Python (--compile)")
    sentences.append(_bandwidth(row.get("bandwidth_share")))
    return [sentence for sentence in sentences if sentence]


def _kernel(row: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    if "reference" in row["kernel"]:
        others = {name: why for name, why in facts["kernels"].items() if name != "reference"}
        why = "; ".join(f"{name}: {reason}" for name, reason in others.items() if reason)
        return "plain torch (kernel reference) unpacks the weights at every step" + (
            f", for there is no other kernel here ({why})" if why else ""
        )
    if "," in row["kernel"]:
        return f"not every layer's shape fits its fastest kernel: {row['kernel']}"
    return None


def _decoder(facts: Mapping[str, Any]) -> str | None:
    """Facts of earlier versions name no decoder."""
    reason = facts.get("decoder_reason")
    if not reason:
        return None
    return f"a step is not one op (decoder {facts['decoder']}): {reason}"


def _attention(facts: Mapping[str, Any]) -> str | None:
    reason = facts["attention_reason"]
    return f"attention runs on plain torch: {reason}" if reason else None


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
