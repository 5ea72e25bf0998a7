"""Both memories of a model's experts as its layers see them: bytes in one, slots in the other."""

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quantbench.errors import KernelError, TierError
from quantbench.experts import copies, stopwatch
from quantbench.experts.copies import Slot
from quantbench.experts.layout import Layout
from quantbench.experts.slow import Key, SlowTier, pages
from quantbench.experts.traffic import Traffic


@dataclass(frozen=True)
class Policy:
    """What happens to an expert that a token takes and that is not in fast memory."""

    name: str
    fetches: bool  # it is copied into fast memory, or else computed in the slow tier
    caches: bool  # a fetched expert stays, in place of its layer's least recently used one


POLICIES = {
    "fetch": Policy("fetch", fetches=True, caches=False),
    "compute_there": Policy("compute_there", fetches=False, caches=False),
    "cache": Policy("cache", fetches=True, caches=True),
}


class Store:
    """All experts in the slow tier, and room in the fast one."""

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
        self.copies = copies.make(slow, device)
        # Held for a layer by the model's modules, and for a step by the fused one.
        self.lock = threading.Lock()
        self.traffic = Traffic()
        self.stopwatch = stopwatch.of(device)  # of the layers' experts, by the model's modules
        self.experts_each = len(keys) // max(1, len({layer for layer, _ in keys}))  # of a layer
        self.arrivals = 0  # experts that can be on their way: slots of the landing
        self.landing: list[Slot] = []  # those of them that are free
        self.skeleton: nn.Module = nn.Identity()  # an expert without weights
        self._layouts: dict[bool, Layout] = {}  # of `slow`, and whether of `beneath`
        self._in_place: dict[Key, nn.Module] = {}

    @property
    def layout(self) -> Layout:
        """The layout of an expert in fast memory."""
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
        """Set the layout of experts that are in the slow tier already."""
        self._layouts[False] = layout

    def in_place(self, key: Key) -> nn.Module:
        """An expert that computes in the slow tier, with its weights where they lie. TierError."""
        slow = self.beneath or self.slow
        slow.check()
        if key not in self._in_place:
            layout = self._layouts[self.beneath is not None]
            self._in_place[key] = layout.expert(self.skeleton, slow.in_place(key))
        return self._in_place[key]

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        """Begin to copy these experts, in this order. Raises TierError."""
        if pairs:
            self.traffic.fetches += len(pairs)
            self.traffic.bytes_moved += len(pairs) * self.layout.nbytes
            self.copies.begin(pairs)

    def abandon(self, slots: Iterable[Slot]) -> None:
        """Make slots free whose copies are under way, when an error has ended a pass."""
        for slot in slots:
            with contextlib.suppress(TierError):
                self.copies.wait(slot)
            self.landing.append(slot)
