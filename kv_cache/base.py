"""What the model asks of a KV cache, and what all caches share. One cache serves one layer."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from kernels.kv import Stored, dequantize
from kernels.reference import attention

Shape = tuple[int, int, int, int]


class KVCache(nn.Module):
    """Keys and values of one layer, and decode attention over them.

    B rows, K key/value heads, T positions of capacity, D head_dim. With a `window` a query sees
    only the last `window` positions. A kind of cache says what it stores for a key or value
    (`allocate`) and how (`encode`); kernels/kv.py says what its `format` means.
    """

    format: ClassVar[str]

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
        self.capacity, self.window, self.dtype = max_seq_length, window, dtype
        shape = (max_batch_size, kv_heads, max_seq_length, head_dim)
        for name in ("key", "value"):
            for part, buffer in self.allocate(shape, dtype, device).items():
                self.register_buffer(f"{name}_{part}", buffer, persistent=False)

    def allocate(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Zeros for "codes", and "scale" if there is one, of keys or of values (B, K, T, D)."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """What stands for keys or values x (B, K, S, D), by the same names."""
        raise NotImplementedError

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value, (B, K, S, D), at the S positions `input_pos`."""
        for name, x in (("key", key), ("value", value)):
            for part, tensor in self.encode(x).items():
                getattr(self, f"{name}_{part}")[: x.shape[0], :, input_pos] = tensor

    def stored(self, name: str, rows: int) -> Stored:
        """The first rows' "key" or "value" as kernels take them."""
        scale = getattr(self, f"{name}_scale", None)
        codes = getattr(self, f"{name}_codes")
        return Stored(codes[:rows], None if scale is None else scale[:rows], self.format)

    def attend(self, query: Tensor, input_pos: Tensor) -> Tensor:
        """Causal attention of query (B, H, S, D), at positions `input_pos` (S,), over the cache."""
        rows = query.shape[0]
        key, value = (dequantize(self.stored(n, rows), query.dtype) for n in ("key", "value"))
        positions = torch.arange(self.capacity, device=query.device)
        return attention(query, key, value, input_pos, positions, self.window)

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
