"""Experts in two tiers of memory for the fused decoding step (ops/cpu/step.py).

    table = fused.table(layer, experts)     # of the step's op, in the place of W2
    with fused.stepping():                  # one step at a time
        step.decode(…)

The op finds the address of each expert in its layer's table; zero: the expert is not in fast
memory. While all experts that it needs are there, it asks nothing. Otherwise it calls back from the
middle of the step (`Turn::ask` in ops/cpu/src/step/experts.h), with the experts that the tokens
need and those that it guesses the next layer will need. They are brought here, as the policy says,
and their addresses written into the table. While copies are under way, the op computes with what is
there, and calls back a second time (`Turn::wait`) when it needs the others.
"""

import ctypes
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantbench.experts.copies import Slot, addresses
from quantbench.experts.guessing import Guessing, Prices
from quantbench.experts.layer import TieredLayer
from quantbench.experts.slow import Key
from quantbench.experts.store import Decide, Guesses, Share, Store, Turn
from quantbench.ops.cpu import step
from quantbench.quantize.kernel import fused_weight

# The numbers of `Turn` in ops/cpu/src/step/experts.h, by their places, and its lists' beginning.
ASK, WAIT, GUESSES, CLOCK, ASSIGNMENTS, HITS, NANOSECONDS = range(7)
CALM_EXPERTS, CALM_ASSIGNMENTS, CALM_NANOSECONDS, WANTED, GUESSED, LISTS = range(7, 13)
MOST_NOTED = 4096  # turns
NO_GUESSES, ASK_FOR_GUESSES, NOTE_GUESSES = range(3)  # values of GUESSES


