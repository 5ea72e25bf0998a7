"""Keys and values in 8 bits, int8 or float8 (E4M3), with a symmetric scale per token and head: an
outlier reduces the precision only of its own token and head."""

from typing import ClassVar

import torch
from torch import Tensor

from quantbench.kv_cache.base import KVCache, inverse


class EightBitKVCache(KVCache):
    """2 · B · K · T · (D + itemsize of `dtype`) bytes: codes, and the scale max|x| / largest."""

    largest: ClassVar[int]  # the largest number that a code can hold

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The scale is rounded to x's dtype before x is divided by it, so that codes are chosen for
        the scale that is stored. A row of zeros has scale 0 and is read back as zeros."""
        scale = (x.abs().amax(-1, keepdim=True).float() / self.largest).to(x.dtype)
        numbers = (x.float() * inverse(scale)).clamp(-self.largest, self.largest)
        return {"codes": self.codes(numbers), "scale": scale}

    def codes(self, numbers: Tensor) -> Tensor:
        """The codes of float32 numbers up to `largest`."""
        raise NotImplementedError


class Int8KVCache(EightBitKVCache):
    format, largest = "int8", 127

    def codes(self, numbers: Tensor) -> Tensor:
        return numbers.round().to(torch.int8)


class Float8KVCache(EightBitKVCache):
    """On CUDA the codes are uint8, the numbers' bits (ops/e4m3.py)."""

    format, largest = "fp8", 448

    def codes(self, numbers: Tensor) -> Tensor:
        if numbers.is_cuda:
            from quantbench.ops import e4m3

            return e4m3.to_bits(numbers)
        return numbers.to(torch.float8_e4m3fn)
