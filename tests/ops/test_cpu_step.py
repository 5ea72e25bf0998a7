"""Layers in one op of C++ against the model's own modules, and these in float64."""

import copy
import dataclasses

import pytest
import torch

from kv_cache import CACHES
from models.config import ModelConfig
from models.llama import Transformer
from ops.cpu import build
from ops.cpu import step as block
from quantize.registry import Quantizer
from quantize.spec import parse
from tests.ops.instructions import best as best
from tests.ops.instructions import use

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))

ISAS = ("portable", "avx2", "avx512vnni", "amx")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a model's outputs, in norm, against float64 on the same weights: two layers of some ten
# roundings each. Where the modules' own roundings cost more, half as much again as theirs.
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.003}
PLAIN = ModelConfig(
    "small", dim=96, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, ffn_dim=200,
    vocab_size=50, max_position=64,
)  # fmt: skip
MODELS = {
    "llama": PLAIN,
    "qwen-2": dataclasses.replace(PLAIN, qkv_bias=True),
    "qwen-3": dataclasses.replace(PLAIN, qk_norm=True, head_dim=24),
    "every-bias": dataclasses.replace(PLAIN, attention_out_bias=True, mlp_bias=True),
    "mistral": dataclasses.replace(PLAIN, sliding_window=8),
}


def built(config, dtype, scheme="none"):
    """A model with random weights of its own kind everywhere, quantized for the C++ kernels."""
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 1
    model = model.to(dtype).requires_grad_(False)
    quantizer = Quantizer(parse(scheme), torch.device("cpu"), dtype, "cpu")
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, quantizer(name, module))
    return model


def decoded(model, tokens, cache="dense"):
    """Logits of tokens (B, S), each but the first four decoded on its own."""
    model.setup_caches(tokens.shape[0], 16, CACHES[cache])
    logits = [model(tokens[:, :4], torch.arange(4), last_only=True, start=0)]
    for position in range(4, tokens.shape[1]):
        one = tokens[:, position : position + 1]
        logits.append(model(one, torch.tensor([position]), last_only=True))
    return torch.cat(logits, 1)


def without_cpp(model, tokens, cache="dense"):
    """The same by the model's modules."""
    setup = model.setup_caches

    def setup_caches(*arguments):
        setup(*arguments)
        model.decodes_in_cpp = model.whole_in_cpp = False
        for layer in model.layers:
            layer.decodes_in_cpp = False

    model.setup_caches = setup_caches
    try:
        return decoded(model, tokens, cache)
    finally:
        model.setup_caches = setup


