"""What experts cost in fused steps (fused.py), measured in such steps before a run begins.

    measured = measure(tiers, model, by_modules, step, rows)
    tiers.fused.decide = Decider(measured.costs, tiers.policy, fused=True)

Steps of the whole model are rehearsed with random tokens, in a few ways that differ in one thing,
a step of each way in turn. It is settled beforehand which experts are not in fast memory; the
others' addresses show some expert that is, so that results are wrong, and take as long.

    nothing is missing                  computing
    some are missing, copied at once    … and asking for them
    the same, and they are copied       … and copying, while the op waits

The difference of two ways is one constant. None is a factor that makes a sum come out right: what
a run's step takes is put together from these constants by Decider.turn.
"""

import dataclasses
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quantbench.experts import fused as numbers
from quantbench.experts.copies import Slot
from quantbench.experts.fused import Fused
from quantbench.experts.guessing import Prices
from quantbench.experts.plan import Costs, Line
from quantbench.experts.slow import Key
from quantbench.experts.store import POLICIES, Guesses, Policy, Share, Turn
from quantbench.experts.tiers import Tiers
from quantbench.models.llama import Transformer

Step = Callable[[Tensor, Tensor], Tensor]  # tokens (B, 1), position (1,) -> logits

ROUNDS = 48  # at most, after one that does not count; in each, a step of each way
SECONDS = 1.0  # after which no further round begins
LEAST = 3  # rounds, however long they take
LEAST_LOSS = 0.25  # of a copy: lines through seconds that scatter can be flat
HELD_UP = 8.0  # times the median: a longer step counts as if it had taken that long


@dataclass(frozen=True)
class Measured:
    """What fused steps cost."""

    costs: Costs
    lead: float  # seconds from one layer's experts to the next one's, where nothing is missing
    after: float  # seconds by which a turn that asks makes the rest of its step longer

    @property
    def prices(self) -> Prices:
        """What a guess saves and costs. A copy that is begun with others, which are waited for, is
        hidden by them; a wrong one prolongs them."""
        costs, copy = self.costs, self.costs.fetch.seconds(1)
        return Prices(
            saving=copy,
            loss=max(costs.fetch.each, copy * LEAST_LOSS),
            saving_alone=min(copy, self.lead),
            asking=costs.ask + costs.begin.seconds(1),
        )


def measure(
    tiers: Tiers, model: Transformer, by_modules: Costs, step: Step, rows: int = 1
) -> Measured:
    """The costs of fused steps for so many rows. Takes about a second; raises TierError.

    by_modules: as costs.measure gives them; how computing grows with tokens is taken from there.
    """
    assert tiers.fused is not None
    ways = _ways(tiers)
    steps = _Rehearsal(tiers, tiers.fused, model, step, rows).run(ways)
    return _measured(steps, by_modules, tiers.policy, len(tiers.layers))


# ---------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Way:
    """How steps are rehearsed."""

    missing: int  # experts of each layer
    policy: Policy
    copied: bool = True  # whether copies are made; if not, they are taken to be over at once
    waits_at_once: bool = False  # whether the op computes nothing while copies are under way


@dataclass(frozen=True)
class Rehearsed:
    """A step."""

    seconds: float
    calm: Share  # the experts of layers where nothing was missing
    calm_seconds: float
    turns: Sequence[Turn]  # of the other layers
    asking_seconds: float  # of these
    begin_seconds: float  # of these, beginning to copy

    @property
    def rest(self) -> float:
        """Seconds of all but experts."""
        return self.seconds - self.calm_seconds - self.asking_seconds


Steps = Mapping[str, Sequence[Rehearsed]]  # by the way


