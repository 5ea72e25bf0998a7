"""Every scheme's products, on every kernel the CPU has, against float64; eager and compiled."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from devices import stored_bytes
from errors import CheckpointError, KernelError
from quantize import scheme as scheme_module
from quantize.activation import rounded
from quantize.kernels import TritonLinear
from quantize.packed import PackedWeight
from quantize.registry import SCHEMES, Quantizer, available
from quantize.spec import SHOWN, parse

CPU = torch.device("cpu")
NAMES = [name for name in SHOWN if name not in ("none", "sparse-marlin-wanda")]
CASES = [
    (name, kernel)
    for name in NAMES
    for kernel, reason in available(parse(name), CPU, torch.bfloat16).items()
    if reason is None
]
# A product is rounded to its dtype once by our kernels, but torchao's and bitsandbytes' round the
# weights, or the product before its scale, too: three roundings of half a unit in the last place.
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
# torchao rounds activations by scales of the activations' own dtype, bitsandbytes takes float16:
# where a number falls between two codes it may go to the other one, half a step of 1/127.5.
STEP = {"int8dq": 1 / 255, "int8dq-int4wo-32": 1 / 255, "bnb-int8": 1 / 255}


def linear(N=96, K=256, dtype=torch.bfloat16, bias=False):
    return nn.Linear(K, N, bias=bias).to(dtype).requires_grad_(False)


def built(name, layer, kernel="auto"):
    """The layer as its kernel runs it, and the float64 weights that it stands for."""
    quantizer = Quantizer(parse(name), CPU, layer.weight.dtype, kernel)
    packed = quantizer.quantized("layer", layer)
    weight = packed.weight.data
    assert isinstance(weight, PackedWeight)
    exact = weight.dequantize(torch.float32).double()
    return quantizer.built("layer", packed), exact, weight.activation


def expected(x, exact, activation):
    if activation is None:
        return x.double() @ exact.T
    numbers, scale = rounded(x, activation)
    return (numbers.double() @ exact.T) * scale.double()


def assert_product(y, x, exact, activation, name):
    """Within so many roundings of every sum's terms: K of them, whose sizes add up to `terms`."""
    wanted = expected(x, exact, activation)
    terms = x.double().norm(dim=-1, keepdim=True) * exact.norm(dim=1)
    bound = 3 * UNIT[x.dtype] * (wanted.abs() + terms / 4) + STEP.get(name, 0) * terms
    assert y.dtype == x.dtype and y.shape == wanted.shape
    assert ((y.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name, kernel", CASES)
def test_products_are_those_of_the_stored_weights(name, kernel, dtype):
    if available(parse(name), CPU, dtype)[kernel]:
        pytest.skip("the kernel does not take the dtype, and says so")
    for rows in ((1, 1), (1, 3), (17, 1)):
        layer, exact, activation = built(name, linear(dtype=dtype), kernel)
        x = torch.randn(*rows, 256).to(dtype)
        assert_product(layer(x), x, exact, activation, name)


@pytest.mark.parametrize("name", NAMES)
def test_triton_products_are_those_of_the_stored_weights(name):
    """In the interpreter, or on a GPU; tests/ops has every format, shape and dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, exact, activation = built(name, linear(N=20), "reference")
    layer = TritonLinear.of(layer.to(device), parse(name))
    for rows in ((1, 1), (1, 3)):
        x = torch.randn(*rows, 256).bfloat16()
        y = layer(x.to(device)).cpu()
        # more rows than two go through tensor cores, with the weights' numbers in bfloat16
        wanted = expected(x, exact, activation)
        terms = x.double().norm(dim=-1, keepdim=True) * exact.norm(dim=1)
        assert ((y.double() - wanted).abs() <= 2**-7 * (wanted.abs() + terms)).all()


@pytest.mark.parametrize("name, kernel", CASES)
def test_compiled_products_are_the_eager_ones(name, kernel):
    layer, exact, activation = built(name, linear(), kernel)
    torch._dynamo.reset()
    x = torch.randn(1, 1, 256).bfloat16()
    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True)(x)
    assert_product(y, x, exact, activation, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("N, K", [(1, 64), (33, 128), (100, 192)])
def test_odd_shapes_get_a_kernel_that_takes_them(name, N, K):
    if reason := SCHEMES[type(parse(name))].refuses(parse(name), K):
        with pytest.raises(KernelError, match="layer has in_features"):
            built(name, linear(N, K))
        assert str(K) in reason
        return
    layer, exact, activation = built(name, linear(N, K))
    x = torch.randn(1, 2, K).bfloat16()
    assert_product(layer(x), x, exact, activation, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_bias_is_added(name):
    made = linear(bias=True)
    layer, _, _ = built(name, made)
    y = layer(torch.zeros(1, 1, 256).bfloat16())[0, 0]
    torch.testing.assert_close(y, made.bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_weights(name, dtype):
    """Rows of zeros, one outlier, subnormals: finite, zeros stay zeros, and the outlier is kept."""
    made = linear(dtype=dtype)
    made.weight[0] = 0
    made.weight[1] = 0
    made.weight[1, 7] = 1000.0
    made.weight[2] = torch.finfo(dtype).tiny / 4
    layer, exact, _ = built(name, made)
    assert exact.isfinite().all() and layer(torch.randn(1, 1, 256).to(dtype)).isfinite().all()
    small = 1000 * 2**-20 if name == "float8dq-tensor" else 1e-3
    assert (exact[0] == 0).all() or exact[0].abs().max() <= small
    assert exact[1, 7] == pytest.approx(1000, rel=0.15)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_weights_take_the_same_bytes(name):
    made = Quantizer(parse(name), CPU, torch.bfloat16).quantized("layer", linear())
    meta = Quantizer(parse(name), CPU, torch.bfloat16).quantized("layer", linear().to("meta"))
    assert stored_bytes(made.weight) == stored_bytes(meta.weight)
    for inner in made.weight.__tensor_flatten__()[0]:
        like, real = getattr(meta.weight, inner), getattr(made.weight, inner)
        assert like.is_meta and like.shape == real.shape and like.dtype == real.dtype


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_rows_are_quantized_as_the_whole(name, monkeypatch):
    made = linear(N=70)
    whole = Quantizer(parse(name), CPU, torch.bfloat16).quantized("layer", made).weight
    monkeypatch.setattr(scheme_module, "CPU_BLOCK_ELEMENTS", 256 * 16)
    blocks = Quantizer(parse(name), CPU, torch.bfloat16).quantized("layer", made).weight
    assert torch.equal(whole.dequantize(), blocks.dequantize())


# ---------------------------------------------------------------------------------- the tensor


@pytest.fixture(params=NAMES)
def packed(request):
    quantizer = Quantizer(parse(request.param), CPU, torch.bfloat16, "auto")
    return quantizer.quantized("layer", linear(N=64)).weight.data


def test_it_survives_what_weights_go_through(packed, tmp_path):
    layer = nn.Linear(256, 64, False, "meta")
    layer.weight = nn.Parameter(packed, requires_grad=False)
    numbers = packed.dequantize()
    copies = [copy.deepcopy(layer), copy.deepcopy(layer).to("cpu")]
    again = nn.Linear(256, 64, False, "meta")
    again.load_state_dict(layer.state_dict(), assign=True)
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    loaded = nn.Linear(256, 64, False, "meta")
    loaded.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), assign=True)
    for other in (*copies, again, loaded):
        assert isinstance(other.weight.data, PackedWeight)
        assert torch.equal(other.weight.dequantize(), numbers)
    assert copies[0].weight.plane0.data_ptr() != packed.plane0.data_ptr()


def test_it_is_its_inner_tensors(packed, tmp_path):
    names, attributes = packed.__tensor_flatten__()
    save_file({name: getattr(packed, name) for name in names}, tmp_path / "w.safetensors")
    inner = load_file(tmp_path / "w.safetensors")
    again = PackedWeight.__tensor_unflatten__(inner, attributes, packed.shape, packed.stride())
    assert torch.equal(again.dequantize(), packed.dequantize())


def test_rows_of_it_are_rows_of_the_product(packed):
    """Tensor parallelism gives each rank some rows of a weight."""
    x = torch.randn(2, 256).bfloat16()
    whole = F.linear(x, packed)
    for part, rows in (
        (packed[16:40], slice(16, 40)),
        (packed.narrow(0, 3, 7), slice(3, 10)),
        (packed.chunk(4)[2], slice(32, 48)),
        (packed.split(48)[1], slice(48, 64)),
    ):
        assert isinstance(part, PackedWeight) and part.shape[0] == rows.stop - rows.start
        assert torch.equal(part.dequantize(), packed.dequantize()[rows])
        torch.testing.assert_close(F.linear(x, part), whole[:, rows])
    with pytest.raises(NotImplementedError, match="along its rows"):
        packed[:, :128]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_to_another_dtype_changes_what_it_dequantizes_to(packed, dtype):
    layer = nn.Linear(256, 64, False, "meta")
    layer.weight = nn.Parameter(packed, requires_grad=False)
    numbers = packed.dequantize(torch.float32)
    layer = layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight.dequantize(torch.float32), numbers)
    assert layer(torch.randn(1, 256).to(dtype)).dtype == dtype


def test_an_embedding_reads_rows():
    table = nn.Embedding(50, 64).bfloat16().requires_grad_(False)
    quantizer = Quantizer(parse("embed-int8"), CPU, torch.bfloat16)
    made = quantizer("tok_embeddings", table)
    indices = torch.tensor([[3, 49, 3], [0, 1, 2]])
    rows = made.weight.dequantize()[indices]
    assert torch.equal(made(indices), rows)
    assert torch.equal(torch.compile(made, fullgraph=True)(indices), rows)
    # Half a step, max|w| / 127.5, from rounding; a quarter each because torchao rounds the scale to
    # bfloat16, and because the result is rounded to it: 127 steps · 2^-9.
    step = table.weight.abs().amax(1, keepdim=True).double() / 127.5
    assert ((made.weight.dequantize().double() - table.weight.double()).abs() <= step).all()


# ---------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    made = linear()
    made.weight[3, 5] = bad
    with pytest.raises(CheckpointError, match="layers.0.attention.wo has 1 weights that are NaN"):
        Quantizer(parse("fp6"), CPU, torch.bfloat16)("layers.0.attention.wo", made)


@pytest.mark.parametrize(
    "name, kernel, message",
    [
        ("fp6", "torchao", "--kernel torchao: fp6 has no such kernel; here it has "),
        ("none", "torchao", "--kernel torchao: none has no such kernel; here it has cpu, torch"),
        ("float8dq-row", "torchao", "compute capability 8.9 or more; here it has "),
    ],
)
def test_a_kernel_that_cannot_run_says_why_and_what_can(name, kernel, message):
    with pytest.raises(KernelError) as raised:
        Quantizer(parse(name), CPU, torch.bfloat16, kernel)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["bnb-int8", "bnb-nf4", "bnb-fp4"])
def test_without_bitsandbytes_the_error_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(KernelError, match=r"pip install bitsandbytes"):
        Quantizer(parse(name), CPU, torch.bfloat16)("layer", linear())
