"""Both memories of a model's experts as its layers see them: bytes in one, slots in the other."""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import nn

from quantbench.errors import KernelError
from quantbench.experts import copies, stopwatch
from quantbench.experts.copies import Slot
from quantbench.experts.guessing import Guessing, Prices
from quantbench.experts.layout import Layout
from quantbench.experts.slow import Key, SlowTier, pages
from quantbench.experts.traffic import Traffic


class Guesses(Enum):
    """Whether experts are fetched that the next layer will probably want."""

    ALWAYS = "always"
    WHILE_RIGHT = "while right"  # as long as guesses are right often enough (guessing.py)
    NEVER = "never"


@dataclass(frozen=True)
class Policy:
    """What happens to an expert that a token takes and that does not lie in fast memory."""

    caches: bool  # a fetched expert stays, in place of its layer's least recently used one
    computes_there: bool  # it may be computed in the slow tier …
    fetches: bool  # … or fetched; where both are possible, the cost model decides
    ahead: bool = False  # whether copies run beside the computing
    guesses: Guesses = Guesses.ALWAYS  # then: whether the next layer's likely experts are fetched


POLICIES = {
    "fetch": Policy(caches=False, computes_there=False, fetches=True),
    "compute_there": Policy(caches=False, computes_there=True, fetches=False),
    "cache": Policy(caches=True, computes_there=False, fetches=True),
    "auto": Policy(caches=True, computes_there=True, fetches=True),
}


class Share(NamedTuple):
    """Some experts of a layer, and the tokens that they have together."""

    experts: int
    tokens: int


class Turn(NamedTuple):
    """What a fused step did with the experts of a layer, not all of which were in fast memory."""

    here: Share  # in fast memory
    late: Share  # on their way when its turn came, or fetched then
    there: Share  # computed in the slow tier
    begun: int  # copies that were asked for when its turn came
    ahead: int  # copies that were asked for with these, for the next layer
    asked: Iterable[float]  # when those were asked for that were on their way before
    started: float  # when its turn came


class Decide(Protocol):
    """Who computes a layer's experts, and how long it will take; costs.Decider."""

    def __call__(
        self,
        tokens: Sequence[int],
        fast: Collection[int],
        asked: Iterable[float],
        arriving: Collection[int] = (),
    ) -> tuple[Collection[int], float]:
        """The experts that are to be computed in the slow tier, and the seconds of all.

        tokens: of each expert. fast: those in fast memory or on their way there. asked: when the
        copies on their way were asked for. arriving: those of `fast` that are on their way.
        """

    def resident(self, experts: int, tokens: int) -> float:
        """Seconds of so many experts in fast memory, with so many tokens together."""

    def turn(self, turn: Turn) -> float:
        """Seconds of a layer's experts in a fused step."""


class Store:
    """All experts in the slow tier, room in the fast one, and what is on its way."""

    def __init__(
        self,
        slow: SlowTier,
        beneath: SlowTier | None,
        keys: Sequence[Key],
        width: int,
        device: torch.device,
        policy: Policy,
    ) -> None:
        """beneath: where the slow tier's own processor finds the experts; None: in `slow`.

        keys: of all experts. width: how many experts a token has in a layer.
        """
        self.slow, self.beneath, self.keys, self.width = slow, beneath, keys, width
        self.device, self.policy = device, policy
        self.decide: Decide | None = None  # for a policy that leaves a choice
        self.copies = copies.make(slow, device)
        # Held for a layer by the model's modules, and for a step by the fused one.
        self.lock = threading.Lock()
        self.traffic = Traffic()
        self.stopwatch = stopwatch.of(device)  # of the layers' experts, by the model's modules
        self.guessing = Guessing(Prices())  # of the model's modules: a copy saved, a copy lost
        self.experts_each = len(keys) // max(1, len({layer for layer, _ in keys}))  # of a layer
        self.begin_seconds = 0.0  # in `begin`
        self.arrivals = 0  # experts that can be on their way: the slots of the landing
        self.landing: list[Slot] = []  # those of them that are free
        self.coming: dict[Key, Slot] = {}  # asked for ahead
        self.asked: dict[Key, float] = {}  # when each copy that is under way was asked for
        self.abandoned: list[Slot] = []  # of the landing; a copy that nobody wants is under way
        self.skeleton: nn.Module = nn.Identity()  # an expert without weights
        self._layouts: dict[bool, Layout] = {}  # of `slow`, and whether of `beneath`
        self._in_place: dict[Key, nn.Module] = {}

    @property
    def layout(self) -> Layout:
        """Of an expert in fast memory."""
        return self._layouts[False]

    def take(self, key: Key, linears: Mapping[str, nn.Module], beneath: bool = False) -> None:
        """Put an expert into the slow tier. Raises TierError, KernelError."""
        slow = self.beneath if beneath and self.beneath else self.slow
        layout = Layout.of(linears)
        if beneath not in self._layouts:
            slow.reserve(self.keys, layout.nbytes)
        known = self._layouts.setdefault(beneath, layout)
        if known != layout:
            raise KernelError(
                f"--expert_memory: expert {key[1]} of layer {key[0]} is stored in another way than "
                "the first one; give one --quantization and --kernel for all"
            )
        block = pages(layout.nbytes)
        known.write(linears, block)
        slow.put(key, block)

    def know(self, layout: Layout) -> None:
        """The layout of experts that lie in the slow tier already."""
        self._layouts[False] = layout

    def in_place(self, key: Key) -> nn.Module:
        """An expert that computes in the slow tier, with its weights where they lie."""
        slow = self.beneath or self.slow
        slow.check()
        if key not in self._in_place:
            layout = self._layouts[self.beneath is not None]
            self._in_place[key] = layout.expert(self.skeleton, slow.in_place(key))
        return self._in_place[key]

    # ------------------------------------------------------------------------------ the landing

    def room(self, wait: bool) -> Slot | None:
        """A free slot of the landing; None if there is none, or not without waiting."""
        for slot in list(self.abandoned):
            if self.copies.abandon(slot):
                self.abandoned.remove(slot)
                self.landing.append(slot)
        if self.landing:
            return self.landing.pop()
        if not self.abandoned or not wait:
            return None
        slot = self.abandoned.pop()
        self.copies.wait(slot)
        return slot

    def forget(self, wanted: Collection[Key]) -> None:
        """Give up what was asked for ahead and is not wanted."""
        for key in [key for key in self.coming if key not in wanted]:
            slot = self.coming.pop(key)
            self.traffic.unused += 1
            (self.landing if self.copies.abandon(slot) else self.abandoned).append(slot)
        under_way = {*self.coming, *(slot.key for slot in self.abandoned)}
        self.asked = {key: at for key, at in self.asked.items() if key in under_way}

    def fetch(self, slot: Slot, key: Key) -> None:
        """Copy an expert while nothing else happens. Raises TierError."""
        self._count_copies(1)
        self.copies.now(slot, key)

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        """Begin to copy these experts, in this order. Raises TierError."""
        if not pairs:
            return
        now = time.perf_counter()
        for _, key in pairs:
            self.asked.pop(key, None)  # so that the order is that of asking
            self.asked[key] = now
        self._count_copies(len(pairs))
        self.copies.begin(pairs)
        self.begin_seconds += time.perf_counter() - now

    def _count_copies(self, count: int) -> None:
        self.traffic.fetches += count
        self.traffic.bytes_moved += count * self.layout.nbytes