class Fused:
    """The experts of one model, as its fused steps find and ask for them."""

    def __init__(self, store: Store, layers: Mapping[int, TieredLayer]) -> None:
        """layers: with experts, by their numbers."""
        self.store, self.layers = store, layers
        self.decide: Decide | None = None  # as Store.decide, for these steps
        self.after = 0.0  # seconds by which a turn that asks makes the rest of its step longer
        self.every = store.experts_each  # experts of a layer
        lists = 2 * self.every + step.MAX_FUSED_ROWS * store.width
        self.turn = torch.zeros(LISTS + lists, dtype=torch.int64)
        self.numbers = _numbers(self.turn)
        function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
        self.callbacks = function(self._ask), function(self._wait)
        for place, callback in zip((ASK, WAIT), self.callbacks, strict=True):
            self.numbers[place] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        self.error: BaseException | None = None  # why the step that is under way cannot go on
        self.under_way: _Turn | None = None  # what the op waits for
        self.guessing = Guessing(Prices())  # for Guesses.WHILE_RIGHT
        self.follows = False  # whether guessed experts are fetched in the step that is under way
        self.waits_at_once = False  # whether the op computes nothing while copies are under way
        self.noted: list[Turn] = []  # turns whose expected seconds are not added yet
        # What the op computes with until it asks again, and that does not stay: in a slot of the
        # landing, or in the slow tier (None).
        self.lent: list[tuple[TieredLayer, int, Slot | None]] = []
        # Where a turn's experts do not fit into fast memory together, and it goes on: those that
        # are to be computed in the slow tier. None: a new turn comes next.
        self.left_there: Collection[int] | None = None
        self.tables: dict[int, Tensor] = {}  # by the layer's number
        self.in_place: dict[Key, tuple[int, int]] = {}  # addresses in the slow tier

    # ------------------------------------------------------------------------------ the op

    def table(self, layer: TieredLayer, experts: step.Experts) -> Tensor:
        """The table of a layer's experts, the same one for all steps.

        experts: of this layer; only their networks are not where they are.
        """
        with self.store.lock:
            return self._table(layer, experts)

    def _table(self, layer: TieredLayer, experts: step.Experts) -> Tensor:
        if layer.number not in self.tables:
            used = torch.zeros(self.every, dtype=torch.int64)
            moving = step.Moving(self.turn, used, layer.number)
            made = replace(experts, networks=self._networks(), moving=moving).table()
            self.tables[layer.number] = made
            layer.used = _numbers(used)
            layer.places = _numbers(made)[step.TABLE_HEAD :]
            for expert, slot in layer.own.items():
                layer.show(expert, slot.addresses)
        return self.tables[layer.number]

    def _networks(self) -> step.Networks:
        """An expert's matrices, without numbers."""
        layout, skeleton = self.store.layout, self.store.skeleton
        nowhere = torch.empty(layout.nbytes, dtype=torch.uint8, device="meta")
        expert = layout.expert(skeleton, nowhere)
        w13, w2 = (fused_weight(expert.get_submodule(name)) for name in ("w13", "w2"))
        assert w13 is not None and w2 is not None  # or the fused step would have been refused
        w2_layer = skeleton.get_submodule("w2")
        assert isinstance(w2_layer, nn.Linear)
        return step.Networks([w13], [w2], w2_layer.in_features)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step. Raises what went wrong while experts were brought, such as TierError."""
        store = self.store
        with store.lock:
            self.error = None
            self.numbers[GUESSES] = self._guesses()
            try:
                yield
            except RuntimeError:
                if self.error is None:
                    raise
                raise self.error from None
            finally:
                if self.under_way:  # the slots are free as soon as the copies are there
                    store.abandoned += self.under_way.arriving.values()
                self._take_back()
                self.under_way = self.left_there = None

    def _guesses(self) -> int:
        """How the op is to guess in the step that begins."""
        self.follows = False
        policy = self.store.policy
        if not (policy.ahead and self.store.arrivals) or policy.guesses is Guesses.NEVER:
            return NO_GUESSES
        if policy.guesses is Guesses.ALWAYS:
            self.follows = True
            return ASK_FOR_GUESSES
        are_noted = self.guessing.begin_step()
        self.follows = self.guessing.pays
        if self.follows and self.guessing.pays_alone:
            return ASK_FOR_GUESSES
        return NOTE_GUESSES if self.follows or are_noted else NO_GUESSES

    def count(self) -> None:
        """Add what the op has counted to the store's traffic."""
        numbers, traffic = self.numbers, self.store.traffic
        traffic.assignments += numbers[ASSIGNMENTS]
        traffic.hits += numbers[HITS]
        traffic.expert_seconds += numbers[NANOSECONDS] / 1e9
        if self.decide:
            calm = numbers[CALM_EXPERTS], numbers[CALM_ASSIGNMENTS]
            traffic.expected_seconds += self.decide.resident(*calm)
        self.reckon()
        for place in range(ASSIGNMENTS, WANTED):
            numbers[place] = 0

    def reckon(self) -> None:
        """Add what is expected of the turns that were noted."""
        if self.decide:
            traffic = self.store.traffic
            traffic.expected_seconds += sum(map(self.decide.turn, self.noted))
            traffic.expected_after_seconds += self.after * len(self.noted)
        self.noted.clear()

    # ------------------------------------------------------------------------------ a turn

    def _ask(self, number: int) -> int:
        """`Turn::ask`. The op may not meet an exception: it ends the step instead."""
        try:
            return self._begin(self.layers[number])
        except BaseException as error:
            self.error = error
            return 0

    def _wait(self, number: int) -> int:
        """`Turn::wait`."""
        try:
            assert self.under_way
            self.under_way.finish()
            self.under_way = None
            return 1
        except BaseException as error:
            self.error = error
            return 0

    def _begin(self, layer: TieredLayer) -> int:
        """Begin to bring the wanted experts of a layer, as many as there is room for at a time."""
        started, numbers, store = time.perf_counter(), self.numbers, self.store
        count, guessed = numbers[WANTED], numbers[GUESSED]
        wanted = numbers[LISTS : LISTS + count].tolist()
        first = LISTS + self.every
        tokens = dict(zip(wanted, numbers[first : first + count].tolist(), strict=True))
        self._take_back()
        layer.note_uses()
        store.forget({(layer.number, expert) for expert in wanted})
        first += self.every
        likely = Counter(numbers[first : first + guessed].tolist())
        turn = _Turn(self, layer, tokens, started)
        self.under_way = turn
        ready = turn.begin(self._followed(layer, tokens, likely))
        if not turn.arriving:
            self.under_way = None
        return ready

    def _followed(
        self, layer: TieredLayer, wanted: Collection[int], likely: Counter[int]
    ) -> deque[int]:
        """The next layer's experts that are to be fetched ahead, the likeliest first.

        wanted: of this layer. likely: as the op guesses, how many tokens will want each.
        """
        order = [expert for expert, _ in likely.most_common()]
        adapts = self.store.policy.guesses is Guesses.WHILE_RIGHT
        is_first = self.left_there is None  # part of a turn
        if adapts and is_first and self.numbers[GUESSES] != NO_GUESSES:
            self.guessing.asked(layer.number, wanted)
            if layer.following:
                following = layer.following.layer
                missing = [expert for expert in order if expert not in following.own]
                self.guessing.guessed(following.number, missing)
        return deque(order if self.follows else ())

    def _take_back(self) -> None:
        """What was lent for a turn is free again."""
        for layer, expert, slot in self.lent:
            layer.show(expert, (0, 0))
            if slot:
                self.store.landing.append(slot)
        self.lent.clear()

    def lend(self, layer: TieredLayer, expert: int, slot: Slot | None) -> None:
        """Let the op compute with an expert until it asks again. None: in the slow tier."""
        if slot is None:
            key = layer.number, expert
            there = self.store.in_place(key)  # raises TierError if it is no longer all there
            if key not in self.in_place:
                self.in_place[key] = addresses(there)
        layer.show(expert, slot.addresses if slot else self.in_place[key])
        self.lent.append((layer, expert, slot))