def error(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_the_modules_mean(isa, dtype, name):
    use(isa)
    model = built(MODELS[name], dtype)
    exact = Transformer(MODELS[name]).double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    for rows in (1, 3):
        tokens = torch.randint(0, 50, (rows, 14))
        with torch.no_grad():
            y = decoded(model, tokens)
            assert model.whole_in_cpp
            wanted = without_cpp(exact, tokens)
            allowed = max(ALLOWED[dtype], 1.5 * error(without_cpp(model, tokens), wanted))
            assert error(y, wanted) < allowed


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int8dq", "int4wo-32", "float8dq-row"])
def test_schemes_and_caches(scheme, cache):
    """Against the same weights and kernels by way of modules: only roundings differ."""
    config = dataclasses.replace(PLAIN, head_dim=32, ffn_dim=224)  # as int4 groups want it
    model = built(config, torch.bfloat16, scheme)
    tokens = torch.randint(0, 50, (1, 12))
    with torch.no_grad():
        y = decoded(model, tokens, cache)
        fused = scheme != "float8dq-row"  # which rounds activations outside of its kernel
        assert model.layers[0].decodes_in_cpp == fused
        assert model.decodes_in_cpp == (fused and cache == "dense")
        rounded = 0.08 if scheme == "int8dq" or cache == "int4" else 0.03  # a step is 2^-7 or 2^-4
        assert error(y, without_cpp(model, tokens, cache)) < rounded


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", ["none", "int4wo-32", "fp6"])
def test_any_number_of_threads_gives_the_same_bits(isa, scheme):
    use(isa)
    model = built(dataclasses.replace(PLAIN, ffn_dim=1600), torch.bfloat16, scheme)
    tokens = torch.randint(0, 50, (1, 10))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            with torch.no_grad():
                results.append(decoded(model, tokens))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


def test_a_batch_that_is_no_longer_small_takes_the_modules():
    model = built(PLAIN, torch.bfloat16)
    model.setup_caches(block.FEW + 1, 8)
    assert not model.decodes_in_cpp and not model.layers[0].decodes_in_cpp


@pytest.mark.parametrize("rows", [1, 3])
def test_ends_that_are_not_in_cpp_are_left_to_the_modules(rows):
    """An output layer or an embedding of another kind, around layers that are one op."""
    model = built(PLAIN, torch.bfloat16)
    tokens = torch.randint(0, 50, (rows, 10))
    with torch.no_grad():
        wanted = decoded(model, tokens)
        assert model.whole_in_cpp
        output = torch.nn.Linear(96, 50, bias=False)
        output.weight = model.output.weight
        model.output = output
        y = decoded(model, tokens)
    assert model.decodes_in_cpp and not model.whole_in_cpp
    assert error(y, wanted) < ALLOWED[torch.bfloat16]


def test_compiled_it_stores_where_it_should():
    """The op writes to the caches: the compiler must neither copy nor reorder them."""
    model = built(PLAIN, torch.bfloat16)
    tokens = torch.randint(0, 50, (1, 9))
    with torch.no_grad():
        wanted = decoded(model, tokens)
        caches = [copy.deepcopy(cache.key_codes) for cache in model.caches]
        model.setup_caches(1, 16)
        model(tokens[:, :4], torch.arange(4), last_only=True, start=0)
        step = torch.compile(lambda t, p: model(t, p, last_only=True), fullgraph=True)
        found = [step(tokens[:, i : i + 1], torch.tensor([i])) for i in range(4, 9)]
    assert error(torch.cat(found, 1), wanted[:, 1:]) < ALLOWED[torch.bfloat16]
    for cache, like in zip(model.caches, caches, strict=True):
        assert error(cache.key_codes, like) < ALLOWED[torch.bfloat16]
        assert (cache.key_codes[:, :, 9:] == 0).all()


def test_what_it_does_not_take_is_an_error():
    model = built(PLAIN, torch.bfloat16)
    model.setup_caches(1, 8)
    x, cos = torch.randn(1, 96).bfloat16(), torch.ones(1, 1, 8)
    layers = [layer.for_cpp() for layer in model.layers]

    def run(x=x, cos=cos, position=0, layers=layers, width=200):
        return block.layers(x, layers, cos, cos, torch.tensor([position]), False, 6, 2, width)

    assert run().shape == x.shape
    wide = [dataclasses.replace(layer, keys=layer.keys.float()) for layer in layers]

    def whole(tokens=None, table=model.tok_embeddings.weight, frequencies=model.frequencies):
        tokens = torch.tensor([[30]]) if tokens is None else tokens
        ends = block.Norm(model.norm.weight, 1e-5), block.Linear(model.output.weight, None)
        position = torch.tensor([0])
        return block.decode(
            tokens, table, layers, frequencies, position, False, 6, 2, 200, *ends
        )  # fmt: skip

    assert whole().shape == (1, 50)
    for given, message in (
        ({"tokens": torch.tensor([[50]])}, "token 50 is not in a table of 50"),
        ({"tokens": torch.tensor([[-1]])}, "token -1"),
        ({"tokens": torch.tensor([[1, 2]])}, r"\(B, 1\)"),
        ({"tokens": torch.tensor([[1]], dtype=torch.int32)}, "int64"),
        ({"table": model.tok_embeddings.weight[:40]}, r"a weight is \(50, 96\), not \(40, 96\)"),
        ({"table": model.tok_embeddings.weight.double()}, "dtype|float32"),
        ({"frequencies": model.frequencies.double()}, "frequencies"),
        ({"frequencies": model.frequencies[:7]}, "cache"),
    ):
        with pytest.raises(RuntimeError, match=message):
            whole(**given)
    for given, message in (
        ({"position": 8}, "position 8 is not in a cache of 8"),
        ({"position": -1}, "position -1"),
        ({"x": x.double()}, "dtype|float32"),
        ({"cos": cos[..., :7]}, "cache"),
        ({"width": 100}, r"a weight is \(400, 96\), not \(200, 96\)"),
        ({"layers": wide}, "of x's dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**given)
