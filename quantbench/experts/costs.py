"""What an expert costs here, measured with the very products and copies that a run makes.

    costs = measure(tiers, model)
    tiers.decide = Decider(costs, tiers.policy)

A made-up layer is called as the model's layers are: with experts that lie in fast memory, with
others that have to be fetched, and with others that are computed where they lie, for a few and for
more tokens. Before each call so many bytes are read as a decoding step reads: what a step leaves of
an expert in the processor's caches, the next one finds there. A line through the seconds gives
a + b · n. Between two layers a model leaves no code and no activations in the caches either, and
copies take the processor's time: rehearsal.py scales the costs by steps of the whole model. These
are the model's modules; what a fused step takes is measured in fused steps (fused_costs.py).
"""

import math
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from quantbench.experts.copies import Slot, buffers
from quantbench.experts.layer import TieredLayer
from quantbench.experts.plan import Costs, Line, Overlap, Parts, Where, plan_layer
from quantbench.experts.store import POLICIES, Policy, Turn
from quantbench.experts.tiers import Tiers
from quantbench.models.llama import Transformer
from quantbench.models.weight_bytes import step_bytes
from quantbench.quantize.autoquant.race import last_level_cache

TOKENS = (1, 4, 16)  # of each expert
REPEATS = 9  # of which the median counts
MOST_READ = 1 << 27  # bytes, before each of them


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
    return Costs(fast=_line(fast), slow=_line(slow), fetch=Line(0.0, fetch))


def _fetch(turn: float, fast: float, width: int, ahead: bool) -> float:
    """Seconds of a copy, from those of a turn in which `width` experts with a token are fetched.

    fast: seconds to compute one of them. ahead: whether copies run beside the computing. Then the
    slower of the two goes on without a pause, and the other happens once besides.
    """
    if not ahead:
        return max(0.0, turn / width - fast)
    copying = (turn - fast) / width
    return copying if copying >= fast else max(0.0, turn - width * fast)


class _MadeUp:
    """A layer of experts that no other layer knows of."""

    def __init__(self, tiers: Tiers, model: Transformer) -> None:
        self.tiers, self.width = tiers, tiers.width
        weight = model.tok_embeddings.weight
        self.x = torch.randn(max(TOKENS), model.config.dim, device=tiers.device).to(weight.dtype)
        # Twice the last cache replaces all that is in it.
        most = min(2 * last_level_cache(tiers.device), MOST_READ)
        count = min(step_bytes(model, 1), most) if tiers.device.type == "cpu" else most
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
            self.layer.keep(expert, slot)
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


@dataclass(frozen=True)
class Decider:
    """Who computes what, by the cost model (store.Decide)."""

    costs: Costs
    policy: Policy
    fused: bool = False  # whether the steps are fused, or a model's modules compute
    beneath: bool = False  # whether the slow tier has a processor of its own: a CPU under a card

    @property
    def overlap(self) -> Overlap:
        if self.beneath:
            return Overlap.ALL if self.policy.ahead else Overlap.TIERS
        if not self.policy.ahead:
            return Overlap.NONE
        return Overlap.ARRIVALS if self.fused else Overlap.COPIES

    def __call__(
        self,
        tokens: Sequence[int],
        fast: Collection[int],
        asked: Iterable[float] = (),
        arriving: Collection[int] = (),
    ) -> tuple[Collection[int], float]:
        pending = _pending(asked, self.costs.fetch, time.perf_counter())
        may_be = (
            (Where.FETCH, self.policy.fetches),
            (Where.COMPUTE_THERE, self.policy.computes_there),
        )
        ways = [way for way, allowed in may_be if allowed]
        plan = plan_layer(tokens, fast, self.costs, self.overlap, ways, pending, arriving)
        there = {e for e, where in plan.where.items() if where is Where.COMPUTE_THERE}
        return there, plan.seconds

    def resident(self, experts: int, tokens: int) -> float:
        return self.costs.fast.total(experts, tokens)

    def turn(self, turn: Turn) -> float:
        costs = self.costs
        arrival, begun = 0.0, turn.begun + turn.ahead
        if turn.late.experts:
            arrival = _pending(turn.asked, costs.fetch, turn.started)
        if turn.begun:  # copies that are begun together arrive together
            arrival = costs.arrival(begun, arrival)
        parts = Parts(
            fast=costs.fast.total(*turn.here),
            late=costs.fast.total(*turn.late),
            fetched=0.0,  # they are among the late ones
            last=0.0,
            begin=costs.begin.seconds(begun),
            fetch=arrival,
            arrival=arrival,
            slow=costs.slow.total(*turn.there),
        )
        return costs.ask + parts.seconds(self.overlap)


def _pending(asked: Iterable[float], fetch: Line, now: float) -> float:
    """Seconds until copies are done that were asked for at these times, in this order."""
    due = -math.inf
    for moment in asked:
        due = due + fetch.each if due > moment else moment + fetch.seconds(1)
    return max(0.0, due - now)
