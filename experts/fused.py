"""Experts in two tiers of memory for the fused decoding step (ops/cpu/step.py).

    table = fused.table(layer, experts)     # of the step's op, in the place of W2
    with fused.stepping():                  # one step at a time
        step.decode(…)

The op finds the address of each expert in its layer's table; zero: the expert is not in fast
memory. While all experts that it needs are there, it asks nothing. Otherwise it calls back from the
middle of the step (`Turn::ask` in ops/cpu/src/step/experts.h), with the experts that the tokens
need and those that it guesses the next layer will need. They are brought here, as the policy says,
and their addresses written into the table.
"""

import ctypes
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from experts.copies import Slot, addresses
from experts.layer import TieredLayer
from experts.slow import Key
from experts.store import Decide, Store
from ops.cpu import step
from quantize.kernel import fused_weight

# The numbers of `Turn` in ops/cpu/src/step/experts.h, by their places, and its lists' beginning.
ASK, GUESSES, CLOCK, ASSIGNMENTS, HITS, NANOSECONDS = range(6)
CALM_EXPERTS, CALM_ASSIGNMENTS, CALM_NANOSECONDS, WANTED, GUESSED, LISTS = range(6, 12)


class Fused:
    """The experts of one model, as its fused steps find and ask for them."""

    def __init__(self, store: Store, layers: Mapping[int, TieredLayer]) -> None:
        """layers: with experts, by their numbers."""
        self.store, self.layers = store, layers
        self.decide: Decide | None = None  # as Store.decide, for these steps
        self.every = len(store.keys) // max(1, len(layers))  # experts of a layer
        lists = 2 * self.every + step.MAX_FUSED_ROWS * store.width
        self.turn = torch.zeros(LISTS + lists, dtype=torch.int64)
        self.numbers = _numbers(self.turn)
        self.callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(self._ask)
        self.numbers[ASK] = ctypes.cast(self.callback, ctypes.c_void_p).value or 0
        self.error: BaseException | None = None  # why the step that is under way cannot go on
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
            self.numbers[GUESSES] = int(store.policy.ahead and store.arrivals > 0)
            try:
                yield
            except RuntimeError:
                if self.error is None:
                    raise
                raise self.error from None
            finally:
                self._take_back()
                self.left_there = None

    def count(self) -> None:
        """Add what the op has counted to the store's traffic."""
        numbers, traffic = self.numbers, self.store.traffic
        traffic.assignments += numbers[ASSIGNMENTS]
        traffic.hits += numbers[HITS]
        traffic.expert_seconds += numbers[NANOSECONDS] / 1e9
        if self.decide:
            calm = numbers[CALM_EXPERTS], numbers[CALM_ASSIGNMENTS]
            traffic.expected_seconds += self.decide.resident(*calm)
        for place in range(ASSIGNMENTS, WANTED):
            numbers[place] = 0

    # ------------------------------------------------------------------------------ a turn

    def _ask(self, number: int) -> int:
        """`Turn::ask`. The op may not meet an exception: it ends the step instead."""
        try:
            return self._bring(self.layers[number])
        except BaseException as error:
            self.error = error
            return 0

    def _bring(self, layer: TieredLayer) -> int:
        """Bring the wanted experts of a layer, as many as there is room for at a time."""
        numbers, store = self.numbers, self.store
        count, guessed = numbers[WANTED], numbers[GUESSED]
        wanted = numbers[LISTS : LISTS + count].tolist()
        first = LISTS + self.every
        tokens = dict(zip(wanted, numbers[first : first + count].tolist(), strict=True))
        first += self.every
        likely = Counter(numbers[first : first + guessed].tolist())
        self._take_back()
        layer.note_uses()
        store.forget({(layer.number, expert) for expert in wanted})
        ahead = deque(expert for expert, _ in likely.most_common())
        return _Turn(self, layer, tokens).bring(ahead)

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

    def __init__(self, fused: Fused, layer: TieredLayer, tokens: Mapping[int, int]) -> None:
        """tokens: of each expert that is still to be computed, in the op's order."""
        self.fused, self.layer, self.tokens, self.store = fused, layer, tokens, fused.store
        self.arriving: dict[int, Slot] = {}
        self.pairs: list[tuple[Slot, Key]] = []  # that are to be fetched
        coming, number = self.store.coming, layer.number
        self.fast = {e for e in tokens if e in layer.own or (number, e) in coming}
        self.asked = list(self.store.asked.values())
        # As the first part of this turn decided; None: this is the first part.
        self.left_there = fused.left_there

    def bring(self, likely: deque[int]) -> int:
        """Make room, fetch, and wait. Returns how many experts are there, the first ones.

        likely: of the next layer, to be fetched ahead. Raises TierError; the slots are then free
        as soon as what is being copied into them is there.
        """
        try:
            return self._bring(likely)
        finally:
            self.store.abandoned += self.arriving.values()

    def _bring(self, likely: deque[int]) -> int:
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
        store.begin(self.pairs)
        if not chooses:
            self._decided()  # what is expected is worked out while the disk reads
        while self.arriving:
            expert, slot = next(iter(self.arriving.items()))
            store.copies.wait(slot)
            del self.arriving[expert]
            given = layer.settle(expert, slot, self.tokens)
            if given is slot:
                self.fused.lend(layer, expert, slot)
            elif given:
                store.landing.append(given)
        return ready

    def _decided(self) -> Collection[int]:
        """The experts that the cost model computes in the slow tier; its seconds are noted."""
        fused, traffic = self.fused, self.store.traffic
        if self.left_there is not None or fused.decide is None:
            return self.left_there or ()
        tokens = [self.tokens.get(expert, 0) for expert in range(fused.every)]
        there, seconds = fused.decide(tokens, self.fast, self.asked)
        traffic.expected_seconds += seconds
        return there

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
        traffic.fetched += tokens
        return True
