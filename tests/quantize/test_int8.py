"""int8wo and int8dq against their definition in float64, eager and compiled."""

import pytest
import torch
from torch import nn

from errors import KernelError
from models.llama import stored_bytes
from quantize.registry import kernel_for, transform
from quantize.spec import parse

SHAPES = [(256, 256), (384, 512), (1000, 272)]  # out, in: the last multiples of no tile


def linear(N, K, bias=False):
    layer = nn.Linear(K, N, bias=bias).bfloat16().requires_grad_(False)
    return layer, layer.weight.double()


def rounded(x):
    """Symmetric rounding of each row to int8, in float64; 127.5 steps reach the largest, as
    torchao has it: half of the 255 between -128 and 127."""
    step = (x.abs().amax(-1, keepdim=True) / 127.5).bfloat16().double()
    return (x / step).round().clamp(-128, 127) * step


def relative_error(y, exact):
    return ((y.double() - exact).norm() / exact.norm()).item()


# Products in bfloat16: the result and, eagerly, the dequantized weight each round by 2^-9 = 0.002
# at most. For int8dq a value between two steps may round to either, where the kernel divides by a
# reciprocal: a step of a normal row is 1/40 of its deviation, and few values lie that close to
# the middle. A wrong scale or layout gives errors near 1.
TOLERANCE = {"int8wo": 0.004, "int8dq": 0.008}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("N, K", SHAPES)
@pytest.mark.parametrize("name", TOLERANCE)
def test_products_are_the_definition(name, N, K, rows, compiled):
    layer, weight = linear(N, K)
    layer = transform(parse(name))("layer", layer)
    x = torch.randn(1, rows, K).bfloat16()
    activations = rounded(x.double()) if name == "int8dq" else x.double()
    exact = activations @ rounded(weight).T
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    torch._dynamo.reset()
    with torch.no_grad():
        assert relative_error(run(x), exact) < TOLERANCE[name]


def test_a_width_that_torch_reads_past_is_refused_by_name():
    layer, _ = linear(64, 264)
    with pytest.raises(KernelError, match="w2 has in_features 264; .* multiple of 16"):
        transform(parse("int8wo"))("layers.0.feed_forward.w2", layer)


@pytest.mark.parametrize("name", TOLERANCE)
def test_extreme_weights(name):
    layer, weight = linear(256, 256)
    layer.weight[0] = 0
    layer.weight[1, 7] = 1000.0
    layer.weight[2] = 1e-38
    layer = transform(parse(name))("layer", layer)
    assert layer(torch.randn(1, 1, 256).bfloat16()).isfinite().all()


def test_bias_is_added_in_full_precision():
    for name in TOLERANCE:
        layer, _ = linear(256, 256, bias=True)
        bias = layer.bias.clone()
        quantized = transform(parse(name))("layer", layer)
        assert torch.equal(quantized(torch.zeros(1, 1, 256).bfloat16())[0, 0], bias)


@pytest.mark.parametrize("name", TOLERANCE)
def test_a_weight_takes_a_byte_and_its_scale(name):
    layer, _ = linear(384, 512)
    layer = transform(parse(name))("layer", layer)
    scales_and_zero_points = 384 * (4 + 1)  # float32; and, though symmetric, an int8 zero point
    assert stored_bytes(layer.weight) == 384 * 512 + scales_and_zero_points


def test_only_linear_layers_are_quantized():
    embedding, norm = nn.Embedding(8, 8), nn.RMSNorm(8)
    quantize = transform(parse("int8wo"))
    assert quantize("tok_embeddings", embedding) is embedding and quantize("norm", norm) is norm
    assert type(embedding.weight.data) is torch.Tensor


def test_none_leaves_the_layer_alone():
    layer, _ = linear(256, 256)
    assert transform(parse("none"))("layer", layer) is layer


@pytest.mark.parametrize("name, kernel", [("int8wo", "triton"), ("none", "torchao")])
def test_a_kernel_that_cannot_run_is_an_error_that_says_what_can(name, kernel):
    with pytest.raises(KernelError, match=f"--kernel {kernel}: {name} has no such kernel; it has"):
        kernel_for(parse(name), kernel)
