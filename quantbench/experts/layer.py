"""One layer whose experts are in two tiers: what is computed and fetched, and in which order.

layer = TieredLayer(store, number)
layer(tokens, rows)         # as models.mixtral.MixtureOfExperts.outputs
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from quantbench.experts.copies import Slot

if TYPE_CHECKING:
    from quantbench.experts.tiers import Tiers


class TieredLayer:
    """One layer's experts; called as MixtureOfExperts.outputs."""

    def __init__(self, store: "Tiers", number: int) -> None:
        self.store, self.number = store, number
        self.own: OrderedDict[int, Slot] = OrderedDict()  # the least recently used one first
        self.quota = 0  # number of this layer's slots
        # For the fused step (fused.py): the addresses of each expert's two matrices, or zeros, and
        # when each was last used, by a clock that restarts each time. None without that step.
        self.places: memoryview | None = None
        self.used: memoryview | None = None

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
        """Bring `own` into the order of use that the fused step has recorded."""
        if self.used:
            used = self.used.tolist()
            for expert in sorted(filter(used.__getitem__, range(len(used))), key=used.__getitem__):
                self.used[expert] = 0
                if expert in self.own:
                    self.own.move_to_end(expert)

    def evict(self, needed: Collection[int]) -> Slot | None:
        """The slot of the least recently used expert that is not needed; None if all are needed."""
        expert = next((expert for expert in self.own if expert not in needed), None)
        return None if expert is None else self.give_up(expert)

    def room(self, needed: Collection[int]) -> Slot | None:
        """A slot for an expert that is fetched: an evicted expert's, or a free one, or None."""
        landing, full = self.store.landing, len(self.own) >= self.quota
        slot = None
        if self.store.policy.caches and (full or not landing):
            slot = self.evict(needed)
        return landing.pop() if slot is None and landing else slot

    def settle(self, expert: int, slot: Slot, needed: Collection[int]) -> Slot | None:
        """Leave a fetched expert in fast memory if it may stay there. Returns the slot that this
        layer gives back to the landing: another expert's, its own, or None."""
        if not (self.store.policy.caches and self.quota):
            return slot
        given = None
        if len(self.own) >= self.quota and (given := self.evict(needed)) is None:
            return slot
        self.keep(expert, slot)
        return given


class _Turn:
    """One pass of some tokens through a layer's experts."""

    def __init__(self, layer: TieredLayer, tokens: Tensor, rows: Mapping[int, Tensor]) -> None:
        self.layer, self.store = layer, layer.store
        self.tokens, self.rows = tokens, rows
        self.results: dict[int, Tensor] = {}
        self.waiting: deque[int] = deque()  # experts to be fetched as soon as there is room
        self.pending: OrderedDict[int, Slot] = OrderedDict()  # experts that are being fetched

    def outputs(self) -> dict[int, Tensor]:
        """What each expert returns, by its number.

        A processor that only the slow tier has (a CPU under a card) gets its tokens first and
        computes last: meanwhile the card computes what was launched. Raises TierError.
        """
        layer, store = self.layer, self.store
        resident = [expert for expert in self.rows if expert in layer.own]
        there = [expert for expert in self.rows if expert not in layer.own]
        if store.policy.fetches:
            self.waiting, there = deque(there), []
        self._count(resident, there)
        sent = {e: self.tokens[self.rows[e]].cpu() for e in there} if store.beneath else {}
        try:
            self._begin()
            for expert in resident:
                slot = layer.own[expert]
                layer.own.move_to_end(expert)
                self._compute(expert, slot)
                self._begin()
            while self.pending:
                expert, slot = next(iter(self.pending.items()))
                store.copies.wait(slot)
                del self.pending[expert]
                self._compute(expert, slot)
                if (given := layer.settle(expert, slot, self._needed())) is not None:
                    store.landing.append(given)
                self._begin()
        finally:
            store.abandon(self.pending.values())
        for expert in there:
            x = sent[expert] if sent else self.tokens[self.rows[expert]]
            returned = store.in_place((layer.number, expert)).expert(x)
            self.results[expert] = returned.to(self.tokens.device)
        return self.results

    def _count(self, resident: Collection[int], there: Collection[int]) -> None:
        traffic = self.store.traffic

        def tokens(experts: Iterable[int]) -> int:
            return sum(len(self.rows[expert]) for expert in experts)

        traffic.assignments += tokens(self.rows)
        traffic.hits += tokens(resident)
        traffic.fetched += tokens(self.waiting)
        traffic.there += tokens(there)

    def _begin(self) -> None:
        """Start to fetch what is missing, as far as there is room."""
        pairs = []
        while self.waiting and (slot := self.layer.room(self._needed())) is not None:
            expert = self.waiting.popleft()
            pairs.append((slot, (self.layer.number, expert)))
            self.pending[expert] = slot
        self.store.begin(pairs)

    def _needed(self) -> Collection[int]:
        """The experts that are still to be computed."""
        return self.rows.keys() - self.results.keys()

    def _compute(self, expert: int, slot: Slot) -> None:
        self.results[expert] = slot.expert(self.tokens[self.rows[expert]])
        self.store.copies.done(slot)
