"""Why an arm is as slow as it is, as far as the measurements can tell."""

from compare.figures.row import Row
from compare.sampling.answers import ArmFacts
from run.measure import Facts

# Shares of the read bandwidth at which an arm reads its weights. Decoding reads activations and
# caches as well, so a memory-bound arm stays below 1.
MEMORY_BOUND, NOT_MEMORY_BOUND = 0.6, 0.4


def reasons(row: Row, arm: ArmFacts) -> list[str]:
    """Sentences without a full stop; none for an arm that is faster than the baseline."""
    run = arm.run
    if row.verdict == "faster" or run is None:
        return []
    sentences = [_kernel(run, arm.kernels or {}), _decoder(run), _attention(run)]
    if not run.config.compile:
        sentences.append("nothing is compiled: each step pays for Python (--compile)")
    sentences.append(_bandwidth(row.bandwidth_share))
    return [sentence for sentence in sentences if sentence]


def _kernel(run: Facts, kernels: dict[str, str | None]) -> str | None:
    """kernels: why each of the scheme's cannot run here; None where it can."""
    if "reference" in run.kernel:
        why = "; ".join(
            f"{name}: {reason}"
            for name, reason in kernels.items()
            if reason and name != "reference"
        )
        return "plain torch (kernel reference) unpacks the weights at every step" + (
            f", for there is no other kernel here ({why})" if why else ""
        )
    if "," in run.kernel:
        return f"not every layer's shape fits its fastest kernel: {run.kernel}"
    return None


def _decoder(run: Facts) -> str | None:
    if not run.decoder_reason:
        return None
    return f"a step is not one op (decoder {run.decoder}): {run.decoder_reason}"


def _attention(run: Facts) -> str | None:
    reason = run.attention_reason
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
