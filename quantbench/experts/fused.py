"""Experts in two tiers of memory for the fused decoding step (ops/cpu/step.py).

    table = fused.table(layer, experts)     # an argument of the step's op, in the place of W2
    with fused.stepping():                  # one step at a time
        decoder.step(…)

The op reads the address of each expert in its layer's table; zero: the expert is not in fast
memory. While all experts that it needs are there, it calls nothing. Otherwise it calls back from
the middle of the step (`Turn::ask` in ops/cpu/src/step/experts.h) with the experts that the tokens
need. The policy brings them here, and their addresses are written into the table. While copies are
under way, the op computes with what is there, and calls back a second time (`Turn::wait`) when it
needs the others.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quantbench.experts.copies import Slot
from quantbench.experts.layer import TieredLayer
from quantbench.experts.slow import numbers_of
from quantbench.ops.cpu import step
from quantbench.quantize.kernel import fused_weight

if TYPE_CHECKING:
    from quantbench.experts.tiers import Tiers

# The numbers of `Turn` in ops/cpu/src/step/experts.h, by their places, and its lists' beginning.
ASK, WAIT, CLOCK, ASSIGNMENTS, HITS, NANOSECONDS, WANTED, LISTS = range(8)


class Fused:
    """The experts of one model, as its fused steps find and ask for them."""

    def __init__(self, store: "Tiers") -> None:
        self.store, self.layers = store, store.layers
        self.every = store.mixture.num_experts  # of a layer
        self.turn = torch.zeros(LISTS + 2 * self.every, dtype=torch.int64)
        self.numbers = numbers_of(self.turn)
        function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
        self.callbacks = [function(self._callback(of)) for of in (self._begin, self._finish)]
        for place, callback in zip((ASK, WAIT), self.callbacks, strict=True):
            self.numbers[place] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        self.error: BaseException | None = None  # why the step that is under way cannot go on
        self.wanted: list[int] = []  # experts that the op has asked for last
        # Experts that the op computes with until it asks again, and their slots of the landing;
        # None: in the slow tier.
        self.lent: list[tuple[TieredLayer, int, Slot | None]] = []
        self.tables: dict[int, Tensor] = {}  # by the layer's number

    # ------------------------------------------------------------------------------ the op

    def table(self, layer: TieredLayer, experts: step.Experts) -> Tensor:
        """The table of a layer's experts, the same one for all steps.

        experts: of this layer; their networks are replaced.
        """
        with self.store.lock:
            if layer.number not in self.tables:
                used = torch.zeros(self.every, dtype=torch.int64)
                moving = self.turn.data_ptr(), used.data_ptr(), layer.number
                table = replace(experts, networks=self._networks(), moving=moving).table()
                self.tables[layer.number] = table
                layer.used = numbers_of(used)
                layer.places = numbers_of(table)[step.TABLE_HEAD :]
                for expert, slot in layer.own.items():
                    layer.show(expert, slot.addresses)
            return self.tables[layer.number]

    def _networks(self) -> step.Networks:
        """An expert's matrices, without numbers."""
        layout, skeleton = self.store.layout, self.store.skeleton
        expert = layout.expert(
            skeleton, torch.empty(layout.nbytes, dtype=torch.uint8, device="meta")
        )
        w13, w2 = (fused_weight(expert.get_submodule(name)) for name in ("w13", "w2"))
        assert w13 is not None and w2 is not None  # or the fused step would have been refused
        w2_layer = skeleton.get_submodule("w2")
        assert isinstance(w2_layer, nn.Linear)
        return step.Networks([w13], [w2], w2_layer.in_features)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step. Raises the error of a callback, such as TierError."""
        with self.store.lock:
            self.error = None
            try:
                yield
            except RuntimeError:
                if self.error is None:
                    raise
                raise self.error from None
            finally:
                for layer in self.layers.values():
                    layer.abandon()
                self._take_back()

    def count(self) -> None:
        """Add what the op has counted to the store's traffic."""
        numbers, traffic = self.numbers, self.store.traffic
        traffic.assignments += numbers[ASSIGNMENTS]
        traffic.hits += numbers[HITS]
        traffic.expert_seconds += numbers[NANOSECONDS] / 1e9
        numbers[ASSIGNMENTS] = numbers[HITS] = numbers[NANOSECONDS] = 0

    # ------------------------------------------------------------------------------ a turn

    def _callback(self, method: Callable[[TieredLayer], int]) -> Callable[[int], int]:
        """A method as the op calls it, with a layer's number. The op may not meet an exception: it
        ends the step if 0 is returned."""

        def call(number: int) -> int:
            try:
                return method(self.layers[number])
            except BaseException as error:
                self.error = error
                return 0

        return call

    def _begin(self, layer: TieredLayer) -> int:
        """`Turn::ask`: start to bring the wanted experts of a layer, as far as there is room.

        Returns how many of them, the first ones, are there or arrive. Raises TierError.
        """
        store, traffic, numbers = self.store, self.store.traffic, self.numbers
        count, second = numbers[WANTED], LISTS + self.every
        self.wanted = numbers[LISTS : LISTS + count].tolist()
        self._take_back()
        layer.note_uses()
        tokens = dict(zip(self.wanted, numbers[second : second + count], strict=True))
        missing = deque(expert for expert in self.wanted if expert not in layer.own)
        if store.policy.fetches:
            layer.fetch(missing, self.wanted)
            traffic.fetched += sum(map(tokens.__getitem__, layer.arriving))
            return self.wanted.index(missing[0]) if missing else count
        for expert in missing:
            layer.show(expert, store.in_place((layer.number, expert)).addresses)
            self.lent.append((layer, expert, None))
            traffic.there += tokens[expert]
        return count

    def _finish(self, layer: TieredLayer) -> int:
        """`Turn::wait`: wait for what arrives, and show it to the op. Raises TierError."""
        while layer.arriving:
            expert, slot = layer.arrived()
            freed = layer.settle(expert, slot, self.wanted)
            if freed is slot:
                layer.show(expert, slot.addresses)
                self.lent.append((layer, expert, slot))
            elif freed:
                self.store.landing.append(freed)
        return 1

    def _take_back(self) -> None:
        """Free what was lent for a turn."""
        for layer, expert, slot in self.lent:
            layer.show(expert, (0, 0))
            if slot:
                self.store.landing.append(slot)
        self.lent.clear()
