"""The reference product; its attention is tested where caches are (tests/kv_cache)."""

import pytest
import torch

from quantbench.ops.formats import dequantize
from quantbench.ops.reference import linear
from tests.ops.packed_weights import FORMATS, name, packed


@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_linear_is_the_product_in_float64(form):
    weight = packed(form, 7, 128)
    x = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    result = linear(x, weight)
    assert result.shape == (2, 3, 7) and result.dtype == torch.float32
    w = dequantize(weight).double()
    # 128 products, each rounded once and added up to 127 times.
    allowed = (x.double().abs() @ w.abs().T) * 128 * 2.0**-24
    assert ((result - x.double() @ w.T).abs() <= allowed).all()
