"""sparse-marlin: two of every four weights in 4 bits, with a scale for every 64 columns.

The format of Sparse-Marlin (Frantar et al. 2024, https://arxiv.org/abs/2408.11743): 2:4 sparsity,
so that a column takes 2 bits of value and 1 of metadata. The two largest by magnitude are kept, the
others are zeros.

sparse-marlin-wanda zeros two of four before that, as Wanda does (Sun et al. 2023,
arXiv:2306.11695): those with the largest |weight| · ‖input feature‖ stay, the norm taken over a
calibration text. torchao's WandaSparsifier does the same, but for two things: its observer hands it
squares of norms (torchao 0.18), which prune by another measure than the paper's; and its masks and
sorting take twelve times a layer's memory, and most of the time.
"""

import itertools

import torch
from torch import Tensor, nn

from quantbench.ops.packing import pack
from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme, multiple_refuses, rows_at_once
from quantbench.quantize.schemes.int4 import symmetric
from quantbench.quantize.spec import SparseMarlin

COLUMNS_PER_SCALE = 64


def quantize(w: Tensor, spec: SparseMarlin) -> PackedWeight:
    """Keep the two largest of every four columns; q from -8 to 7, scale = max|w| / 7.5, 16 bits."""
    values, places = _two_largest(w)
    dense = symmetric(values, COLUMNS_PER_SCALE // 2)
    planes = [dense.plane0, *pack(places, 2)]
    return PackedWeight.make(w, planes, dense.scale, "2:4", 4, COLUMNS_PER_SCALE)


def _two_largest(w: Tensor) -> tuple[Tensor, Tensor]:
    """The two largest by magnitude of every four columns, in their order: values (N, K / 2), and
    places among the four, uint8."""
    four, masks = w.unflatten(-1, (-1, 4)).unbind(-1), kept_of_four(w.abs())
    low = torch.where(masks[0], four[0], torch.where(masks[1], four[1], four[2]))
    high = torch.where(masks[3], four[3], torch.where(masks[2], four[2], four[1]))
    missing = [(~mask).view(torch.uint8) for mask in masks]
    places = missing[0] * (1 + missing[1]), 3 - missing[3] * (1 + missing[2])
    return torch.stack((low, high), -1).flatten(-2), torch.stack(places, -1).flatten(-2)


def prune(layer: nn.Linear, squares: Tensor) -> None:
    """Zero two of every four weights of a layer, in place.

    squares: the squared norm of every input feature, (K,). If the layer got no inputs, such as an
    expert that no token takes, the weights alone decide.
    """
    norms = squares.sqrt() if squares.any() else torch.ones_like(squares)
    for block in layer.weight.data.split(rows_at_once(layer.weight)):
        mask = torch.stack(kept_of_four(block.abs() * norms), -1).flatten(-2)
        block.masked_fill_(~mask, 0)


def kept_of_four(sizes: Tensor) -> list[Tensor]:
    """Which of every four neighbouring columns are the two largest; the first ones among equals.
    sizes (N, K) → for the first to the fourth column, (N, K / 4) bool.

    Each is compared with each, which takes a fifth of the time of sorting them.
    """
    four = sizes.unflatten(-1, (-1, 4)).unbind(-1)
    larger = [torch.zeros_like(four[0], dtype=torch.uint8) for _ in four]  # how many others are
    for i, j in itertools.combinations(range(4), 2):
        first_wins = four[i] >= four[j]
        larger[j] += first_wins.view(torch.uint8)
        larger[i] += (~first_wins).view(torch.uint8)
    return [count < 2 for count in larger]


SCHEMES = {SparseMarlin: Scheme(quantize, our_kernels(), multiple_refuses(COLUMNS_PER_SCALE))}
