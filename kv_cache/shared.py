"""The cache of a layer that reads the keys and values of an earlier layer."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from quantbench.kv_cache.base import KVCache
from quantbench.ops.kv import StoredCache


class SharedKVCache(KVCache):
    """Holds nothing: the earlier layer's cache has all keys and values."""

    def __init__(self, source: KVCache) -> None:
        nn.Module.__init__(self)
        self.__dict__["source"] = source  # no child module: buffers count once
        self.format = source.format  # type: ignore[misc]
        self.slots, self.window, self.kernel = source.slots, source.window, source.kernel

    def stored(self, name: str, rows: int) -> StoredCache:
        return self.source.stored(name, rows)

    def fill(self, depth: int) -> None:
        """The earlier layer's cache is filled."""


def source_of(layers: Sequence[Any], number: int) -> int:
    """The layer whose keys and values a layer that shares them reads: the last one before it that
    has its own, and a window as it has, or none. layers: the model's LayerSpecs. Raises ValueError
    where there is none."""
    window = layers[number].window
    before = range(number)
    return max(i for i in before if not layers[i].shared and layers[i].window == window)
