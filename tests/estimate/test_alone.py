"""What is measured of parts alone: which rows, and of which layers."""

import dataclasses

import pytest
import torch

from devices import prefill_chunk
from estimate import alone
from estimate.calibration import Speed
from estimate.calibration_models import MODELS
from estimate.machine import random_model
from estimate.probe import Settings

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
