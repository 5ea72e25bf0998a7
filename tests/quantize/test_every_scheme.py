"""Every scheme's products, on every kernel the CPU has, against float64; eager and compiled."""

import copy
import math
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import PerRow
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor
from torchao.quantization.quantize_.workflows.intx import intx_unpacked_to_int8_tensor as intx

from quantbench.devices import stored_bytes
from quantbench.errors import CheckpointError, KernelError
from quantbench.ops.cpu import build
from quantbench.quantize import scheme as scheme_module
from quantbench.quantize.activation import rounded
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.registry import SCHEMES, Quantizer, available
from quantbench.quantize.spec import SHOWN, parse
from quantbench.quantize.triton import TritonLinear
from tests.models.refused import refusal
from tests.ops.exact import UNIT

CPU = torch.device("cpu")
NAMES = [name for name in SHOWN if name != "none" and not parse(name).calibrated]
CASES = [
    (name, kernel)
    for name in NAMES
    for kernel, reason in available(parse(name), CPU, torch.bfloat16).items()
    if reason is None
]
STOCK = ("torchao", "bitsandbytes")  # kernels that are not ours


def linear(N=96, K=256, dtype=torch.bfloat16, bias=False):
    return nn.Linear(K, N, bias=bias).to(dtype).requires_grad_(False)


def compiled(layer, x):
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(layer, fullgraph=True)(x)


def built(name, layer, kernel="auto"):
    """The layer as its kernel runs it, and the float64 weights that its codes mean."""
    quantizer = Quantizer(parse(name), CPU, layer.weight.dtype, kernel)
    packed = quantizer.quantized("layer", layer)
    weight = packed.weight.data
    assert isinstance(weight, PackedWeight)
    exact = weight.dequantize(torch.float32).double()
    return quantizer.built("layer", packed), exact, weight.activation


def activations(x, activation, stock=False):
    """x as the scheme rounds it, float64; and by how much each may be off for being near a tie.

    stock: for a kernel that is not ours. It may divide by the scale in another order, which moves
    a quotient of at most 128 by two roundings of float32, 2^-16: near the middle between two codes
    it then takes the other one. torchao rounds what is not float32 in x's own dtype: its own
    functions say to what.
    """
    if activation is None:
        return x.double(), torch.zeros_like(x)
    if stock and x.dtype != torch.float32 and activation == "int8":
        stored = Int8Tensor.from_hp(x.flatten(0, -2), PerRow())
        numbers = stored.qdata.double() * stored.scale.double()
        return numbers.view(x.shape), torch.zeros_like(x)
    if stock and x.dtype != torch.float32 and activation == "int8-asymmetric":
        return intx._apply_int8_act_asym_per_token_quant_dequant(x).double(), torch.zeros_like(x)
    numbers, scale = rounded(x, activation)
    given = x.half() if activation == "int8-bitsandbytes" else x
    quotient = given.double() / scale
    near = (quotient - quotient.floor() - 0.5).abs() < 2.0**-15
    return numbers.double() * scale.double(), near * scale * stock


def assert_product(y, x, exact, activation, kernel):
    """y is x (…, K) times exact (N, K), but for roundings that are counted here.

    Ours round once to y's dtype, after a sum in float32: the error of a sum of K terms grows as
    √K roundings of their sizes (Higham and Mary 2019); 16 for 256 terms. Activations of 16 bits
    become integers of 15 bits and a sign, and AMX tiles may hold weights of bfloat16. The others
    round a weight, its scale and the product in y's dtype, too: three roundings of each term; and
    bitsandbytes takes 6.200124e-5 for 1 / 127², 1.8e-5 too much.
    """
    stock = kernel in STOCK
    numbers, ties = activations(x, activation, stock)
    wanted, unit = numbers @ exact.T, UNIT[x.dtype]
    assert y.dtype == x.dtype and y.shape == wanted.shape
    terms = numbers.abs() @ exact.abs().T
    allowed = unit * wanted.abs() + 16 * 2.0**-24 * terms + ties.double() @ exact.abs().T + 2.0**-25
    if stock:
        allowed += 3 * unit * terms + 1.8e-5 * wanted.abs()
    elif x.dtype != torch.float32:
        allowed += 2.0**-15 * numbers.abs().amax(-1, keepdim=True) * exact.abs().sum(1)
        if x.dtype == torch.bfloat16 and activation is None and build.isa() == "amx":
            allowed += unit * terms
    error = (y.double() - wanted).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times what is allowed"


