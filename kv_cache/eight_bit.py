"""Keys and values in 8 bits, int8 or float8 (E4M3), with a symmetric scale per token and head: an
outlier reduces the precision only of its own token and head."""

from typing import ClassVar

import torch
from torch import Tensor

from quantbench.kv_cache.base import KVCache, inverse


class EightBitKVCache(KVCache):
    """2 · B · K · T · (D + itemsize of `dtype`) bytes: codes, and the scale max|x| / largest."""

    code_dtype: ClassVar[torch.dtype]
    largest: ClassVar[int]  # the largest number that a code can hold

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The scale is rounded to x's dtype before x is divided by it, so that codes are chosen for
        the scale that is stored. A row of zeros has scale 0 and is read back as zeros."""
        scale = (x.abs().amax(-1, keepdim=True).float() / self.largest).to(x.dtype)
        numbers = (x.float() * inverse(scale)).clamp(-self.largest, self.largest)
        if not self.code_dtype.is_floating_point:
            numbers = numbers.round()
        return {"codes": numbers.to(self.code_dtype), "scale": scale}


class Int8KVCache(EightBitKVCache):
    format, code_dtype, largest = "int8", torch.int8, 127


class Float8KVCache(EightBitKVCache):
    format, code_dtype, largest = "fp8", torch.float8_e4m3fn, 448