def _ways(tiers: Tiers) -> dict[str, Way]:
    """Those that tell this policy's costs, as far as there are slots for them."""
    every = tiers.experts_each
    few = -(-every // tiers.width)  # of these, a token takes one on average
    policy, ways = tiers.policy, {}
    fetch = dataclasses.replace(POLICIES["fetch"], ahead=policy.ahead, guesses=Guesses.NEVER)
    if tiers.landing or any(layer.own for layer in tiers.layers.values()):
        ways["calm"] = Way(0, fetch)
    if policy.fetches and tiers.landing:
        for name, missing in ("few", few), ("all", every):
            ways[f"{name} asked"] = Way(missing, fetch, copied=False)
            ways[f"{name} waited"] = Way(missing, fetch, copied=False, waits_at_once=True)
            ways[f"{name} copied"] = Way(missing, fetch, waits_at_once=True)
    if policy.computes_there:
        ways["there"] = Way(few if "calm" in ways else every, POLICIES["compute_there"])
    return ways


class _Rehearsal:
    """Steps over experts that are said to be in fast memory. All is as it was afterwards."""

    def __init__(
        self, tiers: Tiers, fused: Fused, model: Transformer, step: Step, rows: int
    ) -> None:
        self.tiers, self.fused, self.step = tiers, fused, step
        self.every = tiers.experts_each
        self.draw = random.Random(0)
        generator = torch.Generator().manual_seed(0)
        shape = (ROUNDS + 1, rows, 1)
        self.tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
        self.position = torch.zeros(1, dtype=torch.int64)

    @torch.no_grad()
    def run(self, ways: Mapping[str, Way]) -> Steps:
        """A step of each way in turn, until there are enough."""
        steps: dict[str, list[Rehearsed]] = {name: [] for name in ways}
        with self._kept():
            began = time.perf_counter()
            for number, tokens in enumerate(self.tokens):
                if number > LEAST and time.perf_counter() - began > SECONDS:
                    break
                order = [self.draw.sample(range(self.every), self.every) for _ in self.tiers.layers]
                for name, way in ways.items():
                    self._miss([set(experts[: way.missing]) for experts in order], way)
                    if not way.missing:  # the caches hold what such a step leaves
                        self._rehearse(way, tokens)
                    rehearsed = self._rehearse(way, tokens)
                    if number:
                        steps[name].append(rehearsed)
        return steps

    def _rehearse(self, way: Way, tokens: Tensor) -> Rehearsed:
        tiers, fused, noted = self.tiers, self.fused, _Noted()
        tiers.policy, fused.waits_at_once, fused.decide = way.policy, way.waits_at_once, noted
        tiers.copies = self.copies if way.copied else _Instant()
        tiers.begin_seconds = 0.0
        started = time.perf_counter()
        self.step(tokens, self.position)
        seconds = time.perf_counter() - started
        place = fused.numbers
        calm = Share(place[numbers.CALM_EXPERTS], place[numbers.CALM_ASSIGNMENTS])
        calm_seconds = place[numbers.CALM_NANOSECONDS] / 1e9
        asking = place[numbers.NANOSECONDS] / 1e9 - calm_seconds
        tiers.counted()  # what is noted as well
        return Rehearsed(seconds, calm, calm_seconds, noted.turns, asking, tiers.begin_seconds)

    def _miss(self, missing: Sequence[Collection[int]], way: Way) -> None:
        """Let these experts of each layer be missing, and all others be in fast memory."""
        for index, (number, layer) in enumerate(self.tiers.layers.items()):
            if way.policy.computes_there:  # as it is where memory is short
                for expert in missing[index]:
                    self.tiers.slow.drop((number, expert))
            layer.own = OrderedDict(
                (expert, self.slots[(index * self.every + expert) % len(self.slots)])
                for expert in range(self.every)
                if expert not in missing[index]
            )
            for expert in range(self.every):
                slot = layer.own.get(expert)
                layer.show(expert, slot.addresses if slot else (0, 0))

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Around all steps: everything is as it was afterwards."""
        tiers, fused = self.tiers, self.fused
        traffic, policy, decide = tiers.counted(), tiers.policy, fused.decide
        landing, own = list(tiers.landing), [layer.own for layer in tiers.layers.values()]
        self.copies = tiers.copies
        for slot, key in zip(landing, tiers.keys, strict=False):
            tiers.copies.now(slot, key)  # an expert's weights, whichever they are
        self.slots = [slot for slots in own for slot in slots.values()] or landing
        try:
            yield
        finally:
            tiers.copies = self.copies
            tiers.finish_copies()
            tiers.landing, tiers.policy = landing, policy
            fused.waits_at_once = False
            for layer, slots in zip(tiers.layers.values(), own, strict=True):
                layer.own = slots
                layer.forget_uses()
                for expert in range(self.every):
                    layer.show(expert, slots[expert].addresses if expert in slots else (0, 0))
            tiers.counted()
            tiers.traffic, fused.decide = traffic, decide


class _Noted:
    """Notes the turns that asked (store.Decide), and expects nothing of them."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def __call__(
        self,
        tokens: Sequence[int],
        fast: Collection[int],
        asked: Iterable[float],
        arriving: Collection[int] = (),
    ) -> tuple[Collection[int], float]:
        return (), 0.0

    def resident(self, experts: int, tokens: int) -> float:
        return 0.0

    def turn(self, turn: Turn) -> float:
        self.turns.append(turn)
        return 0.0


class _Instant:
    """Copies (copies.Copies) that are over when they begin, for they copy nothing."""

    def waited(self) -> float:
        return 0.0

    def cancelled(self) -> int:
        return 0

    def now(self, slot: Slot, key: Key) -> None:
        pass

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        pass

    def wait(self, slot: Slot) -> None:
        pass

    def is_over(self, slot: Slot) -> bool:
        return True

    def abandon(self, slot: Slot) -> bool:
        return True

    def done(self, slot: Slot) -> None:
        pass


