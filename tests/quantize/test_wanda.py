"""Pruning by |weight| · norm, worked by hand and on random layers."""

import pytest
import torch
from torch import nn

from quantbench.quantize import scheme
from quantbench.quantize.observe import observed, squares
from quantbench.quantize.schemes.sparse_marlin import prune


@pytest.mark.parametrize(
    "weight, squares, expected",
    [
        # products with the norms: 10, 6, 3, 4  and  40, 9, 2, 1
        ([[1, -2, 3, 4], [4, 3, -2, 1]], [100, 9, 1, 1], [[1, -2, 0, 0], [4, 3, 0, 0]]),
        # norms, not their squares, decide: those would keep the last two
        ([[9, 9, 2, 2]], [1, 1, 16, 16], [[9, 9, 0, 0]]),
        # a layer without inputs is pruned by its weights alone
        ([[1, 4, -3, 2]], [0, 0, 0, 0], [[0, 4, -3, 0]]),
    ],
)
def test_the_two_of_four_with_the_largest_products_stay(weight, squares, expected):
    layer = nn.Linear(4, len(weight), bias=False)
    layer.weight.data = torch.tensor(weight).float()
    prune(layer, torch.tensor(squares).float())
    assert layer.weight.tolist() == expected


def test_norms_are_those_of_everything_that_was_fed():
    layer, fed = nn.Linear(16, 3), [torch.randn(2, 5, 16), torch.randn(1, 7, 16)]
    sums = observed({"a": layer}, lambda: [layer(x) for x in fed], squares)["a"]
    rows = torch.cat([x.flatten(0, 1) for x in fed])
    torch.testing.assert_close(sums.sqrt(), rows.double().norm(dim=0).float())
    assert not layer._forward_pre_hooks


def test_blocks_of_rows_are_pruned_as_the_whole(monkeypatch):
    weight, norms = torch.randn(37, 64), torch.rand(64)
    whole, blocks = (nn.Linear(64, 37, bias=False).requires_grad_(False) for _ in range(2))
    whole.weight.copy_(weight)
    blocks.weight.copy_(weight)
    prune(whole, norms.square())
    monkeypatch.setattr(scheme, "CPU_BLOCK_ELEMENTS", 5 * 64)
    prune(blocks, norms.square())
    assert torch.equal(whole.weight, blocks.weight)
    importance = (weight.abs() * norms).unflatten(-1, (-1, 4))
    best = importance.topk(2, -1).indices
    kept = torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best, True).flatten(-2)
    assert torch.equal(whole.weight, weight * kept)
