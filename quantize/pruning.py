"""Which weights matter, judged by what they multiply: Wanda (Sun et al. 2023, arXiv:2306.11695).

Two of every four weights in a row stay: those with the largest |weight| · ‖input feature‖, the norm
taken over a calibration text. torchao's WandaSparsifier does the same, but for two things: its
observer hands it squares of norms (torchao 0.18), which prune by another measure than the paper's;
and its masks and sorting take twelve times a layer's memory, and most of the time.
"""

import itertools

import torch
from torch import Tensor, nn

from quantbench.quantize.scheme import rows_at_once


def prune(layer: nn.Linear, squares: Tensor) -> None:
    """Zero two of every four weights of a layer, in place.

    squares: the squared norm of every input feature, (K,). If the layer got no inputs, such as an
    expert that no token takes, the weights alone decide.
    """
    norms = squares.sqrt() if squares.any() else torch.ones_like(squares)
    for block in layer.weight.data.split(rows_at_once(layer.weight)):
        kept = torch.stack(kept_of_four(block.abs() * norms), -1).flatten(-2)
        block.masked_fill_(~kept, 0)


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
