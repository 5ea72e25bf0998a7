"""What the model needs of a KV cache, and what all kinds of cache share. Each layer has its own."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from quantbench.ops.attention import decode_attention
from quantbench.ops.kv import Stored, dequantize
from quantbench.ops.prefill_attention import chunk_attention

Shape = tuple[int, int, int, int]
FILLED_AT_ONCE = 4096  # positions for which `fill` draws random numbers at a time


class KVCache(nn.Module):
    """Keys and values of one layer, and attention over them.

    B rows, K key/value heads, T slots, D head_dim. T is the number of positions, but at most
    `window`, if there is one: then a query attends only to the last `window` positions, and a new
    position overwrites the oldest. A kind of cache defines what it stores for keys and values
    (`allocate`, `encode`), and the `format` in which kernels read it.
    """

    format: ClassVar[str]  # of ops/kv.py; any other is read as codes · scale, by plain torch

    def __init__(
        self,
        max_batch_size: int,
        kv_heads: int,
        max_seq_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
        kernel: str = "torch",
    ) -> None:
        """dtype: of keys, values and scales. window: positions of a sliding window, or None.
        kernel: the one of ops/attention.py that decodes over the cache.

        Raises UsageError for a head_dim that the format does not support.
        """
        super().__init__()
        self.kernel = kernel
        self.slots = min(max_seq_length, window or max_seq_length)
        self.window, self.head_dim, self.dtype = window, head_dim, dtype
        shape = (max_batch_size, kv_heads, self.slots, head_dim)
        for name in ("key", "value"):
            for part, buffer in self.allocate(shape, dtype, device).items():
                self.register_buffer(f"{name}_{part}", buffer, persistent=False)

    def allocate(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Zeros for the "codes", and the "scale" if the format has one, of (B, K, T, D) numbers."""
        raise NotImplementedError

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The codes and the scale of keys or values x (B, K, S, D), by the names of `allocate`."""
        raise NotImplementedError

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value, (B, K, S, D), at the S consecutive positions `input_pos`."""
        last = slice(-self.slots, None)  # if there are more positions than slots, the last ones
        slots = input_pos[last] if self.window is None else input_pos[last] % self.slots
        for name, x in (("key", key), ("value", value)):
            for part, tensor in self.encode(x[:, :, last]).items():
                getattr(self, f"{name}_{part}")[: x.shape[0], :, slots] = tensor

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        input_pos: Tensor,
        start: int | None = None,
    ) -> Tensor:
        """Store key and value; return the causal attention of the query to all that is stored.

        query (B, H, S, D), H a multiple of K; key and value (B, K, S, D); input_pos (S,) int64,
        consecutive. start: input_pos[0] as an int; if not given and S > 1, it is read from the
        device. Returns (B, H, S, D) in query's dtype. With S = 1 only the slots that are filled are
        read, once for all heads that share them.
        """
        if query.shape[2] == 1:
            self.update(input_pos, key, value)
            return self._decode(query[:, :, 0], input_pos)[:, :, None]
        rows = query.shape[0]
        start = int(input_pos[0]) if start is None else start
        own = [self._as_read(x) for x in (key, value)]
        past = [self.stored(name, rows) for name in ("key", "value")]
        y = chunk_attention(query, *own, *past, start, self.window)
        self.update(input_pos, key, value)  # last, because it may overwrite the oldest slots
        return y

    def _decode(self, query: Tensor, input_pos: Tensor) -> Tensor:
        """Attention of one position's query (B, H, D)."""
        rows, end = query.shape[0], input_pos + 1
        count = end.clamp(max=self.slots)
        first = torch.zeros_like(end) if self.window is None else (end - count) % self.slots
        key, value = (self.stored(name, rows) for name in ("key", "value"))
        return decode_attention(
            self.kernel, query, key, value, first.expand(rows), count.expand(rows)
        )

    def _as_read(self, x: Tensor) -> Tensor:
        """Keys or values (B, K, S, D), encoded and decoded again."""
        parts = self.encode(x)
        stored = Stored(parts["codes"], parts.get("scale"), self.format)
        return dequantize(stored, x.dtype)

    def stored(self, name: str, rows: int) -> Stored:
        """The "key" or "value" of the first `rows` rows, as kernels take them."""
        scale = getattr(self, f"{name}_scale", None)
        codes = getattr(self, f"{name}_codes")
        return Stored(codes[:rows], None if scale is None else scale[:rows], self.format)

    def fill(self, depth: int) -> None:
        """Store random keys and values at positions 0 to depth - 1, to measure a long context."""
        for positions in torch.arange(depth).split(FILLED_AT_ONCE):
            buffer = self.key_codes
            shape = (*buffer.shape[:2], len(positions), self.head_dim)
            key, value = (torch.randn(shape, device=buffer.device).to(self.dtype) for _ in "kv")
            self.update(positions.to(buffer.device), key, value)

    def reset(self) -> None:
        """Set all slots to zero."""
        for buffer in self.buffers():
            buffer.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of this cache, from shapes alone, so on the meta device, too."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in float32; 0 where that is no finite number: for a scale that is 0, NaN, or so
    small that 1 / scale overflows."""
    return (1 / scale.float()).nan_to_num(0.0, 0.0, 0.0)


# (max_batch_size, kv_heads, max_seq_length, head_dim, dtype, device, window) -> a layer's cache
CacheFactory = Callable[[int, int, int, int, torch.dtype, torch.device | str, int | None], KVCache]
