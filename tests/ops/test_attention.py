"""Which kernel decodes where, and what memory it takes. Numbers: test_decode_attention.py."""

import importlib.util

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.ops.attention import AttentionKernel, choose, decode_attention
from tests.memory import allocated
from tests.ops.attention_contract import stored
from tests.ops.instructions import NEEDS_COMPILER

FORMATS = pytest.mark.parametrize("format", CACHES)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("device", "given", "name", "reason"),  # given: head_dim, heads of a group, dtype and so on
    [
        ("cuda", (64, 4, BFLOAT16), "triton", None),
        ("cuda", (80, 8, FLOAT32), "triton", None),
        ("cuda", (256, 128, BFLOAT16), "triton", None),
        ("cuda", (264, 1, BFLOAT16), "torch", "head_dim 264 is no multiple of 8 up to 256"),
        ("cuda", (64, 129, BFLOAT16), "torch", "129 query heads for a key head"),
        ("cuda", (64, 4, torch.float64), "torch", "torch.float64"),
        ("cpu", (20, 1, FLOAT32), "torch", "head_dim 20 is no multiple of 8 up to 256"),
        ("cpu", (64, 4, torch.float64), "torch", "torch.float64"),
        pytest.param("cpu", (256, 128, FLOAT32), "cpu", None, marks=NEEDS_COMPILER),
        pytest.param("cpu", (80, 7, FLOAT16), "cpu", None, marks=NEEDS_COMPILER),
        ("mps", (64, 4, FLOAT16), "torch", "plain torch is the only kernel for mps"),
        ("meta", (64, 4, BFLOAT16), "torch", "plain torch is the only kernel for meta"),
    ],
)
def test_what_runs_where(device, given, name, reason, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)  # Triton is there
    choice = choose(torch.device(device), *given)
    assert choice.name == name
    assert choice.reason is None if reason is None else reason in choice.reason


def test_cuda_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    choice = choose(torch.device("cuda"), 64, 4, BFLOAT16)
    assert choice == AttentionKernel("torch", "Triton is not installed: pip install triton")


@pytest.mark.parametrize("kernel", ["torch", pytest.param("cpu", marks=NEEDS_COMPILER)])
@FORMATS
def test_memory_is_that_of_filled_slots_or_less(kernel, format, tmp_path):
    """The C++ kernel holds a part's sums, never keys and values in another form."""
    H, K, T, D, filled = 8, 2, 100_000, 64, 1000
    key, value = (stored(torch.zeros(1, K, T, D, dtype=BFLOAT16), format) for _ in range(2))
    query = torch.randn(1, H, D, dtype=BFLOAT16)
    first = torch.tensor([0])

    def peak(count):
        arguments = (query, key, value, first, torch.tensor([count]))
        return allocated(lambda: decode_attention(kernel, *arguments), tmp_path)[1]

    # keys and values in float32, once more as attention lays them out, int4's as they are unpacked
    in_float32 = 2 * K * D * 4
    assert peak(filled) < 4 * filled * in_float32 + 20 * filled * H
    if kernel == "cpu":
        assert peak(T) < 0.1 * T * in_float32
