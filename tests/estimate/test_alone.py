"""What is measured of parts alone: which rows, and of which layers."""

import dataclasses

import pytest
import torch

from quantbench.devices import prefill_chunk
from quantbench.estimate import alone
from quantbench.estimate.calibration import Speed
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.machine import random_model
from quantbench.estimate.probe import Settings

CPU = torch.device("cpu")


class Untimed:
    """A probe that calls once, and reads no speed."""

    def timed(self, least, call, *arguments, each=1):
        call(*arguments)
        return Speed(1.0, 1.0), 1.0


@pytest.fixture
def small():
    return dataclasses.replace(
        MODELS["wide"], dim=64, num_heads=2, num_kv_heads=1, head_dim=32, ffn_dim=128,
        vocab_size=256,
    )  # fmt: skip


def test_products_have_the_rows_that_runs_have(small, monkeypatch):
    """Up to 4096, as 128 sequences of a prompt have them on a processor; those of the output layer
    as many as a step's."""
    monkeypatch.setattr(alone, "STREAMED", 1)
    settings = Settings(CPU, torch.float32, ["none"])
    model, kernels = random_model(small, "none", settings)
    points = list(alone.products(model, "none", kernels, settings, Untimed()))
    rows = {shape: [] for shape in small.linear_shapes().values()}
    for point in points:
        rows[point.outer, point.inner].append(point.rows)
    output = rows.pop(small.linear_shapes()["output"])
    assert output == [1, 4, 16]
    assert all(of_shape == [1, 4, 16, 128, 512, 2048, 4096] for of_shape in rows.values())
    assert 128 * prefill_chunk(CPU, 128) == 4096


def test_stacks_are_of_the_sizes_that_are_asked_for(small, monkeypatch):
    """Two or more weights, or caches, of each size; and as many bytes as are given."""
    monkeypatch.setattr(alone, "STACKS", (1 << 14, 1 << 16, 1 << 17))
    monkeypatch.setattr(alone, "STACKED_POSITIONS", 4)
    settings = Settings(CPU, torch.float32, ["none"], ["dense"])
    model, _ = random_model(small, "none", settings)
    wqkv = 128 * 64 * 4  # bytes
    weights = list(alone.weight_stacks(model, "none", settings, Untimed()))
    assert [(p.name, p.rows, p.bytes) for p in weights] == [
        ("none", rows, count * wqkv) for count in (2, 4) for rows in (1, 4, 16)
    ]
    heads, positions, head_dim = 8, 4, 128
    cache = 2 * heads * positions * head_dim * 4
    caches = list(alone.cache_stacks(settings, Untimed()))
    assert [(p.name, p.rows, p.bytes) for p in caches] == [
        ("dense", 1, count * cache) for count in (2, 4)
    ]
