"""torchao.quantize_ with quantize.config, on models that are not ours: Hugging Face's Llama, OPT
and GPT-NeoX with random weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import quantize_

from quantbench import quantize
from quantbench.errors import CheckpointError, KernelError, UsageError
from quantbench.quantize.cpu import PackedLinear
from quantbench.quantize.kernel import KernelLinear
from quantbench.quantize.packed import PackedWeight, dequantized
from quantbench.quantize.registry import Quantizer, available
from quantbench.quantize.spec import SHOWN, parse_scheme
from tests.models.hugging_face import assert_near, config, drawn
from tests.models.refused import refusal
from tests.ops.instructions import NEEDS_COMPILER
from tests.quantize.test_every_scheme import activations, compiled

CPU = torch.device("cpu")
# Every scheme with a kernel "cpu". -hqq has the formats of the names without it, and takes seconds
# a layer; -wanda needs a calibration.
NAMES = [
    name
    for name in SHOWN
    if "cpu" in available(parse_scheme(name), CPU, torch.float32) and not name.endswith(("q", "a"))
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "eos_token_id": None}
FAMILIES = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama-tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "opt": ("opt", {"ffn_dim": 512, "word_embed_proj_dim": 256}),
    "neox": ("gpt_neox", {}),
}
TOKENS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(5))


def hugging_face(family, **changes):
    kind, own = FAMILIES[family]
    return drawn(config(kind, **SIZES | own | changes))


def exact(name, layer, spec):
    """The layer's product in float64, by the numbers that its scheme's codes mean."""
    weight = Quantizer.of_shapes(spec, CPU, torch.float32).quantized(name, layer).weight.data
    activation = weight.activation if isinstance(weight, PackedWeight) else None
    whole = dequantized(weight).double()
    bias = None if layer.bias is None else layer.bias.double()
    return lambda x: F.linear(activations(x, activation)[0], whole, bias)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_scheme_and_the_model_generates(family, name):
    """Each on the inputs that it gets in the model: a number between two codes may be rounded to
    either for a difference in the 24th bit, and then later layers differ by a whole step."""
    model, met = hugging_face(family), set()
    plain, layers = model(TOKENS).logits, dict(model.named_modules())
    layers = {at: layer for at, layer in layers.items() if isinstance(layer, nn.Linear)}
    expected = {at: exact(at, layer, parse_scheme(name)) for at, layer in layers.items()}
    quantize_(model, quantize.config(name, kernel="cpu"))
    for at, layer in layers.items():
        assert isinstance(layer, KernelLinear)

        def check(_, given, y, at=at):
            assert_near(y, expected[at](*given))
            met.add(at)

        layer.register_forward_hook(check)
    logits = model(TOKENS).logits
    assert met == set(layers) and len(met) > 8
    if name != "none":  # quantized at all: its error is larger than what is allowed above
        assert (logits - plain).abs().max() > 2e-4 * plain.abs().max()
    made = model.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 17) and torch.equal(made[:, :12], TOKENS)


@NEEDS_COMPILER
def test_a_compiled_model_is_the_model():
    model = hugging_face("llama", num_hidden_layers=1)
    quantize_(model, quantize.config("int4wo-64", "cpu"))
    torch._dynamo.reset()
    with torch.no_grad():
        eager = model(TOKENS, use_cache=False).logits
        assert_near(torch.compile(model)(TOKENS, use_cache=False).logits, eager)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["int8dq", "float8dq-row", "int8dq-int4wo-32", "bnb-int8"])
def test_a_compiled_layer_rounds_activations_as_the_layer(name):
    layer, x = nn.Linear(256, 64).requires_grad_(False), torch.randn(2, 12, 256)
    quantize_(layer, quantize.config(name, "cpu"))
    assert_near(compiled(layer, x), layer(x))


# ---------------------------------------------------------------------------------- what is changed


def small():
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False)


def test_a_filter_chooses_layers():
    """By default only nn.Linear: embed-int8's table is quantized by asking."""
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64)).bfloat16().requires_grad_(False)
    table = Quantizer(parse_scheme("embed-int8"), CPU, torch.bfloat16)("table", model[0])
    quantize_(model, quantize.config("embed-int8", "reference"))
    assert type(model[0]) is nn.Embedding and isinstance(model[1], KernelLinear)
    both = quantize.config("embed-int8", "reference")
    quantize_(model, both, filter_fn=lambda module, _: isinstance(module, nn.Embedding))
    tokens = torch.arange(50)[None]
    assert torch.equal(model[0](tokens), table(tokens))
    model = small()
    quantize_(model, quantize.config("fp6", "reference"), filter_fn=lambda _, name: name == "2")
    assert type(model[0]) is nn.Linear and isinstance(model[2], KernelLinear)
    quantize_(model, quantize.config("int8wo", "reference"), filter_fn=lambda _, name: name == "0")
    assert isinstance(model[0], KernelLinear)


