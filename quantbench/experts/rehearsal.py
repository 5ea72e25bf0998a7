"""The cost model of a run, measured when its model is loaded.

    decide_by_costs(tiers, model)                   # for the model's modules
    decide_by_costs(tiers, model, fused_step)       # … and for the fused step

Costs of the modules are measured in a loop (costs.py), and scaled by what steps of the whole model
take of what was expected. Costs of the fused step are measured in steps (fused_costs.py). Experts
that are fetched in a rehearsal do not stay: fast memory holds afterwards what it held before.
"""

import dataclasses
import statistics
import time

import torch

from quantbench.experts import fused_costs
from quantbench.experts.costs import Decider, measure
from quantbench.experts.fused_costs import Step
from quantbench.experts.guessing import Guessing
from quantbench.experts.plan import Costs
from quantbench.experts.store import POLICIES
from quantbench.experts.tiers import Tiers
from quantbench.models.llama import Transformer

STEPS = 15  # that are rehearsed
DECISIONS = 31  # whose median counts


def decide_by_costs(
    tiers: Tiers, model: Transformer, fused_step: Step | None = None, rows: int = 1
) -> None:
    """Measure what experts cost, and let the tiers decide by it. Raises TierError.

    fused_step: of a run whose steps are fused, for so many rows.
    """
    costs, policy = measure(tiers, model), tiers.policy
    ratio = ratio_of(tiers, costs, model, model, rows) if policy.fetches else 1.0
    tiers.decide = Decider(costs.times(ratio), policy, beneath=tiers.beneath is not None)
    if fused_step and tiers.fused:
        measured = fused_costs.measure(tiers, model, costs, fused_step, rows)
        tiers.fused.decide = _with_its_own_time(Decider(measured.costs, policy, fused=True), tiers)
        tiers.fused.after = measured.after
        tiers.fused.guessing = Guessing(measured.prices)


def _with_its_own_time(decider: Decider, tiers: Tiers) -> Decider:
    """With the seconds that deciding takes, where there is a choice: a layer waits for it."""
    if not (decider.policy.fetches and decider.policy.computes_there):
        return decider
    tokens = [1] * tiers.width + [0] * (tiers.experts_each - tiers.width)
    fast, seconds = range(1, tiers.experts_each), []  # all but the first
    for _ in range(DECISIONS):
        started = time.perf_counter()
        decider(tokens, fast)
        seconds.append(time.perf_counter() - started)
    ask = decider.costs.ask + statistics.median(seconds)
    return dataclasses.replace(decider, costs=dataclasses.replace(decider.costs, ask=ask))


@torch.no_grad()
def ratio_of(tiers: Tiers, costs: Costs, model: Transformer, step: Step, rows: int = 1) -> float:
    """Seconds ÷ seconds by these costs, of the experts in steps: the median of STEPS."""
    before, policy, decide = tiers.counted(), tiers.policy, tiers.decide
    landing, ratios = list(tiers.landing), []
    tiers.policy = dataclasses.replace(POLICIES["fetch"], ahead=policy.ahead)
    tiers.decide = Decider(costs, tiers.policy, beneath=tiers.beneath is not None)
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
        tiers.policy, tiers.decide = policy, decide
        tiers.counted()
        tiers.traffic = before
    return statistics.median(ratios)
