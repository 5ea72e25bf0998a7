"""What an expert costs here, measured with the very products and copies that a run makes.

    costs = measure(tiers, model)
    tiers.decide = decider(costs, tiers.policy, "auto")

A made-up layer is called as the model's layers are: with experts that lie in fast memory, with
others that have to be fetched, and with others that are computed where they lie, for a few and for
more tokens. Before each call so many bytes are read as a decoding step reads: what a step leaves of
an expert in the processor's caches, the next one finds there. A line through the seconds gives
a + b · n. Then some steps of the whole model are rehearsed, and all seconds are multiplied by what
those took of what was expected: between two layers a model leaves no code and no activations in the
caches either, and copies take the processor's time.
"""

import dataclasses
import statistics
import time
from collections.abc import Collection, Iterable, Sequence

import torch

from experts.copies import Slot, buffers
from experts.layer import TieredLayer
from experts.plan import Costs, Line, Overlap, Where, plan_layer
from experts.store import POLICIES, Decide, Policy
from experts.tiers import Tiers
from models.llama import Transformer
from quantize.autoquant.race import last_level_cache

TOKENS = (1, 4, 16)  # of each expert
REPEATS = 9  # of which the median counts
MOST_READ = 1 << 27  # bytes, before each of them
STEPS = 15  # that are rehearsed


def measure(tiers: Tiers, model: Transformer) -> Costs:
    """The costs of an expert of this model. Takes tenths of a second; raises TierError."""
    before, policy, decide = tiers.counted(), tiers.policy, tiers.decide
    made_up = _MadeUp(tiers, model)
    tiers.decide = None
    try:
        fast = {n: made_up.resident(n) for n in TOKENS}
        slow = {n: made_up.in_place(n) for n in TOKENS} if policy.computes_there else fast
        turn = made_up.fetched(policy.ahead) if policy.fetches else 0.0
    finally:
        tiers.policy, tiers.decide = policy, decide
        tiers.counted()
        tiers.traffic = before
    fetch = _fetch(turn, fast[1], tiers.width, policy.ahead)
    costs = Costs(fast=_line(fast), slow=_line(slow), fetch=fetch)
    return costs.times(_rehearsed(costs, tiers, model)) if policy.fetches else costs


def _fetch(turn: float, fast: float, width: int, ahead: bool) -> float:
    """Seconds of a copy, from those of a turn in which `width` experts with a token are fetched.

    fast: seconds to compute one of them. ahead: whether copies run beside the computing. Then the
    slower of the two goes on without a pause, and the other happens once besides.
    """
    if not ahead:
        return max(0.0, turn / width - fast)
    copying = (turn - fast) / width
    return copying if copying >= fast else max(0.0, turn - width * fast)


@torch.no_grad()
def _rehearsed(costs: Costs, tiers: Tiers, model: Transformer) -> float:
    """Seconds ÷ expected seconds of the experts in steps of the model: the median of STEPS.

    Experts that are fetched do not stay, so that fast memory holds afterwards what it held before.
    """
    before, policy, decide = tiers.counted(), tiers.policy, tiers.decide
    landing, ratios = list(tiers.landing), []
    tiers.policy = dataclasses.replace(POLICIES["fetch"], ahead=policy.ahead)
    tiers.decide = decider(costs, tiers.policy, "fetch")
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (STEPS, 1, 1), generator=random)
    first = torch.zeros(1, dtype=torch.int64, device=tiers.device)
    try:
        for token in tokens.to(tiers.device):
            started = tiers.counted()
            model(token, first)
            spent = tiers.counted().since(started)
            ratios.append(spent.expert_seconds / spent.expected_seconds)
    finally:
        tiers.finish_copies()
        tiers.landing = landing
        tiers.policy, tiers.decide = policy, decide
        tiers.counted()
        tiers.traffic = before
    return statistics.median(ratios)