@pytest.mark.parametrize("name, kernel", CASES)
def test_products_are_those_of_the_stored_weights(name, kernel):
    """And the bias, which a row of zeros shows alone."""
    taken = [dtype for dtype in UNIT if available(parse(name), CPU, dtype)[kernel] is None]
    dtype = random.choice(taken)  # another one in another run
    given = linear(dtype=dtype, bias=True)
    layer, exact, activation = built(name, given, kernel)
    zeros = layer(torch.zeros(1, 1, 256).to(dtype))[0, 0]
    torch.testing.assert_close(zeros, given.bias, rtol=0, atol=1e-6)
    given.bias = None
    layer, exact, activation = built(name, given, kernel)
    for rows in ((1, 1), (1, 3), (17, 1)):
        x = torch.randn(*rows, 256).to(dtype)
        assert_product(layer(x), x, exact, activation, kernel)


@pytest.mark.parametrize("name", NAMES)
def test_triton_products_are_those_of_the_stored_weights(name):
    """In the interpreter, or on a GPU; tests/ops has every format, shape and dtype."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, exact, activation = built(name, linear(N=20, dtype=torch.float32), "reference")
    layer = TritonLinear.of(layer.to(device), parse(name))
    for rows in ((1, 1), (1, 3)):
        x = torch.randn(*rows, 256)
        assert_product(layer(x.to(device)).cpu(), x, exact, activation, "triton")


def test_triton_takes_no_code_that_is_no_number():
    """Its kernels read E4M3's NaN as 480."""
    layer, _, _ = built("float8wo", linear(N=20, dtype=torch.float32), "reference")
    layer.weight.plane0.view(torch.uint8)[3, 7] = 0xFF
    with pytest.raises(KernelError, match="NaN"):
        TritonLinear.of(layer, parse("float8wo"))


@pytest.mark.parametrize("kernel", sorted({kernel for _, kernel in CASES}))
def test_compiled_products_are_the_eager_ones(kernel):
    """A kernel's schemes differ in their formats, not in what is traced: four of them a run."""
    names = [name for name, its in CASES if its == kernel]
    for name in random.sample(names, min(4, len(names))):
        layer, exact, activation = built(name, linear(dtype=torch.float32), kernel)
        x = torch.randn(1, 1, 256)
        assert_product(compiled(layer, x), x, exact, activation, kernel)


