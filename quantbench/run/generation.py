"""What one call of Generator.generate gives, and the interfaces that measuring needs of it.

Importing this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quantbench.experts.traffic import Phases
from quantbench.run.machine import MachineUse

if TYPE_CHECKING:
    from torch import Tensor

    from quantbench.kv_cache.base import KVCache
    from quantbench.models.llama import Transformer
    from quantbench.ops.attention import Choice
    from quantbench.run.decoding import Decoder


@dataclass(frozen=True)
class Generation:
    """What one call of Generator.generate gave, and how long it took."""

    tokens: Tensor  # the new ones, (B, N) int64
    prefill_seconds: float  # for the prompt and the first new token
    decode_seconds: float  # for the other N - 1 tokens
    machine: MachineUse | None = None  # meanwhile; None: not measured
    experts: Phases | None = None  # what two tiers of experts did; None: there is one


class Timed(Protocol):
    """The seconds of a sample."""

    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...


class OneSample(Protocol):
    """A function that takes sample number `index`, drawn with the seed --seed + index."""

    def __call__(
        self,
        index: int,
        tokens: int | None = None,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation: ...


class Generates(Protocol):
    """The interface of generate.Generator that measuring needs."""

    model: Transformer
    caches: list[KVCache]
    attention: Choice
    decoder: Decoder

    def stream(self, prompt: Tensor, start: int = 0) -> Iterator[Tensor]: ...

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        start: int = 0,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation: ...
