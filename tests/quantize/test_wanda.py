"""Pruning by |weight| · norm, worked by hand and on random layers."""

import torch
from torch import nn

from quantbench.quantize import scheme
from quantbench.quantize.observe import observed, squares
from quantbench.quantize.pruning import prune


def test_the_two_of_four_with_the_largest_products_stay():
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, -2.0, 3.0, 4.0], [4.0, 3.0, -2.0, 1.0]])
    # products: 10, 6, 3, 4  and  40, 9, 2, 1
    prune(layer, torch.tensor([10.0, 3.0, 1.0, 1.0]).square())
    assert layer.weight.tolist() == [[1.0, -2.0, 0.0, 0.0], [4.0, 3.0, 0.0, 0.0]]


def test_norms_are_those_of_everything_that_was_fed():
    layer, fed = nn.Linear(16, 3), [torch.randn(2, 5, 16), torch.randn(1, 7, 16)]
    sums = observed({"a": layer}, lambda: [layer(x) for x in fed], squares)["a"]
    rows = torch.cat([x.flatten(0, 1) for x in fed])
    torch.testing.assert_close(sums.sqrt(), rows.double().norm(dim=0).float())
    assert not layer._forward_pre_hooks


def test_norms_not_their_squares_decide():
    """|w| · norm keeps the first two columns, |w| · norm² would keep the last two."""
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[9.0, 9.0, 2.0, 2.0]])
    prune(layer, torch.tensor([1.0, 1.0, 16.0, 16.0]))
    assert layer.weight.tolist() == [[9.0, 9.0, 0.0, 0.0]]


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


def test_a_layer_without_inputs_is_pruned_by_its_weights_alone():
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 4.0, -3.0, 2.0]])
    prune(layer, torch.zeros(4))
    assert layer.weight.tolist() == [[0.0, 4.0, -3.0, 0.0]]
