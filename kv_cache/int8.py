"""Keys and values in 8 bits: one symmetric scale per token and head."""

import torch
from torch import Tensor

from kernels.reference import attention
from kv_cache.base import KVCache, Shape


class Int8KVCache(KVCache):
    """2 · B · K · T · (D + itemsize of `dtype`) bytes.

    A token's key (or value) in one head is stored as int8 = round(x · 127 / max|x|) beside the
    scale max|x| / 127, so one outlier costs precision only in its own token and head.
    """

    def allocate(
        self, shape: Shape, dtype: torch.dtype, device: torch.device | str
    ) -> dict[str, Tensor]:
        buffers = {}
        for name in ("key", "value"):
            buffers[name] = torch.zeros(shape, dtype=torch.int8, device=device)
            buffers[f"{name}_scale"] = torch.zeros((*shape[:3], 1), dtype=dtype, device=device)
        return buffers

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> None:
        rows = key.shape[0]
        for name, x in (("key", key), ("value", value)):
            quantized, scale = quantize(x)
            getattr(self, name)[:rows, :, input_pos] = quantized
            getattr(self, f"{name}_scale")[:rows, :, input_pos] = scale

    def attend(self, query: Tensor, input_pos: Tensor) -> Tensor:
        rows = query.shape[0]
        key = self.key[:rows] * self.key_scale[:rows]
        value = self.value[:rows] * self.value_scale[:rows]
        positions = torch.arange(self.capacity, device=query.device)
        return attention(query, key, value, input_pos, positions, self.window)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 over the last dimension: values (…, D) int8, scales (…, 1) in x's dtype.

    The scale is rounded to x's dtype before dividing, so that values · scale is what the
    rounding saw; a row of zeros keeps scale 0 and reads back as zeros.
    """
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).to(x.dtype)
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    return (x.float() * inverse).round().clamp(-127, 127).to(torch.int8), scale