def _numbers(tensor: Tensor) -> memoryview:
    """The numbers of a tensor (N,) int64, where they lie; quicker to get at than by the tensor."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


class _Turn:
    """The experts of one layer in one step, or those that are left of them."""

    def __init__(
        self, fused: Fused, layer: TieredLayer, tokens: Mapping[int, int], started: float
    ) -> None:
        """tokens: of each expert that is still to be computed, in the op's order. started: when."""
        self.fused, self.layer, self.tokens, self.store = fused, layer, tokens, fused.store
        self.started = started
        self.arriving: dict[int, Slot] = {}
        self.pairs: list[tuple[Slot, Key]] = []  # that are to be fetched
        self.fetched = 0  # of the experts, while nothing else happened
        self.lent_there: list[int] = []  # experts that are computed in the slow tier
        self.asked = list(self.store.asked.values())
        # As the first part of this turn decided; None: this is the first part.
        self.left_there = fused.left_there

    def begin(self, likely: deque[int]) -> int:
        """Make room, and begin to fetch. Returns how many experts are there or arrive, the first
        ones.

        likely: of the next layer, to be fetched ahead. Raises TierError.
        """
        layer, store, policy = self.layer, self.store, self.store.policy
        chooses = policy.fetches and policy.computes_there
        there = self._decided() if chooses else () if policy.fetches else self.tokens
        ready = 0
        for expert in self.tokens:
            if expert not in layer.own and not self._get(expert, expert in there, ready == 0):
                break
            ready += 1
        self.fused.left_there = None if ready == len(self.tokens) else there
        if ready == len(self.tokens) and policy.ahead and layer.following:
            self.pairs += layer.following.layer.expect(likely)
        begins = any(key[0] == layer.number for _, key in self.pairs)
        self._note(ready)
        store.begin(self.pairs)
        if self.arriving and (self._waits() or (not begins and self._all_arrived())):
            self.finish()
        return ready

    def finish(self) -> None:
        """Wait for what arrives, and show it to the op. Raises TierError."""
        if self.store.policy.ahead:
            self.fused.reckon()  # while the disk reads
        while self.arriving:
            expert, slot = next(iter(self.arriving.items()))
            self.store.copies.wait(slot)
            del self.arriving[expert]
            given = self.layer.settle(expert, slot, self.tokens)
            if given is slot:
                self.fused.lend(self.layer, expert, slot)
            elif given:
                self.store.landing.append(given)

    def _waits(self) -> bool:
        """Whether the op computes nothing while copies are under way."""
        return not self.store.policy.ahead or self.fused.waits_at_once

    def _all_arrived(self) -> bool:
        return all(map(self.store.copies.is_over, self.arriving.values()))

    def _note(self, ready: int) -> None:
        """Note what is done with the first experts, for what is expected of it."""
        fused = self.fused
        if fused.decide is None:
            return
        late, there = self._share(self.arriving), self._share(self.lent_there)
        every = self._share(list(self.tokens)[:ready])
        here = Share(*(a - b - c for a, b, c in zip(every, late, there, strict=True)))
        own = sum(key[0] == self.layer.number for _, key in self.pairs)
        begun, ahead = self.fetched + own, len(self.pairs) - own
        fused.noted.append(Turn(here, late, there, begun, ahead, self.asked, self.started))
        if len(fused.noted) > MOST_NOTED:
            fused.reckon()

    def _share(self, experts: Collection[int]) -> Share:
        return Share(len(experts), sum(self.tokens[expert] for expert in experts))

    def _decided(self) -> Collection[int]:
        """The experts that the cost model computes in the slow tier."""
        fused, number = self.fused, self.layer.number
        if self.left_there is not None or fused.decide is None:
            return self.left_there or ()
        arriving = {e for e in self.tokens if (number, e) in self.store.coming}
        fast = arriving.union(e for e in self.tokens if e in self.layer.own)
        tokens = [self.tokens.get(expert, 0) for expert in range(fused.every)]
        return fused.decide(tokens, fast, self.asked, arriving)[0]

    def _get(self, expert: int, there: bool, first: bool) -> bool:
        """Get hold of an expert that is not in fast memory to stay. Whether there was room for it.

        there: whether to compute it in the slow tier. first: whether no expert of this turn has
        room yet: then one that was asked for ahead gives way to it.
        """
        store, traffic, tokens = self.store, self.store.traffic, self.tokens[expert]
        key = self.layer.number, expert
        if key in store.coming:
            self.arriving[expert] = store.coming.pop(key)
            traffic.ahead += tokens
            return True
        if there:
            self.fused.lend(self.layer, expert, None)
            self.lent_there.append(expert)
            traffic.there += tokens
            return True
        slot = self.layer.room(self.tokens, wait=True)
        if slot is None and first and store.coming:
            _, slot = store.coming.popitem()
            store.copies.wait(slot)
            traffic.unused += 1
        if slot is None:
            return False
        self.arriving[expert] = slot
        if store.policy.ahead:
            self.pairs.append((slot, key))
        else:
            store.fetch(slot, key)
            self.fetched += 1
        traffic.fetched += tokens
        return True
