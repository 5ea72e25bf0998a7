"""The experts of a model in two tiers: all in slow memory, and some of them in fast memory, too.

    tiers = Tiers(new_file(folder), architecture, device, POLICIES["cache"])
    model = load_model(…, transform=tiers.after(quantizer))     # each expert goes to the slow tier
    tiers.attach(model)                                         # now the model computes, slowly
    tiers.hold(fast, slots=20)                                  # these experts are in fast memory
    tiers.traffic.hits

Fast memory is a number of slots, each for one expert. A few of them are the landing: experts that
are fetched arrive there, as many as a token has in a layer. The others belong to layers, at first
to those whose experts a placement puts there. A layer's experts that no token takes are not fetched
and not computed; the others are computed in any order and added up in the order of their numbers,
so that the sums are those of a model in one memory.
"""

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from quantbench.devices import Stopwatch
from quantbench.errors import KernelError
from quantbench.experts import copies
from quantbench.experts.copies import Slot
from quantbench.experts.fused import Fused
from quantbench.experts.layer import TieredLayer
from quantbench.experts.layout import ExpertLayout, without_weights
from quantbench.experts.slow import File, Key, SlowTier, pages
from quantbench.log.config import RunConfig
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.loading import Stages
from quantbench.models.mixtral import Mixtral, MixtureOfExperts
from quantbench.models.tensor_layout import with_parameters
from quantbench.run.expert_traffic import Traffic, TwoTiers
from quantbench.text import size

LINEAR = re.compile(r"layers\.(\d+)\.feed_forward\.experts\.(\d+)\.(\w+)")
LINEARS = {"w13", "w2"}  # of a FeedForward
AT_ONCE = 64  # experts that are read together when fast memory is filled


def keys_of(architecture: ModelConfig) -> list[Key]:
    """All experts of a model, in the order in which they are loaded."""
    mixture = architecture.mixture
    assert mixture is not None
    layers = [i for i in range(architecture.num_layers) if not mixture.is_dense(i)]
    return [(layer, expert) for layer in layers for expert in range(mixture.num_experts)]


class Policy(NamedTuple):
    """What happens to an expert that a token takes and that is not in fast memory."""

    name: str
    fetches: bool  # it is copied into fast memory, or else computed in the slow tier
    caches: bool  # a fetched expert stays, in place of its layer's least recently used one


POLICIES = {
    "fetch": Policy("fetch", fetches=True, caches=False),
    "compute_there": Policy("compute_there", fetches=False, caches=False),
    "cache": Policy("cache", fetches=True, caches=True),
}


