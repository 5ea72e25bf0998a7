"""The cost model of a run, scaled by steps that are rehearsed: experts/costs.py measures experts in
a loop of their own, and a step of the whole model has more to do.

    decide_by_costs(tiers, model)                   # for the model's modules
    decide_by_costs(tiers, model, fused_step)       # … and for the fused step

Experts that are fetched in a rehearsal do not stay: fast memory holds afterwards what it held
before.
"""

import dataclasses
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from experts.costs import Decider, measure
from experts.fused import Fused
from experts.plan import Costs
from experts.store import POLICIES
from experts.tiers import Tiers
from models.llama import Transformer

STEPS = 15  # that are rehearsed

Step = Callable[[Tensor, Tensor], Tensor]  # tokens (B, 1), position (1,) -> logits


def decide_by_costs(
    tiers: Tiers, model: Transformer, fused_step: Step | None = None, rows: int = 1
) -> None:
    """Measure what experts cost, and let the tiers decide by it. Raises TierError.

    fused_step: of a run whose steps are fused, for so many rows.
    """
    costs, policy = measure(tiers, model), tiers.policy
    deciding: list[tuple[Tiers | Fused, Step]] = [(tiers, model)]
    if fused_step and tiers.fused:
        deciding.append((tiers.fused, fused_step))
    for who, step in deciding:
        ratio = ratio_of(tiers, costs, model, who, step, rows) if policy.fetches else 1.0
        who.decide = Decider(costs.times(ratio), policy)


@torch.no_grad()
def ratio_of(
    tiers: Tiers,
    costs: Costs,
    model: Transformer,
    who: Tiers | Fused,
    step: Step,
    rows: int = 1,
) -> float:
    """Seconds ÷ seconds by these costs, of the experts in steps: the median of STEPS.

    who: decides in these steps.
    """
    before, policy, decide = tiers.counted(), tiers.policy, who.decide
    landing, ratios = list(tiers.landing), []
    tiers.policy = dataclasses.replace(POLICIES["fetch"], ahead=policy.ahead)
    who.decide = Decider(costs, tiers.policy)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (STEPS, rows, 1), generator=random)
    first = torch.zeros(1, dtype=torch.int64, device=tiers.device)
    try:
        for token in tokens.to(tiers.device):
            started = tiers.counted()
            step(token, first)
            spent = tiers.counted().since(started)
            ratios.append(spent.expert_seconds / spent.expected_seconds)
    finally:
        tiers.finish_copies()
        tiers.landing = landing
        tiers.policy, who.decide = policy, decide
        tiers.counted()
        tiers.traffic = before
    return statistics.median(ratios)
