"""Random packed weights of every format, for the tests of kernels.

A form is (format, bits, columns per group; None for one scale per row).
"""

import random

import numpy as np
import torch

from quantbench.ops.formats import OUTER, Packed
from quantbench.ops.packing import PLANES

FORMATS = [
    *(("int", bits, 64) for bits in range(1, 8)),
    *(("int", 4, 8), ("int", 8, 32), ("int", 8, None), ("int", 4, None)),
    *(("fp8", 8, None), ("fp8", 8, 128), ("fp6", 6, None), ("fp6", 6, 16)),
    *(("fp4", 4, 16), ("fp4", 4, 32), ("nf4", 4, 64), ("nf4", 4, None), ("bnb-fp4", 4, 64)),
    *(("2:4", 4, 64), ("2:4", 4, None)),
    *(("uint", 4, 32), ("uint", 5, 32), ("uint", 2, 16), ("iq4nl", 4, 32)),  # of files
]
OF_FILES = ("uint", "iq4nl")


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
    """Every code equally likely; scales around 1/8, so that a row's products are of order 1.

    In a format of files scales and zeros may be codes, too; then K is a multiple of OUTER."""
    format, bits, group = form
    groups = K // (group or K)
    if format in OF_FILES:
        return moved(_as_files_have_it(format, bits, group, N, K), device)
    scale = (torch.rand(N, groups) / 8 + 1 / 16).to(scale_dtype)
    offset = torch.randn(N, groups).to(scale_dtype) if zero else None
    factor = None if tensor_scale is None else torch.tensor(tensor_scale)
    planes = _planes(format, bits, N, K)
    return moved(Packed(planes, scale, offset, factor, format, bits, group or K), device)


def moved(weight: Packed, device: str) -> Packed:
    """The weight on another device."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    return Packed(**torch.utils._pytree.tree_map_only(torch.Tensor, there, vars(weight)))


def _as_files_have_it(format: str, bits: int, group: int, N: int, K: int) -> Packed:
    def codes(low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (N, K // group)).to(dtype)

    kind = random.choice(("floats", "codes", "outer") if K % OUTER == 0 else ("floats", "codes"))
    scale = (torch.rand(N, K // group) / 8 + 1 / 16).half()
    zero, outer = torch.randn(N, K // group).half(), None
    if kind == "codes":
        zero = codes(0, 2**bits, torch.uint8)
    elif kind == "outer":
        scale, zero = codes(-32, 64, torch.int8), codes(0, 64, torch.int8)
        outer = torch.randn(N, K // OUTER, 2).mul(0.004).half()
    zero = zero if format == "uint" else None
    return Packed(_planes(format, bits, N, K), scale, zero, None, format, bits, group, outer)


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


def in_tiles(codes: np.ndarray) -> torch.Tensor:
    """Words (N / 8, K / 128, 32, 4) of codes (N, K), as PyTorch's matrix_to_m16n8k16_Bint4_layout
    (int4mm.cu) has them: a lane of 32 holds a row's columns 2 · (lane % 4) and the next one, and
    those 8, 16 and 24 behind; codes of even columns come first."""
    N, K = codes.shape
    words = np.zeros((N // 8, K // 128, 32, 4), np.uint32)
    for lane in range(32):
        for word in range(4):
            for place in range(8):
                column = word * 32 + place % 4 * 8 + lane % 4 * 2 + place // 4
                found = codes[lane // 4 :: 8, column::128].astype(np.uint32)
                words[:, :, lane, word] |= found << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))