@pytest.mark.parametrize("N, K", [(256, 256), (2048, 2048), (1000, 512)])
def test_one_compiled_row_of_int8dq_is_no_garbage(N, K):
    """torch._int_mm on a row of stride 0 (torch 2.13): errors of 1e4 times the result."""
    layer, exact, _ = built("int8dq", linear(N, K), "torchao")
    x = torch.randn(1, 1, K).bfloat16()
    wanted = x.double() @ exact.T
    # int8 steps of activations, 1/127 of a row's largest: some 1 %
    assert (compiled(layer, x) - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_odd_shapes_get_a_kernel_that_takes_them(name):
    N, K = random.choice([(1, 64), (33, 128), (100, 192)])
    if reason := SCHEMES[type(parse(name))].refuses(parse(name), K):
        with pytest.raises(KernelError, match="layer has in_features"):
            built(name, linear(N, K))
        assert str(K) in reason
        return
    layer, exact, activation = built(name, linear(N, K, torch.float32))
    x = torch.randn(1, 2, K)
    assert_product(layer(x), x, exact, activation, "auto")


@pytest.mark.parametrize("name", NAMES)
def test_extreme_weights(name):
    """Rows of zeros, an outlier, subnormals: finite, zeros stay zeros, the outlier an outlier."""
    dtype = random.choice([torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("name", ["int4wo-64", "uintx-2-64", "int8dq-int4wo-32", "sparse-marlin"])
def test_float16_weights_near_the_end_of_the_range_stay_finite(name):
    layer = linear(8, 256, torch.float16)
    layer.weight[0, :2] = torch.tensor([65504.0, -65504.0])
    packed = Quantizer(parse(name), CPU, torch.float16).quantized("layer", layer).weight.data
    assert packed.scale.isfinite().all() and packed.dequantize().isfinite().all()


@pytest.mark.parametrize("name", ["int8wo", "int8dq"])
def test_float16_products_that_overflow_before_their_scale_do_not(name):
    """torchao puts 128 · x · √K and more in float16, 65504 at most; the result is some 50."""
    layer, x = linear(32, 1024, torch.float16), (torch.rand(1, 1, 1024) * 20).half()
    wanted = x.double() @ layer.weight.abs_().double().T
    assert wanted.max() < 1000
    made = Quantizer(parse(name), CPU, torch.float16)("layer", layer)
    torch.testing.assert_close(made(x).double(), wanted, rtol=0.01, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_rows_and_shapes_alone_give_the_same_tensor(name, monkeypatch):
    made, quantizer = linear(N=70), Quantizer(parse(name), CPU, torch.bfloat16)
    whole = quantizer.quantized("layer", made).weight
    monkeypatch.setattr(scheme_module, "CPU_BLOCK_ELEMENTS", 256 * 16)
    blocks = quantizer.quantized("layer", made).weight
    assert torch.equal(whole.dequantize(), blocks.dequantize())
    meta = quantizer.quantized("layer", made.to("meta")).weight
    assert stored_bytes(whole) == stored_bytes(meta)
    for inner in whole.__tensor_flatten__()[0]:
        like, real = getattr(meta, inner), getattr(whole, inner)
        assert like.is_meta and like.shape == real.shape and like.dtype == real.dtype


# ---------------------------------------------------------------------------------- the tensor


@pytest.fixture(params=NAMES)
def packed(request):
    quantizer = Quantizer(parse(request.param), CPU, torch.bfloat16, "auto")
    return quantizer.quantized("layer", linear(N=64)).weight.data


def as_weight(weight):
    layer = nn.Linear(256, 64, False, "meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def test_it_survives_what_weights_go_through(packed, tmp_path):
    layer, numbers = as_weight(packed), packed.dequantize()
    others = [copy.deepcopy(layer), copy.deepcopy(layer).to("cpu")]
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    for state in (layer.state_dict(), torch.load(tmp_path / "weights.pt", weights_only=True)):
        others.append(nn.Linear(256, 64, False, "meta"))
        others[-1].load_state_dict(state, assign=True)
    names, attributes = packed.__tensor_flatten__()
    save_file({name: getattr(packed, name) for name in names}, tmp_path / "w.safetensors")
    inner = load_file(tmp_path / "w.safetensors")
    again = PackedWeight.__tensor_unflatten__(inner, attributes, packed.shape, packed.stride())
    for other in (*others, as_weight(again)):
        assert isinstance(other.weight.data, PackedWeight)
        assert torch.equal(other.weight.dequantize(), numbers)
    assert others[0].weight.plane0.data_ptr() != packed.plane0.data_ptr()
    # Another dtype changes what it dequantizes to, not the numbers.
    dtype, numbers = random.choice([torch.float16, torch.float32]), packed.dequantize(torch.float32)
    layer = layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.weight.dequantize(torch.float32), numbers)
    assert layer(torch.randn(1, 256).to(dtype)).dtype == dtype


def test_compiled_code_is_cached_for_the_sources_it_came_from(monkeypatch):
    weight = Quantizer(parse("fp6"), CPU, torch.float32).quantized("layer", linear()).weight.data
    before = weight._stable_hash_for_caching()
    assert weight._stable_hash_for_caching() == before
    monkeypatch.setattr("quantbench.quantize.packed.TRACED_DIGEST", "of other sources")
    assert weight._stable_hash_for_caching() != before


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


def test_an_embedding_reads_rows():
    table = nn.Embedding(50, 64).bfloat16().requires_grad_(False)
    quantizer = Quantizer(parse("embed-int8"), CPU, torch.bfloat16)
    made = quantizer("tok_embeddings", table)
    indices = torch.tensor([[3, 49, 3], [0, 1, 2]])
    rows = made.weight.dequantize()[indices]
    assert torch.equal(made(indices), rows) and torch.equal(compiled(made, indices), rows)
    # Half a step, max|w| / 127.5, from rounding; a quarter each because torchao rounds the scale to
    # bfloat16, and because the result is rounded to it: 127 steps · 2^-9.
    step = table.weight.abs().amax(1, keepdim=True).double() / 127.5
    assert ((made.weight.dequantize().double() - table.weight.double()).abs() <= step).all()


# ---------------------------------------------------------------------------------- the registry


@pytest.mark.parametrize("name", ["none", "int8wo", "embed-int8"])
def test_numbers_that_are_not_finite_are_refused_by_name(name):
    """Weights', norms' and biases'. With these every token would be the same one."""
    quantizer, bad = Quantizer(parse(name), CPU, torch.float16), (math.nan, math.inf, -math.inf)
    norm, biased = nn.RMSNorm(8, dtype=torch.float16), linear(dtype=torch.float16, bias=True)
    norm.weight.data[2], biased.bias[1] = random.choice(bad), random.choice(bad)
    weighed = linear(dtype=torch.float16)
    weighed.weight[3, 5] = random.choice(bad)
    for module in (norm, biased, weighed):
        assert refusal(CheckpointError, quantizer, "layers.0.part", module) == (
            "layers.0.part has 1 weights that are NaN or infinite: fetch the checkpoint again or "
            "give --precision bfloat16"
        )


@pytest.mark.parametrize(
    "name, kernel, message",
    [
        ("fp6", "torchao", "--kernel torchao: fp6 has no such kernel; here it has "),
        ("none", "torchao", "--kernel torchao: none has no such kernel; here it has cpu, torch"),
        ("float8dq-row", "torchao", "compute capability 8.9 or more; here it has "),
    ],
)
def test_a_kernel_that_cannot_run_says_why_and_what_can(name, kernel, message):
    how = parse(name), CPU, torch.bfloat16, kernel
    assert message in refusal(KernelError, Quantizer, *how)


def test_a_width_that_torch_reads_past_is_refused_by_name_or_left_to_another_kernel():
    name, layer, how = "layers.0.feed_forward.w2", linear(64, 264), (parse("int8wo"), CPU)
    with pytest.raises(KernelError, match="w2 with kernel torchao has in_features 264; .* of 16"):
        Quantizer(*how, torch.bfloat16, "torchao")(name, layer)
    quantizer = Quantizer(*how, torch.bfloat16)
    quantizer(name, layer)
    assert set(quantizer.ran) <= {"cpu", "reference"}


@pytest.mark.parametrize("name", ["bnb-int8", "bnb-nf4", "bnb-fp4"])
def test_only_its_own_kernel_needs_bitsandbytes(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    Quantizer(parse(name), CPU, torch.bfloat16)("layer", linear())
    with pytest.raises(KernelError, match=r"pip install bitsandbytes"):
        Quantizer(parse(name), CPU, torch.bfloat16, "bitsandbytes")