def test_a_lone_layer_one_used_twice_and_hooks():
    """quantize_ drops the root's replacement, and meets a layer of two parents twice."""
    lone = nn.Linear(64, 64)
    quantize_(lone, quantize.config("int8wo", "reference"))
    assert isinstance(lone, KernelLinear) and lone(torch.randn(2, 64)).shape == (2, 64)
    shared, calls = nn.Linear(64, 64), []
    shared.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    quantize_(model, quantize.config("int8wo", "reference"))
    assert model[0][0] is model[1][0] is shared and isinstance(shared, KernelLinear)
    model(torch.randn(2, 64))
    assert len(calls) == 2


@NEEDS_COMPILER
def test_a_quantized_model_can_be_copied_and_its_state_loaded():
    model, x = small(), torch.randn(3, 128)
    quantize_(model, quantize.config("int4wo-32", "cpu"))
    assert isinstance(model[0], PackedLinear)
    other = small()
    quantize_(other, quantize.config("int4wo-32", "cpu"))
    other.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(model)(x), model(x)) and torch.equal(other(x), model(x))


ROWS = [(128,), (0, 128), (2, 0, 128), (1, 2, 3, 128)]
OURS = [("none", "cpu"), ("int8wo", "cpu"), ("int8dq", "cpu"), ("int4wo-64", "cpu"),
        ("int4wo-64", "reference"), ("bnb-nf4", "cpu")]  # fmt: skip
SHAPES = [(*ours, shape) for ours in OURS for shape in ROWS]
# torchao's own product refuses an empty batch
SHAPES += [("int8dq", "torchao", shape) for shape in ROWS if 0 not in shape]


@NEEDS_COMPILER
@pytest.mark.parametrize(("name", "kernel", "shape"), SHAPES)
def test_whatever_shape_an_nn_linear_takes(name, kernel, shape):
    """A single row, no row at all, and rows of many dimensions: as in a plain batch."""
    model, x = small(), torch.randn(shape)
    expected = model(x).shape
    quantize_(model, quantize.config(name, kernel))
    y = model(x)
    assert y.shape == expected
    torch.testing.assert_close(y.flatten(), model(x.reshape(-1, 128)).flatten())


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def refused(model, name="int4wo-64", error=KernelError, **options):
    return refusal(error, lambda: quantize_(model, quantize.config(name), **options))


def test_what_cannot_be_quantized_is_named():
    deep = nn.ModuleDict({"block": nn.Sequential(nn.Linear(64, 64), nn.Linear(100, 64))})
    assert "a Linear with 64 x 100 weights has in_features 100, no multiple of 64" in refused(deep)
    assert "weights is quantized already (PackedLinear)" in refused(deep, "int8wo")
    own = nn.Sequential(Own(64, 64))
    assert "is a Own, whose forward is its own; a filter_fn can leave" in refused(own)
    norm = nn.ModuleDict({"norm": nn.LayerNorm(64)})
    everything = {"filter_fn": lambda _, name: bool(name)}
    assert "is no nn.Linear but LayerNorm" in refused(norm, **everything)
    bad = nn.Sequential(nn.Linear(64, 64))
    bad[0].weight.data[3, 5] = float("nan")
    assert "has 1 weights that are NaN" in refused(bad, error=CheckpointError)


@pytest.mark.parametrize("name, said", [("int4wo", "nearest"), ("autoquant", "after measuring")])
def test_a_config_is_of_a_scheme(name, said):
    with pytest.raises(UsageError, match=said):
        quantize.config(name)
    with pytest.raises(KernelError, match="fp6 has no such kernel"):
        quantize_(small(), quantize.config("fp6", "torchao"))
