"""int8wo and int8dq: what torchao's and torch's kernels get wrong on the CPU, and ours must not."""

import pytest
import torch
from torch import nn

from quantbench.errors import KernelError
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse

CPU = torch.device("cpu")


def linear(N, K):
    return nn.Linear(K, N, bias=False).bfloat16().requires_grad_(False)


@pytest.mark.parametrize("N, K", [(256, 256), (2048, 2048), (1000, 512)])
def test_one_compiled_row_of_int8dq_is_no_garbage(N, K):
    """torch._int_mm on a row of stride 0 (torch 2.13): errors of 1e4 times the result."""
    layer = linear(N, K)
    weight = layer.weight.double()
    made = Quantizer(parse("int8dq"), CPU, torch.bfloat16, "torchao")("layer", layer)
    torch._dynamo.reset()
    x = torch.randn(1, 1, K).bfloat16()
    with torch.no_grad():
        y = torch.compile(made, fullgraph=True)(x)
    exact = x.double() @ weight.T
    # int8 steps of weights and activations, 1/127 of a row's largest: some 1 % together
    assert (y - exact).norm() / exact.norm() < 0.02


def test_a_width_that_torch_reads_past_is_refused_by_name_or_left_to_another_kernel():
    name, layer = "layers.0.feed_forward.w2", linear(64, 264)
    with pytest.raises(KernelError, match="w2 with kernel torchao has in_features 264; .* of 16"):
        Quantizer(parse("int8wo"), CPU, torch.bfloat16, "torchao")(name, layer)
    quantizer = Quantizer(parse("int8wo"), CPU, torch.bfloat16)
    quantizer(name, layer)
    assert set(quantizer.ran) <= {"cpu", "reference"}


@pytest.mark.parametrize("name", ["int8wo", "int8dq"])
def test_float16_products_that_overflow_before_their_scale_do_not(name):
    """torchao puts 128 · x · √K and more in float16, 65504 at most; the result is some 50."""
    layer = nn.Linear(1024, 32, bias=False).half().requires_grad_(False)
    weight, x = layer.weight.double(), (torch.rand(1, 1, 1024) * 20).half()
    layer.weight.abs_()
    made = Quantizer(parse(name), CPU, torch.float16)("layer", layer)
    exact = x.double() @ weight.abs().T
    assert exact.max() < 1000
    torch.testing.assert_close(made(x).double(), exact, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["int4wo-64", "uintx-2-64", "int8dq-int4wo-32", "sparse-marlin"])
def test_float16_weights_near_the_end_of_the_range_stay_finite(name):
    layer = nn.Linear(256, 8, bias=False).half().requires_grad_(False)
    layer.weight[0, :2] = torch.tensor([65504.0, -65504.0])
    packed = Quantizer(parse(name), CPU, torch.float16).quantized("layer", layer).weight.data
    assert packed.scale.isfinite().all() and packed.dequantize().isfinite().all()