class _MadeUp:
    """A layer of experts that no other layer knows of."""

    def __init__(self, tiers: Tiers, model: Transformer) -> None:
        self.tiers, self.width = tiers, tiers.width
        weight = model.tok_embeddings.weight
        self.x = torch.randn(max(TOKENS), model.config.dim, device=tiers.device).to(weight.dtype)
        # Twice the last cache replaces all that is in it.
        most = min(2 * last_level_cache(tiers.device), MOST_READ)
        count = min(model.step_bytes(1), most) if tiers.device.type == "cpu" else most
        self.others = torch.zeros(max(1, count // 4), device=tiers.device)
        self.turns = 0
        norm = torch.ones(model.config.dim, device=tiers.device)
        self.layer = TieredLayer(tiers, 0, norm, None)
        room = buffers(2 * self.width, tiers.layout.nbytes, tiers.device)
        self.slots = [Slot(each, tiers.layout.expert(tiers.skeleton, each)) for each in room]

    def resident(self, tokens: int) -> float:
        """Seconds of an expert in fast memory with so many tokens."""
        self.tiers.policy = POLICIES["fetch"]
        keys = self._keys()
        for (_, expert), slot in zip(keys, self.slots, strict=False):
            self.tiers.copies.now(slot, (keys[0][0], expert))
            self.layer.own[expert] = slot
        seconds = [self._turn([expert for _, expert in keys], tokens) for _ in range(REPEATS)]
        self.layer.own.clear()
        return statistics.median(seconds)

    def fetched(self, ahead: bool) -> float:
        """Seconds of a turn whose experts have one token each and have to be fetched."""
        self.tiers.policy = Policy(False, False, True, ahead)
        held, self.tiers.landing = self.tiers.landing, self.slots[: self.width]
        seconds = [self._turn([e for _, e in self._keys()], 1) for _ in range(REPEATS)]
        self.tiers.landing = held
        return statistics.median(seconds) * self.width

    def in_place(self, tokens: int) -> float:
        """Seconds of an expert that is computed where it lies, no page of it in a cache: as it is
        where memory is short."""
        self.tiers.policy, seconds = POLICIES["compute_there"], []
        for _ in range(REPEATS):
            keys = self._keys()
            for key in keys:
                (self.tiers.beneath or self.tiers.slow).drop(key)
            seconds.append(self._turn([expert for _, expert in keys], tokens))
        return statistics.median(seconds)

    def _keys(self) -> Sequence[tuple[int, int]]:
        """Other experts of a layer each time, as many as a token has; the layer takes its number
        from them."""
        keys, width = self.tiers.keys, self.width
        start = self.turns * width % len(keys)
        self.turns += 1
        number = keys[start][0]
        of_layer = [key for key in keys if key[0] == number]
        first = keys[start][1]
        self.layer.number = number
        return [of_layer[(first + i) % len(of_layer)] for i in range(width)]

    def _turn(self, experts: Sequence[int], tokens: int) -> float:
        """Seconds of one expert, of a pass in which each of these has so many tokens."""
        rows = torch.arange(tokens, device=self.x.device)
        self.others.sum()
        started = self._now()
        list(self.layer(self.x[:tokens], {expert: rows for expert in sorted(experts)}))
        return (self._now() - started) / len(experts)

    def _now(self) -> float:
        if self.x.device.type == "cuda":
            torch.cuda.synchronize(self.x.device)
        return time.perf_counter()


def _line(seconds: dict[int, float]) -> Line:
    """The line through the seconds of one token, which is what decoding has, that comes nearest to
    those of more tokens. Neither part is below zero."""
    one = seconds[1]
    run = sum((n - 1) ** 2 for n in seconds)
    each = max(0.0, sum((n - 1) * (s - one) for n, s in seconds.items()) / run)
    return Line(max(0.0, one - each), each)


def decider(costs: Costs, policy: Policy, name: str) -> Decide:
    """Who computes what, by the cost model: `name` is the policy's, of --expert_policy."""
    overlap = Overlap.COPIES if policy.ahead else Overlap.NONE
    how = "fetch" if name == "cache" else name

    def decide(
        tokens: Sequence[int], fast: Collection[int], asked: Iterable[float] = ()
    ) -> tuple[Collection[int], float]:
        pending = _pending(asked, costs.fetch, time.perf_counter())
        plan = plan_layer(tokens, fast, costs, overlap, how, pending)
        there = {e for e, where in plan.where.items() if where is Where.COMPUTE_THERE}
        return there, plan.seconds

    return decide


def _pending(asked: Iterable[float], fetch: float, now: float) -> float:
    """Seconds until copies are done that were asked for at these times, one after the other."""
    due = 0.0
    for moment in asked:
        due = max(due, moment) + fetch
    return max(0.0, due - now)
