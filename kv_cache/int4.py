"""Keys and values in 4 bits, with a scale for every 32 numbers of a head."""

import torch
from torch import Tensor

from quantbench.errors import UsageError
from quantbench.kv_cache.base import KVCache, inverse
from quantbench.ops.kv import INT4_GROUP
from quantbench.ops.packing import pack


class Int4KVCache(KVCache):
    """2 · B · K · T · (D / 2 + D / 32 · itemsize of `dtype`) bytes.

    In each group, the number m of the largest magnitude gets code -8. The scale is m / -8, which
    may be negative. So all 16 codes are used. Only numbers of the opposite sign beyond 7/8 of |m|
    are clamped.
    """

    format = "int4"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[-1] % INT4_GROUP:
            raise UsageError(
                f"--kv_cache int4: the model's head_dim {x.shape[-1]} is no multiple of "
                f"{INT4_GROUP}; int8 and fp8 take any"
            )
        groups = x.float().unflatten(-1, (-1, INT4_GROUP))
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = (extreme / -8).to(x.dtype)
        codes = (groups * inverse(scale)).round().clamp(-8, 7).flatten(-2) + 8
        (plane,) = pack(codes.to(torch.uint8).flatten(0, -2), 4)
        return {"codes": plane.view(*x.shape[:-1], x.shape[-1] // 2), "scale": scale.squeeze(-1)}
