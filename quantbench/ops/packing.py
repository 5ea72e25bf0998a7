"""How codes of 1 to 8 bits lie in memory: in planes of 8, 4, 2 or 1 bits, so that no field crosses
a byte's boundary and the same code unpacks every width.

A 5-bit code is its low 4 bits in one plane and its high bit in another. In the plane of width w
byte j of a row holds columns j · 8/w, j · 8/w + 1, …, the first of them in its lowest bits; so rows
can be cut apart, and K columns take K · bits / 8 bytes.
"""

import torch
from torch import Tensor

# Widths of the planes of codes by their bits, the lowest bits first: 7: (4, 2, 1).
PLANES = {bits: tuple(width for width in (8, 4, 2, 1) if bits & width) for bits in range(1, 9)}


def columns_per_unit(bits: int) -> int:
    """The number of columns must be a multiple of this: what a byte of the narrowest plane
    holds."""
    return 8 // PLANES[bits][-1]


def pack(codes: Tensor, bits: int) -> list[Tensor]:
    """Planes of codes (N, K) uint8, each (N, K · width / 8) uint8, lowest bits first."""
    planes, shift = [], 0
    for width in PLANES[bits]:
        part = (codes >> shift) & ((1 << width) - 1)
        fields = part.unflatten(-1, (-1, 8 // width))
        plane = fields[..., 0]
        for i in range(1, 8 // width):
            plane = plane | (fields[..., i] << (i * width))
        planes.append(plane.contiguous())
        shift += width
    return planes


def unpack(planes: list[Tensor], bits: int) -> Tensor:
    """The codes (N, K) uint8 that `pack` was given: those of 8 bits are the plane itself."""
    if bits == 8:
        return planes[0]
    codes, shift = None, 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        mask = (1 << width) - 1
        fields = [(plane >> (i * width)) & mask for i in range(8 // width)]
        part = torch.stack(fields, -1).flatten(-2) << shift
        codes = part if codes is None else codes | part
        shift += width
    return codes


def of_tinygemm(tiles: Tensor) -> Tensor:
    """Codes in tinygemm's layout (N / 8, K / 128, 32, 4) int32 as a plane (N, K / 2) of 4 bits.

    A tensor core's thread has of 32 columns those at 2 q, 2 q + 1 and, 8, 16 and 24 behind, the
    same: the first of each two in an int32's low 16 bits, the second in its high ones
    (matrix_to_m16n8k16_Bint4_layout in PyTorch's aten/src/ATen/native/cuda/int4mm.cu).
    """
    threads = tiles.view(torch.uint8).view(*tiles.shape[:2], 8, 4, 4, 2, 2)
    first, second = threads.unbind(5)  # (N / 8, K / 128, row, q, 32 columns, 16 columns)
    near = (first & 15) | (second << 4)
    far = (first >> 4) | (second & 0xF0)  # 8 columns behind
    both = torch.stack((near, far), -1)
    return both.permute(0, 2, 1, 4, 5, 6, 3).reshape(8 * len(tiles), -1)
