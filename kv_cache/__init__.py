"""The kinds of KV cache, by the names that --kv_cache accepts."""

from kv_cache.base import KVCache
from kv_cache.dense import DenseKVCache
from kv_cache.eight_bit import Float8KVCache, Int8KVCache
from kv_cache.int4 import Int4KVCache

CACHES: dict[str, type[KVCache]] = {
    "dense": DenseKVCache,
    "int8": Int8KVCache,
    "fp8": Float8KVCache,
    "int4": Int4KVCache,
}
