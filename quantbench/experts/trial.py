"""The policy `auto`: the faster of `cache` and `compute_there`, by seconds of a few steps of each.

    tiers.policy = faster(tiers, decoder.step, prompt, rows)

Results do not depend on the policy, only time does. Steps of both policies alternate, over the
tokens of the run's own prompt, so that both meet the same routing and the same machine. Before a
step that computes in place, the system drops the experts' pages from its page cache: the policy is
chosen for a machine whose memory is used up, where --expert_memory is all that experts have.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantbench.experts.tiers import POLICIES, Policy, Tiers

CANDIDATES = (POLICIES["cache"], POLICIES["compute_there"])
STEPS = 12  # of each policy, whose median counts; before them one of each that does not count
POSITIONS = len(CANDIDATES) * (1 + STEPS)  # of all steps


@torch.no_grad()
def faster(
    tiers: Tiers, step: Callable[[Tensor, Tensor], object], prompt: Sequence[int], rows: int
) -> Policy:
    """The policy whose steps take less time.

    step: takes tokens (rows, 1) and a position (1,), on the tiers' device. prompt: token numbers,
    which are taken again and again. Raises TierError.
    """
    tokens = torch.tensor(prompt).repeat(-(-POSITIONS * rows // len(prompt)))
    tokens = tokens[: POSITIONS * rows].view(POSITIONS, rows, 1).to(tiers.device)
    before, policy = tiers.counted(), tiers.policy
    seconds: dict[Policy, list[float]] = {candidate: [] for candidate in CANDIDATES}
    try:
        for position, token in enumerate(tokens):
            tiers.policy = CANDIDATES[position % len(CANDIDATES)]
            if not tiers.policy.fetches:
                tiers.slow.drop()
            started = time.perf_counter()
            step(token, torch.tensor([position], device=tiers.device))
            if tiers.device.type == "cuda":
                torch.cuda.synchronize(tiers.device)
            seconds[tiers.policy].append(time.perf_counter() - started)
    finally:
        tiers.slow.drop()  # what the last steps read would count as free memory
        tiers.policy = policy
        tiers.counted()
        tiers.traffic = before
    return min(CANDIDATES, key=lambda candidate: statistics.median(seconds[candidate][1:]))
