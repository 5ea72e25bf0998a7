"""Keys and values as they are, in the model's own dtype."""

import torch
from torch import Tensor

from kernels.reference import attention
from kv_cache.base import KVCache, Shape


class DenseKVCache(KVCache):
    """2 · B · K · T · D elements of `dtype`."""

    def allocate(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("key", "value")}

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> None:
        rows = key.shape[0]
        self.key[:rows, :, input_pos] = key
        self.value[:rows, :, input_pos] = value

    def attend(self, query: Tensor, input_pos: Tensor) -> Tensor:
        rows = query.shape[0]
        positions = torch.arange(self.capacity, device=query.device)
        return attention(
            query, self.key[:rows], self.value[:rows], input_pos, positions, self.window
        )
