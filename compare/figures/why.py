"""Why an arm is as slow as it is, as far as what was measured can tell."""

from typing import Any

MEMORY_BOUND = 0.6  # of the read bandwidth: activations and caches are read besides the weights
FAR_FROM_IT = 0.4


def reasons(row: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Sentences without a full stop; none for an arm that is faster."""
    if row["verdict"] == "faster":
        return []
    found = []
    if "reference" in row["kernel"]:
        others = {name: why for name, why in facts["kernels"].items() if name != "reference"}
        why = "; ".join(f"{name}: {reason}" for name, reason in others.items() if reason)
        found.append(
            "plain torch (kernel reference) unpacks the weights at every step"
            + (f", for there is no other kernel here ({why})" if why else "")
        )
    elif "," in row["kernel"]:
        found.append(f"not every layer's shape fits its fastest kernel: {row['kernel']}")
    if facts["attention_reason"]:
        found.append(f"attention runs on plain torch: {facts['attention_reason']}")
    if not facts["config"]["compile"]:
        found.append("nothing is compiled: each step pays for Python (--compile)")
    share = row.get("bandwidth_share")
    if share is None:
        return found
    if share >= MEMORY_BOUND:
        found.append(
            f"memory-bound: it reads its weights at {share:.0%} of the memory's bandwidth; only "
            "fewer bytes make it faster"
        )
    elif share < FAR_FROM_IT:
        found.append(
            f"not memory-bound: it reads its weights at {share:.0%} of the memory's bandwidth, so "
            "arithmetic or the cost of each call sets its speed"
        )
    return found
