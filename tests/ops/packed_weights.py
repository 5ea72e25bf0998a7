"""Random packed weights of every format, for the tests of kernels.

A form is (format, bits, columns per group; None for one scale per row).
"""

import torch

from quantbench.ops.formats import Packed
from quantbench.ops.packing import PLANES

FORMATS = [
    *(("int", bits, 64) for bits in range(1, 8)),
    *(("int", 4, 8), ("int", 8, 32), ("int", 8, None), ("int", 4, None)),
    *(("fp8", 8, None), ("fp8", 8, 128), ("fp6", 6, None), ("fp6", 6, 16)),
    *(("fp4", 4, 16), ("fp4", 4, 32), ("nf4", 4, 64), ("nf4", 4, None), ("bnb-fp4", 4, 64)),
    *(("2:4", 4, 64), ("2:4", 4, None)),
]


def name(form) -> str:
    format, bits, group = form
    return f"{format}-{bits}-{group or 'row'}"


def packed(
    form,
    N: int,
    K: int,
    scale_dtype: torch.dtype = torch.bfloat16,
    zero: bool = False,
    tensor_scale: float | None = None,
    device: str = "cpu",
) -> Packed:
    """Every code equally likely; scales around 1/8, so that a row's products are of order 1."""
    format, bits, group = form
    groups = K // (group or K)
    scale = (torch.rand(N, groups) / 8 + 1 / 16).to(scale_dtype)
    offset = torch.randn(N, groups).to(scale_dtype) if zero else None
    factor = None if tensor_scale is None else torch.tensor(tensor_scale)
    tensors = [_planes(format, bits, N, K), scale, offset, factor]
    planes, *scales = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), tensors
    )
    return Packed(planes, *scales, format, bits, group or K)


def _planes(format: str, bits: int, N: int, K: int) -> list[torch.Tensor]:
    def noise(columns):
        return torch.randint(0, 256, (N, columns), dtype=torch.uint8)

    if format == "fp8":
        codes = noise(K)
        codes[codes & 127 == 127] = 0  # those two are NaN
        return [codes.view(torch.float8_e4m3fn)]
    if format == "2:4":
        # Two different places of the four, in order: 0 and 1, 0 and 2, and so on.
        pairs = torch.tensor(
            [0 | 1 << 2, 0 | 2 << 2, 0 | 3 << 2, 1 | 2 << 2, 1 | 3 << 2, 2 | 3 << 2]
        )
        places = pairs[torch.randint(0, 6, (N, K // 8, 2))]
        return [noise(K // 4), (places[..., 0] | places[..., 1] << 4).to(torch.uint8)]
    planes = [noise(K * width // 8) for width in PLANES[bits]]
    return [planes[0].view(torch.int8)] if bits == 8 else planes
