"""One layer whose experts lie in two tiers: what is computed and fetched, and in which order.

layer = TieredLayer(store, number, norm, following)
layer(tokens, rows)         # as models.mixtral.MixtureOfExperts.outputs
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantbench.experts.copies import Slot
from quantbench.experts.slow import Key
from quantbench.experts.store import Guesses, Store


@dataclass(frozen=True)
class Following:
    """The next layer with experts."""

    layer: "TieredLayer"
    norm: Tensor  # (D,), the weight of the norm before its router
    router: Tensor  # (X, D), its router's weight


class TieredLayer:
    """One layer's experts; called as MixtureOfExperts.outputs."""

    def __init__(
        self, store: Store, number: int, norm: Tensor, following: Following | None
    ) -> None:
        """norm (D,): the weight of the norm before this layer's router."""
        self.store, self.number, self.following = store, number, following
        self.own: OrderedDict[int, Slot] = OrderedDict()  # the least recently used one first
        self.quota = 0  # how many slots this layer has
        # For the fused step (fused.py): of each expert the addresses of its two matrices, or zeros,
        # and when it was last used, by a clock that it starts anew each time. Empty without one.
        self.places: memoryview | None = None
        self.used: memoryview | None = None
        if following:
            self.guess = _guess(norm, following)  # (X, D)

    def __call__(self, tokens: Tensor, rows: Mapping[int, Tensor]) -> Iterable[tuple[int, Tensor]]:
        with self.store.lock:
            started = self.store.stopwatch.start()
            self.note_uses()
            outputs = _Turn(self, tokens, rows).outputs()
            self.store.stopwatch.stop(started)
        return sorted(outputs.items())

    # ------------------------------------------------------------------------------ fast memory

    def keep(self, expert: int, slot: Slot) -> None:
        """Let a slot belong to this layer, as the one used last."""
        self.own[expert] = slot
        self.show(expert, slot.addresses if self.places else (0, 0))

    def give_up(self, expert: int) -> Slot:
        """Take a slot from this layer."""
        self.show(expert, (0, 0))
        return self.own.pop(expert)

    def show(self, expert: int, addresses: tuple[int, int]) -> None:
        """Tell the fused step where an expert's matrices are; zeros: not in fast memory."""
        if self.places:
            self.places[2 * expert], self.places[2 * expert + 1] = addresses

    def note_uses(self) -> None:
        """Bring `own` into the order of use, as the fused step has written it down."""
        if self.used:
            used = self.used.tolist()
            for expert in sorted(filter(used.__getitem__, range(len(used))), key=used.__getitem__):
                self.used[expert] = 0
                if expert in self.own:
                    self.own.move_to_end(expert)

    def forget_uses(self) -> None:
        """Leave `own` in the order that it has."""
        for expert in range(len(self.used or ())):
            self.used[expert] = 0  # type: ignore[index]  # or it had no length

    def least_recent(self, needed: Collection[int]) -> int | None:
        """The expert in fast memory that is not needed, and is given up first."""
        return next((expert for expert in self.own if expert not in needed), None)

    def room(self, needed: Collection[int], wait: bool) -> Slot | None:
        """A slot for an expert of this layer: of one that is not needed any more, or free.

        None if there is none; wait: for a copy that nobody wants any more."""
        store = self.store
        if store.policy.caches and (len(self.own) >= self.quota or not store.landing):
            if (expert := self.least_recent(needed)) is not None:
                return self.give_up(expert)
        return store.room(wait)

    def settle(self, expert: int, slot: Slot, needed: Collection[int]) -> Slot | None:
        """Leave a fetched expert in fast memory if it may stay there. The slot that this layer has
        to give back to the landing, if there is one: another expert's, or its own."""
        if not (self.store.policy.caches and self.quota):
            return slot
        if len(self.own) < self.quota:
            self.keep(expert, slot)
            return None
        least = self.least_recent(needed)
        if least is None:
            return slot
        given = self.give_up(least)
        self.keep(expert, slot)
        return given

    # ------------------------------------------------------------------------------ ahead

    def expect(self, likely: deque[int]) -> list[tuple[Slot, Key]]:
        """Slots for experts that this layer will probably need, and these experts, to be fetched:
        as many as there are free slots. Those experts leave `likely`, whose first is the most
        likely one."""
        store, pairs = self.store, []
        while likely:
            key = self.number, likely[0]
            if likely[0] not in self.own and key not in store.coming:
                slot = store.room(wait=False)
                if slot is None:
                    break
                store.coming[key] = slot
                pairs.append((slot, key))
            likely.popleft()
        return pairs

    def likely(self, tokens: Tensor) -> list[int]:
        """The next layer's experts that tokens (T, D) will probably take, most wanted first."""
        if self.following is None:
            return []
        scores = nn.functional.linear(tokens.float(), self.guess)
        chosen: list[int] = scores.topk(self.store.width).indices.flatten().tolist()
        return [expert for expert, _ in Counter(chosen).most_common()]


def _guess(norm: Tensor, following: Following) -> Tensor:
    """The next layer's router, to be applied to this layer's input.

    The inputs of both routers are the sum of all that layers have added so far, divided by its root
    mean square and multiplied by the norm's weights. One layer adds little to that sum: so this
    layer's input, with the weights of the norms exchanged, stands for the next one's. Eliseev and
    Mazur (2023, https://arxiv.org/abs/2312.17238, 3.2) apply the next gate to hidden states so.
    """
    wide = norm.float()
    return following.router.float() * following.norm.float() / torch.where(wide == 0, 1.0, wide)


