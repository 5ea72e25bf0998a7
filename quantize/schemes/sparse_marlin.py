"""sparse-marlin: two of every four weights in 4 bits, with a scale for every 64 columns.

The format of Sparse-Marlin (Frantar et al. 2024, https://arxiv.org/abs/2408.11743): 2:4 sparsity,
so that a column takes 2 bits of value and 1 of metadata. The two largest by magnitude are kept, the
others are zeros; sparse-marlin-wanda zeros two of four before that, by activations too
(quantize/pruning.py).
"""

import torch
from torch import Tensor

from ops.packing import pack
from quantize.kernels import our_kernels
from quantize.packed import PackedWeight
from quantize.scheme import Scheme, in_row_blocks, multiple_refuses
from quantize.schemes.int4 import symmetric
from quantize.spec import SparseMarlin

COLUMNS_PER_SCALE = 64


def quantize(w: Tensor, spec: SparseMarlin) -> PackedWeight:
    """Keep the two largest of every four columns; q from -8 to 7, scale = max|w| / 7.5, 16 bits."""
    return in_row_blocks(_quantize, w)


def _quantize(w: Tensor) -> PackedWeight:
    fours = w.unflatten(-1, (-1, 4))
    order = fours.abs().argsort(dim=-1, descending=True, stable=True)
    places = order[..., :2].sort(-1).values  # (N, K/4, 2)
    kept = fours.gather(-1, places).flatten(-2)
    dense = symmetric(kept, COLUMNS_PER_SCALE // 2)
    return PackedWeight.make(
        [dense.plane0, *pack(places.flatten(-2).to(torch.uint8), 2)],
        dense.scale,
        format="2:4",
        bits=4,
        columns=w.shape[1],
        dtype=w.dtype,
        group_size=COLUMNS_PER_SCALE,
    )


SCHEMES = {SparseMarlin: Scheme(quantize, our_kernels(), multiple_refuses(COLUMNS_PER_SCALE))}