class Tiers:
    """All experts of one model: bytes in the slow tier, slots in the fast one."""

    def __init__(
        self,
        slow: SlowTier,
        architecture: ModelConfig,
        device: torch.device,
        policy: Policy,
        beneath: tuple[SlowTier, Stages] | None = None,
    ) -> None:
        """device: that of the fast tier, and of the rest of the model.

        beneath: if another processor than the device computes with experts in the slow tier: where
        they are in the form of its kernels, and what brings them into that form.
        """
        assert architecture.mixture is not None
        self.slow, self.device, self.policy = slow, device, policy
        self.beneath = beneath[0] if beneath else None
        self.stages_beneath = beneath[1] if beneath else None
        self.mixture, self.keys = architecture.mixture, keys_of(architecture)
        self.layers: dict[int, TieredLayer] = {}
        self.fused: Fused | None = None  # for the fused step, which is the CPU's
        self.copies = copies.make(slow, device)
        # Held for a layer by the model's modules, and for a step by the fused one.
        self.lock = threading.Lock()
        self.traffic = Traffic()
        self.stopwatch = Stopwatch(device)  # of the layers' experts, by the model's modules
        self.arrivals = 0  # slots of the landing: experts that can be fetched at a time
        self.landing: list[Slot] = []  # those of them that are free
        self.skeleton: nn.Module = nn.Identity()  # an expert without weights
        # Its linear layers, if a saved file has all experts.
        self.pattern: dict[str, nn.Module] = {}
        self._layouts: dict[SlowTier, ExpertLayout] = {}
        self._in_place: dict[Key, Slot] = {}

    @property
    def layout(self) -> ExpertLayout:
        """The layout of an expert in fast memory."""
        return self._layouts[self.slow]

    def after(self, stages: Stages) -> "Arriving":
        """A quantizer whose experts go to the slow tier as soon as they have their kernels."""
        return Arriving(stages, self)

    def are_stored(self, linears: Mapping[str, nn.Module]) -> None:
        """Note that the slow tier has all experts, in the layout of these linear layers."""
        self._layouts[self.slow] = ExpertLayout.of(linears)
        self.pattern = {name: without_weights(linear) for name, linear in linears.items()}

    def put(self, slow: SlowTier, key: Key, linears: Mapping[str, nn.Module]) -> None:
        """Put an expert into a slow tier. Raises TierError, KernelError."""
        layout = ExpertLayout.of(linears)
        if slow not in self._layouts:
            slow.reserve(self.keys, layout.nbytes)
        if self._layouts.setdefault(slow, layout) != layout:
            raise KernelError(
                f"--expert_memory: expert {key[1]} of layer {key[0]} is stored in another way than "
                "the first one; give one --quantization and --kernel for all"
            )
        block = pages(layout.nbytes)
        layout.write(linears, block)
        slow.put(key, block)

    def keep(self) -> bool:
        """Whether --save leaves the experts' file, which is then on the disk. Raises TierError."""
        if not isinstance(self.slow, File) or not self.slow.kept:
            return False
        self.slow.sync()
        return True

    def in_place(self, key: Key) -> Slot:
        """An expert in the slow tier, to compute with its weights there. Raises TierError."""
        slow = self.beneath or self.slow
        slow.check()
        if key not in self._in_place:
            buffer = slow.in_place(key)
            expert = self._layouts[slow].expert(self.skeleton, buffer)
            self._in_place[key] = Slot(buffer, expert)
        return self._in_place[key]

    def begin(self, pairs: Sequence[tuple[Slot, Key]]) -> None:
        """Start to copy these experts, in this order. Raises TierError."""
        if pairs:
            self.traffic.fetches += len(pairs)
            self.traffic.bytes_moved += len(pairs) * self.layout.nbytes
            self.copies.begin(pairs)

    def attach(self, model: Transformer) -> None:
        """Let a model compute with these experts; `hold` brings some into fast memory."""
        assert isinstance(model, Mixtral)
        for number, block in enumerate(model.layers):
            mixture = block.get_submodule("feed_forward")
            if isinstance(mixture, MixtureOfExperts):
                self.layers[number] = mixture.elsewhere = TieredLayer(self, number)
                self.skeleton = mixture.experts[0]
        if self.device.type == "cpu":
            self.fused = Fused(self)

    @property
    def least(self) -> int:
        """The smallest number of slots."""
        return self.mixture.experts_per_token if self.policy.fetches else 0

    def hold(self, fast: Sequence[Collection[int]], slots: int) -> None:
        """Fill fast memory anew: these experts of each layer, and the landing.

        slots: number of experts that fit, at least these and `least`, or all. If fetched experts
        stay, all layers share the slots that are left. Raises TierError.
        """
        count = sum(map(len, fast))
        landing = 0 if count == len(self.keys) else self.least
        assert count + landing <= slots
        for layer in self.layers.values():  # before new memory is allocated
            for expert in list(layer.own):
                layer.give_up(expert)
        self.landing.clear()
        empty = slots - count - landing if self.policy.caches else 0
        room = copies.buffers(count + landing + empty, self.layout.nbytes, self.device)
        filled = [Slot(buffer, self.layout.expert(self.skeleton, buffer)) for buffer in room]
        for slot in filled:
            self.copies.done(slot)
        self.landing = filled[count:]
        keys = [(number, expert) for number in self.layers for expert in sorted(fast[number])]
        for start in range(0, count, AT_ONCE):
            pairs = list(zip(filled, keys, strict=False))[start : start + AT_ONCE]
            self.copies.begin(pairs)
            for slot, (number, expert) in pairs:
                self.copies.wait(slot)
                self.layers[number].keep(expert, slot)
        for layer in self.layers.values():
            layer.quota = len(layer.own)
        for _ in range(empty):  # each to the layer that keeps the fewest
            min(self.layers.values(), key=lambda layer: layer.quota).quota += 1
        self.arrivals = landing
        self.copies.waits.seconds()

    @property
    def quotas(self) -> list[int]:
        """How many experts each layer with experts holds in fast memory, without the landing."""
        return [layer.quota for layer in self.layers.values()]

    def sentence(self) -> str:
        """Where the experts are; without a full stop."""
        held, every, nbytes = sum(self.quotas), len(self.keys), self.layout.nbytes
        landing = f", and room to fetch {self.arrivals}" if self.arrivals else ""
        return (
            f"Experts: {held} of {every} in fast memory ({size(held * nbytes)}){landing}; all on "
            f"{self.slow.name} ({size(every * nbytes)}; {self.slow.place})"
        )

    def counted(self) -> Traffic:
        """All that was counted until now."""
        if self.fused:
            self.fused.count()
        self.traffic.expert_seconds += self.stopwatch.seconds()
        self.traffic.waiting_seconds += self.copies.waits.seconds()
        return replace(self.traffic)

    def record(self, config: RunConfig) -> TwoTiers:
        """Where the experts are, and by which options."""
        return TwoTiers(
            fast=sum(self.quotas),
            landing=self.arrivals,
            every=len(self.keys),
            by_layer=self.quotas,
            expert_bytes=self.layout.nbytes,
            slow=self.slow.name,
            slow_place=self.slow.place,
            policy=config.expert_policy,
            followed=self.policy.name,
            placement=config.expert_placement,
        )


class Arriving:
    """A quantizer (models.loading.Holding) whose experts go to the slow tier."""

    def __init__(self, stages: Stages, tiers: Tiers) -> None:
        self.stages, self.tiers, self.quantized = stages, tiers, stages.quantized
        self.waiting: dict[str, nn.Module] = {}  # the linear layers of the expert that arrives
        self.beneath: dict[str, nn.Module] = {}  # the same for the slow tier's own kernels

    def held(self, name: str) -> nn.Module | None:
        """As models.loading.Holding."""
        match = LINEAR.fullmatch(name)
        pattern = self.tiers.pattern.get(match[3]) if match else None
        return without_weights(pattern) if pattern else None

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        match, tiers = LINEAR.fullmatch(name), self.tiers
        if match is None:
            return self.stages.built(name, layer)
        key, linear = (int(match[1]), int(match[2])), match[3]
        if tiers.stages_beneath:
            moved = {
                kind: nn.Parameter(p.data.cpu(), False) for kind, p in layer.named_parameters()
            }
            self.beneath[linear] = tiers.stages_beneath.built(name, with_parameters(layer, moved))
        self.waiting[linear] = built = self.stages.built(name, layer)
        if self.waiting.keys() == LINEARS:
            tiers.put(tiers.slow, key, self.waiting)
            if tiers.beneath:
                tiers.put(tiers.beneath, key, self.beneath)
            self.waiting, self.beneath = {}, {}
        return without_weights(built)
