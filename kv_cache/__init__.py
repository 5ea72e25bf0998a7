"""The kinds of KV cache by the names that --kv_cache accepts. A new one is a class and a line here.

Classes are named, not imported: the command line reads the names, and needs no torch for that.
"""

from __future__ import annotations

import pkgutil
from collections import UserDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantbench.kv_cache.base import KVCache


class Caches(UserDict[str, Any]):
    """Classes by name, each imported at its first use."""

    def __getitem__(self, name: str) -> type[KVCache]:
        return pkgutil.resolve_name(super().__getitem__(name))


CACHES = Caches(
    {
        "dense": "quantbench.kv_cache.dense:DenseKVCache",
        "int8": "quantbench.kv_cache.eight_bit:Int8KVCache",
        "fp8": "quantbench.kv_cache.eight_bit:Float8KVCache",
        "int4": "quantbench.kv_cache.int4:Int4KVCache",
    }
)
