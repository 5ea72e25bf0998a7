"""sparse-marlin: two of every four weights in 4 bits, with a scale for every 64 columns.

The format of Sparse-Marlin (Frantar et al. 2024, https://arxiv.org/abs/2408.11743): 2:4 sparsity,
so that a column takes 2 bits of value and 1 of metadata. The two largest by magnitude are kept, the
others are zeros; sparse-marlin-wanda zeros two of four before that, by activations too
(quantize/pruning.py).
"""

import torch
from torch import Tensor

from quantbench.ops.packing import pack
from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.pruning import kept_of_four
from quantbench.quantize.scheme import Scheme, multiple_refuses
from quantbench.quantize.schemes.int4 import symmetric
from quantbench.quantize.spec import SparseMarlin

COLUMNS_PER_SCALE = 64


def quantize(w: Tensor, spec: SparseMarlin) -> PackedWeight:
    """Keep the two largest of every four columns; q from -8 to 7, scale = max|w| / 7.5, 16 bits."""
    kept, places = _two_largest(w)
    dense = symmetric(kept, COLUMNS_PER_SCALE // 2)
    planes = [dense.plane0, *pack(places, 2)]
    return PackedWeight.make(w, planes, dense.scale, "2:4", 4, COLUMNS_PER_SCALE)


def _two_largest(w: Tensor) -> tuple[Tensor, Tensor]:
    """The two largest by magnitude of every four columns, in their order: values (N, K / 2), and
    places among the four, uint8."""
    four, kept = w.unflatten(-1, (-1, 4)).unbind(-1), kept_of_four(w.abs())
    low = torch.where(kept[0], four[0], torch.where(kept[1], four[1], four[2]))
    high = torch.where(kept[3], four[3], torch.where(kept[2], four[2], four[1]))
    missing = [(~one).view(torch.uint8) for one in kept]
    places = missing[0] * (1 + missing[1]), 3 - missing[3] * (1 + missing[2])
    return torch.stack((low, high), -1).flatten(-2), torch.stack(places, -1).flatten(-2)


SCHEMES = {SparseMarlin: Scheme(quantize, our_kernels(), multiple_refuses(COLUMNS_PER_SCALE))}
