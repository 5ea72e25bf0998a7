"""Keys and values unquantized, in the model's dtype."""

import torch
from torch import Tensor

from quantbench.kv_cache.base import KVCache, Shape


class DenseKVCache(KVCache):
    """2 · B · K · T · D elements of `dtype`."""

    format = "dense"

    def allocate(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        return {"codes": torch.zeros(shape, dtype=dtype, device=device)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"codes": x}
