"""What layers remember of the positions before: KV caches, and states (state.py). Each layer has
its own.

key, value = cache.update(positions, key, value)
y = attend(query, key, value, positions)            # ops/attend.py
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from quantbench.ops.kv import Chunk, StoredCache, dequantize

FILLED_AT_ONCE = 4096  # positions for which `fill` draws random numbers at a time


class LayerMemory(nn.Module):
    """What one layer remembers of the positions it has read, in buffers that stay where they are.
    A new text begins at position 0, without a reset."""

    slots: int  # positions that it has room for

    def fill(self, depth: int) -> None:
        """Stand for a text of positions 0 to depth - 1, to measure a long context."""
        raise NotImplementedError

    def keep(self, count: int, read: int = 0) -> int:
        """The number of positions, `count` or 0, behind which the text can go on in another way.
        read: how many have been read. A KV cache can at all, as what it stored at later ones is not
        seen before it is replaced; but not where these lie in a window's earlier ones."""
        return count

    def go_back(self, count: int) -> None:
        """Be able to `keep` all but the last `count` positions."""

    @property
    def nbytes(self) -> int:
        """Bytes of this memory, from shapes alone, so on the meta device, too."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())


class KVCache(LayerMemory):
    """Keys and values of one layer.

    B rows, K key/value heads, T slots, D head_dim. T is the number of positions, but at most
    `window`, if there is one: then a query attends only to the last `window` positions, and a new
    position overwrites the oldest. A kind of cache defines what it stores for keys and values
    (`encode`), and the `format` in which kernels read it.
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
        shape = (max_batch_size, kv_heads, self.slots)
        counted = "cpu" if str(device) == "meta" else device  # torch imports a compiler for meta
        stored = self.encode(torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=counted))
        for name in ("key", "value"):
            for part, like in stored.items():
                buffer = torch.zeros(*shape, like.shape[-1], dtype=like.dtype, device=device)
                self.register_buffer(f"{name}_{part}", buffer, persistent=False)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The "codes", and the "scale" if the format has one, of keys or values x (B, K, S, D); of
        each a tensor (B, K, S, …)."""
        raise NotImplementedError

    def update(
        self, positions: Tensor, key: Tensor, value: Tensor
    ) -> tuple[StoredCache | Chunk, StoredCache | Chunk]:
        """Store key and value, (B, K, S, D), at the S consecutive `positions`; return what
        ops.attend reads: of one position all that is stored, of more a chunk and its past."""
        sides = {"key": self.encode(key), "value": self.encode(value)}
        if key.shape[2] == 1:
            self._write(positions, sides)
            return self.stored("key", len(key)), self.stored("value", len(value))
        decoded = {
            name: dequantize(StoredCache(x["codes"], x.get("scale"), self.format), key.dtype)
            for name, x in sides.items()
        }
        past = {name: self.stored(name, len(key)) for name in sides}
        first = self._slots(positions[: self.slots])
        before = {name: x.gathered(first) if self.wraps else None for name, x in past.items()}
        self._write(positions, sides)
        key_chunk, value_chunk = (Chunk(decoded[name], past[name], before[name]) for name in sides)
        return key_chunk, value_chunk

    def keep(self, count: int, read: int = 0) -> int:
        # The next token does not see the position that lies a whole window before it.
        return 0 if self.wraps and max(self.slots, count + 1) < read else count

    @property
    def wraps(self) -> bool:
        """Whether a new position may overwrite an older one."""
        return self.window is not None and self.slots == self.window

    def store(self, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """`update` alone."""
        self._write(positions, {"key": self.encode(key), "value": self.encode(value)})

    def _write(self, positions: Tensor, sides: dict[str, dict[str, Tensor]]) -> None:
        last = slice(-self.slots, None)  # if there are more positions than slots, the last ones
        slots = self._slots(positions[last])
        rows, heads = sides["key"]["codes"].shape[:2]
        # By three indices, and not into a slice of some rows: what is compiled for a varying number
        # of rows would copy the whole buffer, twice, to write into a slice of it.
        row = torch.arange(rows, device=slots.device)[:, None, None]
        head = torch.arange(heads, device=slots.device)[:, None]
        for name, parts in sides.items():
            for part, x in parts.items():
                getattr(self, f"{name}_{part}")[row, head, slots] = x[:, :, last]

    def _slots(self, positions: Tensor) -> Tensor:
        # A chunk's positions come from the host; waiting for them would wait for the device.
        slots = positions.to(self.key_codes.device, non_blocking=True)
        return slots % self.slots if self.wraps else slots

    def stored(self, name: str, rows: int) -> StoredCache:
        """The "key" or "value" of the first `rows` rows, as kernels take them."""
        scale = getattr(self, f"{name}_scale", None)
        codes = getattr(self, f"{name}_codes")
        scale = None if scale is None else scale[:rows]
        return StoredCache(codes[:rows], scale, self.format, self.kernel)

    def fill(self, depth: int) -> None:
        """Store random keys and values at positions 0 to depth - 1, to measure a long context."""
        for positions in torch.arange(depth).split(FILLED_AT_ONCE):
            buffer = self.key_codes
            shape = (*buffer.shape[:2], len(positions), self.head_dim)
            key, value = (torch.randn(shape, device=buffer.device).to(self.dtype) for _ in "kv")
            self.store(positions, key, value)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in float32; 0 where that is no finite number: for a scale that is 0, NaN, or so
    small that 1 / scale overflows."""
    return (1 / scale.float()).nan_to_num(0.0, 0.0, 0.0)


# (max_batch_size, kv_heads, max_seq_length, head_dim, dtype, device, window) -> a layer's cache
CacheFactory = Callable[[int, int, int, int, torch.dtype, torch.device | str, int | None], KVCache]
