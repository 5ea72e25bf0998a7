"""One layer whose experts are in two tiers: what is computed and fetched, and in which order.

layer = TieredLayer(store, number)
layer(tokens, rows)         # as models.mixtral.MixtureOfExperts.outputs
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from quantbench.errors import TierError
from quantbench.experts.copies import Slot

if TYPE_CHECKING:
    from quantbench.experts.tiers import Tiers


class TieredLayer:
    """One layer's experts; called as MixtureOfExperts.outputs."""

    def __init__(self, store: "Tiers", number: int) -> None:
        self.store, self.number = store, number
        self.own: OrderedDict[int, Slot] = OrderedDict()  # the least recently used one first
        self.quota = 0  # number of this layer's slots
        self.arriving: dict[int, Slot] = {}  # experts that are being fetched
        # For the fused step (fused.py): the addresses of each expert's two matrices, or zeros, and
        # when each was last used, by a clock that restarts each time. None without that step.
        self.places: memoryview | None = None
        self.used: memoryview | None = None

    def __call__(self, tokens: Tensor, rows: Mapping[int, Tensor]) -> Iterable[tuple[int, Tensor]]:
        with self.store.lock:
            started = self.store.stopwatch.start()
            self.note_uses()
            outputs = self._outputs(tokens, rows)
            self.store.stopwatch.stop(started)
        return sorted(outputs.items())

    def _outputs(self, tokens: Tensor, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What each expert returns, by its number, in the order in which they were computed.

        A processor that only the slow tier has (a CPU under a card) gets its tokens first and
        computes last: meanwhile the card computes what was launched. Raises TierError.
        """
        store, results = self.store, dict[int, Tensor]()
        resident = [expert for expert in rows if expert in self.own]
        missing = [expert for expert in rows if expert not in self.own]
        waiting = deque(missing if store.policy.fetches else ())  # for room, to be fetched
        in_slow_tier = () if store.policy.fetches else missing  # to be computed in the slow tier
        self._count(rows, resident, waiting, in_slow_tier)
        sent = {e: tokens[rows[e]].cpu() for e in in_slow_tier} if store.beneath else {}

        def compute(expert: int, slot: Slot) -> None:
            results[expert] = slot.expert(tokens[rows[expert]])
            store.copies.done(slot)

        try:
            self.fetch(waiting, rows.keys())
            for expert in resident:
                self.own.move_to_end(expert)
                compute(expert, self.own[expert])
                self.fetch(waiting, rows.keys() - results.keys())
            while self.arriving:
                expert, slot = self.arrived()
                compute(expert, slot)
                needed = rows.keys() - results.keys()
                if (freed := self.settle(expert, slot, needed)) is not None:
                    store.landing.append(freed)
                self.fetch(waiting, needed)
        finally:
            self.abandon()
        for expert in in_slow_tier:
            x = sent[expert] if sent else tokens[rows[expert]]
            returned = store.in_place((self.number, expert)).expert(x)
            results[expert] = returned.to(tokens.device)
        return results

    def _count(self, rows: Mapping[int, Tensor], *groups: Iterable[int]) -> None:
        """Count the tokens of all experts, and of those that are resident, fetched, in place."""
        traffic = self.store.traffic
        hits, fetched, in_slow_tier = (
            sum(len(rows[expert]) for expert in group) for group in groups
        )
        traffic.assignments += hits + fetched + in_slow_tier
        traffic.hits += hits
        traffic.fetched += fetched
        traffic.there += in_slow_tier

    # ------------------------------------------------------------------------------ fast memory

    def fetch(self, waiting: deque[int], needed: Collection[int]) -> None:
        """Start to bring experts that wait, the first ones, as far as there is room.

        needed: experts that are not evicted for it. Raises TierError.
        """
        pairs = []
        while waiting and (slot := self.room(needed)) is not None:
            expert = waiting.popleft()
            pairs.append((slot, (self.number, expert)))
            self.arriving[expert] = slot
        self.store.begin(pairs)

    def arrived(self) -> tuple[int, Slot]:
        """Wait for the first expert that is being fetched. Raises TierError."""
        expert, slot = next(iter(self.arriving.items()))
        self.store.copies.wait(slot)
        del self.arriving[expert]
        return expert, slot

    def abandon(self) -> None:
        """Free slots whose copies are under way, when an error has ended a pass."""
        while self.arriving:
            _, slot = self.arriving.popitem()
            with contextlib.suppress(TierError):
                self.store.copies.wait(slot)
            self.store.landing.append(slot)

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
        freed = None
        if len(self.own) >= self.quota and (freed := self.evict(needed)) is None:
            return slot
        self.keep(expert, slot)
        return freed
