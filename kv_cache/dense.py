"""Keys and values unquantized, in the model's dtype."""

from torch import Tensor

from quantbench.kv_cache.base import KVCache


class DenseKVCache(KVCache):
    """2 · B · K · T · D elements of `dtype`."""

    format = "dense"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"codes": x}