class _Turn:
    """One pass of some tokens through a layer's experts."""

    def __init__(self, layer: TieredLayer, tokens: Tensor, rows: Mapping[int, Tensor]) -> None:
        self.layer, self.store = layer, layer.store
        self.tokens, self.rows = tokens, rows
        self.results: dict[int, Tensor] = {}
        self.likely: deque[int] | None = None  # of the next layer, to be fetched ahead

    def outputs(self) -> dict[int, Tensor]:
        """What each expert returns, by its number.

        A processor that the slow tier has to itself (a CPU beneath a card) gets its tokens first
        and computes last: meanwhile the other one does what it was asked for.
        """
        layer, store, number = self.layer, self.store, self.layer.number
        store.guessing.asked(number, self.rows)
        store.forget([(number, expert) for expert in self.rows])
        resident = [expert for expert in self.rows if expert in layer.own]
        arriving = {
            e: store.coming.pop((number, e)) for e in self.rows if (number, e) in store.coming
        }
        missing = [e for e in self.rows if e not in layer.own and e not in arriving]
        there = self._there(missing, {*resident, *arriving})
        self.waiting = deque(e for e in missing if e not in there)
        self._count(resident, arriving, there)
        self.pending: OrderedDict[int, Slot] = OrderedDict(arriving)
        beneath = store.beneath is not None
        sent = {e: self.tokens[self.rows[e]].cpu() for e in there} if beneath else {}
        self._begin()
        for expert in resident:
            slot = layer.own[expert]
            layer.own.move_to_end(expert)
            self._compute(expert, slot)
            self._begin()
        if not beneath:
            for expert in there:
                self.results[expert] = self._in_place(expert)(self.tokens[self.rows[expert]])
        while self.pending or self.waiting:
            if not self.pending:
                self._fetch()
            expert, slot = self.pending.popitem(last=False)
            store.copies.wait(slot)
            self._compute(expert, slot)
            if (given := layer.settle(expert, slot, self._needed())) is not None:
                store.landing.append(given)
            self._begin()
        for expert, x in sent.items():
            self.results[expert] = self._in_place(expert)(x).to(self.tokens.device)
        return self.results

    def _there(self, missing: Sequence[int], fast: Collection[int]) -> Collection[int]:
        """Those of the missing experts that are computed in the slow tier."""
        policy, decide = self.store.policy, self.store.decide
        chosen: Collection[int] = () if policy.fetches else missing
        if decide is not None:
            count = max(self.rows) + 1
            tokens = [len(self.rows[e]) if e in self.rows else 0 for e in range(count)]
            chosen, seconds = decide(tokens, fast, self.store.asked.values())
            self.store.traffic.expected_seconds += seconds
        return chosen

    def _count(
        self, resident: Collection[int], arriving: Collection[int], there: Collection[int]
    ) -> None:
        traffic = self.store.traffic

        def tokens(experts: Iterable[int]) -> int:
            return sum(len(self.rows[expert]) for expert in experts)

        traffic.assignments += tokens(self.rows)
        traffic.hits += tokens(resident)
        traffic.ahead += tokens(arriving)
        traffic.fetched += tokens(self.waiting)
        traffic.there += tokens(there)

    def _begin(self) -> None:
        """Begin to fetch what is missing, as far as there is room; then the next layer's."""
        if not self.store.policy.ahead:
            return
        pairs = []
        while self.waiting and (slot := self.layer.room(self._needed(), wait=False)) is not None:
            expert = self.waiting.popleft()
            pairs.append((slot, (self.layer.number, expert)))
            self.pending[expert] = slot
        if not self.waiting and self.layer.following:
            if self.likely is None:
                self.likely = self._followed()
            pairs += self.layer.following.layer.expect(self.likely)
        self.store.begin(pairs)

    def _followed(self) -> deque[int]:
        """The next layer's experts that are to be fetched ahead."""
        layer, store = self.layer, self.store
        if store.policy.guesses is Guesses.NEVER or layer.following is None:
            return deque()
        likely = layer.likely(self.tokens)
        following = layer.following.layer
        # Many tokens want nearly all experts: guesses are right then, and say nothing of steps.
        are_many = len(self.tokens) * store.width >= store.experts_each
        if are_many or store.policy.guesses is Guesses.ALWAYS:
            return deque(likely)
        missing = [expert for expert in likely if expert not in following.own]
        store.guessing.guessed(following.number, missing)
        return deque(likely if store.guessing.pays else ())

    def _fetch(self) -> None:
        """Fetch a missing expert while nothing else happens."""
        slot = self.layer.room(self._needed(), wait=True)
        assert slot is not None  # nothing is pending, so the landing is free
        expert = self.waiting.popleft()
        self.store.fetch(slot, (self.layer.number, expert))
        self.pending[expert] = slot

    def _needed(self) -> Collection[int]:
        """The experts that are still to be computed."""
        return self.rows.keys() - self.results.keys()

    def _compute(self, expert: int, slot: Slot) -> None:
        self.results[expert] = slot.expert(self.tokens[self.rows[expert]])
        self.store.copies.done(slot)

    def _in_place(self, expert: int) -> nn.Module:
        return self.store.in_place((self.layer.number, expert))
