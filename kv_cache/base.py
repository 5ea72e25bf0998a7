"""What the model asks of a KV cache. One cache serves one layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Shape = tuple[int, int, int, int]


class KVCache(nn.Module):
    """Keys and values of one layer, and decode attention over them.

    B rows, K key/value heads, T positions of capacity, D head_dim. With a `window` a query sees
    only the last `window` positions.
    """

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
        for name, buffer in self.allocate(shape, dtype, device).items():
            self.register_buffer(name, buffer, persistent=False)

    def allocate(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """What the cache stores, by name, for keys and values of `shape` (B, K, T, D); zeros."""
        raise NotImplementedError

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value, (B, K, S, D), at the S positions `input_pos`."""
        raise NotImplementedError

    def attend(self, query: Tensor, input_pos: Tensor) -> Tensor:
        """Causal attention of query (B, H, S, D), at positions `input_pos` (S,), over the cache."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything, keeping the memory."""
        for buffer in self.buffers():
            buffer.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes this cache holds, from shapes alone: it is right on the meta device too."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())


# (max_batch_size, kv_heads, max_seq_length, head_dim, dtype, device, window) -> the layer's cache
CacheFactory = Callable[[int, int, int, int, torch.dtype, torch.device | str, int | None], KVCache]