# ---------------------------------------------------------------------------------- constants


def _measured(steps: Steps, by_modules: Costs, policy: Policy, layers: int) -> Measured:
    """The constants, from the differences between ways."""
    costs, lead, after = by_modules, 0.0, 0.0
    if "calm" in steps:
        calm = [one for one in steps["calm"] if one.calm.experts]
        ratios = [one.calm_seconds / by_modules.fast.total(*one.calm) for one in calm]
        costs = dataclasses.replace(costs, fast=by_modules.fast.times(_mean(ratios)))
        lead = _mean([one.seconds for one in calm]) / layers
    if "few copied" in steps:
        costs = _with_copies(steps, costs, policy.ahead)
    if "there" in steps:
        costs = _with_slow(steps["there"], costs)
    if "calm" in steps:
        asking = ("few copied", "all copied") if "few copied" in steps else ("there",)
        after = _after([one for name in asking for one in steps.get(name, ())], steps["calm"])
    return Measured(costs, lead, after)


def _after(asking: Sequence[Rehearsed], calm: Sequence[Rehearsed]) -> float:
    """Seconds by which a turn that asks makes the rest of its step longer."""
    turns = sum(len(one.turns) for one in asking)
    longer = _mean([one.rest for one in asking]) - _mean([one.rest for one in calm])
    return max(0.0, longer * len(asking) / turns) if turns else 0.0


def _with_copies(steps: Steps, costs: Costs, ahead: bool) -> Costs:
    """With what asking, beginning to copy and copying take."""
    asked, copied, begun = [], [], []
    for name in ("few", "all"):
        count = _copies(steps[f"{name} copied"])
        waited = _asking(steps[f"{name} waited"], costs)
        asked.append((count, _asking(steps[f"{name} asked"], costs)))
        copied.append((count, max(0.0, _asking(steps[f"{name} copied"], costs) - waited)))
        begun.append((count, _beginning(steps[f"{name} copied"])))
    asking = _through(*asked)  # each copy has its share of it
    fetch, begin = _through(*copied), _through(*begun)
    if not ahead:  # one after the other
        each = sum(seconds for _, seconds in copied) / sum(count for count, _ in copied)
        fetch, begin = Line(0.0, each), Line(0.0, 0.0)
    return dataclasses.replace(
        costs,
        ask=asking.fixed,
        fetch=Line(fetch.fixed, fetch.each + asking.each),
        begin=Line(begin.fixed, begin.each + asking.each) if ahead else begin,
    )


def _with_slow(steps: Sequence[Rehearsed], costs: Costs) -> Costs:
    """With what computing in the slow tier takes."""
    ratios = []
    for one in steps:
        expected = sum(costs.slow.total(*turn.there) for turn in one.turns)
        if expected:
            taken = one.asking_seconds - _computing(one, costs) - costs.ask * len(one.turns)
            ratios.append(max(0.0, taken) / expected)
    return dataclasses.replace(costs, slow=costs.slow.times(_mean(ratios))) if ratios else costs


def _computing(step: Rehearsed, costs: Costs) -> float:
    """Seconds of computing in fast memory, in the turns that asked."""
    return sum(costs.fast.total(*turn.here) + costs.fast.total(*turn.late) for turn in step.turns)


def _asking(steps: Sequence[Rehearsed], costs: Costs) -> float:
    """Seconds of a turn that asked, without computing."""
    asked = [one for one in steps if one.turns]
    taken = [(one.asking_seconds - _computing(one, costs)) / len(one.turns) for one in asked]
    return max(0.0, _mean(taken))


def _beginning(steps: Sequence[Rehearsed]) -> float:
    """Seconds of a turn that asked, for beginning its copies."""
    return _mean([one.begin_seconds / len(one.turns) for one in steps if one.turns])


def _copies(steps: Sequence[Rehearsed]) -> float:
    """Copies of a turn that asked."""
    turns = [turn for one in steps for turn in one.turns]
    return sum(turn.begun for turn in turns) / max(1, len(turns))


def _through(few: tuple[float, float], many: tuple[float, float]) -> Line:
    """The line through the seconds of a few copies, and as near as it can to those of more. Neither
    part is below zero.

    few, many: how many copies, and their seconds.
    """
    count, seconds = few
    if not count:
        return Line(seconds, 0.0)
    more, longer = many[0] - count, many[1] - seconds
    each = longer / more if more > 1e-3 else seconds / count
    each = min(max(0.0, each), seconds / count)
    return Line(seconds - each * count, each)


def _mean(values: Sequence[float]) -> float:
    """The mean, without what held a step up. 0 of nothing."""
    if not values:
        return 0.0
    most = HELD_UP * statistics.median(values)
    return statistics.fmean(min(value, most) for value in values)
