"""Keys and values as they are, in the model's own dtype."""

import torch
from torch import Tensor

from kernels.reference import attention
from kv_cache.base import KVCache


class DenseKVCache(KVCache):
    """2 · B · K · T · D elements of `dtype`."""

    def __init__(
        self,
        max_batch_size: int,
        kv_heads: int,
        max_seq_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.capacity, self.window = max_seq_length, window
        shape = (max_batch_size, kv_heads, max_seq_length, head_dim)
        self.register_buffer("key", torch.zeros(shape, dtype=dtype, device=device), False)
        self.register_buffer("value", torch.zeros(shape, dtype=dtype, device=device), False)

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
