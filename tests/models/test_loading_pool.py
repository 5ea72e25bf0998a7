"""Weights that lie side by side in memory stay separate tensors."""

import gc

import torch
from torch import nn

from quantbench.models.pool import Pool


def test_weights_side_by_side_share_no_storage():
    """torch.compile takes parts of one storage for aliases, which no nested region may have."""
    layers = [nn.Linear(64, 32, dtype=torch.bfloat16) for _ in range(3)]
    before = [layer.weight.clone() for layer in layers]
    pool = Pool()
    for layer in layers:
        pool.move(layer)
    del pool
    gc.collect()
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    assert len({weight.untyped_storage()._cdata for weight in weights}) == len(weights)
    addresses = sorted(weight.data_ptr() for weight in weights)
    assert addresses[-1] - addresses[0] < 1 << 20 and addresses[0] % 64 == 0
    assert all(torch.equal(old, layer.weight) for old, layer in zip(before, layers, strict=True))
