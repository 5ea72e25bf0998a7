"""A decoding step in C++ against the model's own modules, and these in float64."""

import dataclasses

import pytest
import torch

from generate import Generator
from kv_cache import CACHES
from models import build
from models.config import ModelConfig
from ops.cpu import build as cpu_build
from ops.cpu import step
from quantize.registry import Quantizer
from quantize.spec import parse
from tests.ops.instructions import best as best
from tests.ops.instructions import use

pytestmark = pytest.mark.skipif(bool(cpu_build.unavailable()), reason=str(cpu_build.unavailable()))

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
    model = build(config)
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


def doubled(model):
    """The model in float64, with the same weights."""
    exact = build(model.config).double().requires_grad_(False)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    return exact


def decoded(model, tokens, cache="dense", decoder="cpu-step"):
    """Logits of tokens (B, S), each but the first four decoded on its own."""
    generator = Generator(model, len(tokens), 16, cache, decoder)
    logits = [generator.forward(tokens[:, :4])[:, -1:]]
    for position in range(4, tokens.shape[1]):
        logits.append(generator.forward(tokens[:, position : position + 1], position))
    return torch.cat(logits, 1)


def error(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_the_modules_mean(isa, dtype, name):
    use(isa)
    model = built(MODELS[name], dtype)
    exact = doubled(model)
    for rows in (1, 3):
        tokens = torch.randint(0, 50, (rows, 14))
        wanted = decoded(exact, tokens, decoder="modules")
        own = error(decoded(model, tokens, decoder="modules"), wanted)
        assert error(decoded(model, tokens), wanted) < max(ALLOWED[dtype], 1.5 * own)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int8dq", "int4wo-32", "float8dq-row"])
def test_schemes_and_caches(scheme, cache):
    """Against the same weights and kernels by way of modules: only roundings differ."""
    config = dataclasses.replace(PLAIN, head_dim=32, ffn_dim=224)  # as int4 groups want it
    model = built(config, torch.bfloat16, scheme)
    tokens = torch.randint(0, 50, (1, 12))
    fused = scheme != "float8dq-row"  # which rounds activations outside of its kernel
    name = ("cpu-step" if cache == "dense" else "cpu-layer") if fused else "modules"
    assert Generator(model, 1, 16, cache).decoder.name == name
    rounded = 0.08 if scheme == "int8dq" or cache == "int4" else 0.03  # a step is 2^-7 or 2^-4
    y = decoded(model, tokens, cache, "auto")
    assert error(y, decoded(model, tokens, cache, "modules")) < rounded


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
            results.append(decoded(model, tokens))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("decoder", ["cpu-stack", "cpu-layer"])
def test_smaller_ops_are_the_same_step(decoder, rows):
    """Each decoder that takes a model gives the same numbers, whoever does the ends."""
    model = built(PLAIN, torch.bfloat16)
    tokens = torch.randint(0, 50, (rows, 10))
    wanted = decoded(model, tokens)
    assert error(decoded(model, tokens, decoder=decoder), wanted) < ALLOWED[torch.bfloat16]


def test_compiled_it_stores_where_it_should():
    """The op writes to the caches: the compiler must neither copy nor reorder them."""
    model = built(PLAIN, torch.bfloat16)
    tokens = torch.randint(0, 50, (1, 9))
    wanted = decoded(model, tokens)
    eager, compiled = (Generator(model, 1, 16, compile_decode=c) for c in (False, True))
    for generator in (eager, compiled):
        generator.forward(tokens[:, :4])
        y = [generator.forward(tokens[:, [i]], i) for i in range(4, 9)]
        assert error(torch.cat(y, 1), wanted[:, 1:]) < ALLOWED[torch.bfloat16]
    for cache, like in zip(compiled.caches, eager.caches, strict=True):
        assert error(cache.key_codes, like.key_codes) < ALLOWED[torch.bfloat16]
        assert (cache.key_codes[:, :, 9:] == 0).all()


def test_what_it_does_not_take_is_an_error():
    model = built(PLAIN, torch.bfloat16)
    decoder = Generator(model, 1, 8, decoder="cpu-step").decoder
    x, cos = torch.randn(1, 96).bfloat16(), torch.ones(1, 1, 8)

    def run(x=x, cos=cos, position=0, caches=decoder.caches, width=200):
        shape = dataclasses.replace(decoder.shape, width=width)
        position = torch.tensor([position])
        return step.layers(x, decoder.parts, caches, cos, cos, position, shape)

    assert run().shape == x.shape
    wide = [cache.float() for cache in decoder.caches]

    def whole(tokens=None, table=model.tok_embeddings.weight, frequencies=decoder.frequencies):
        return step.decode(
            torch.tensor([[30]]) if tokens is None else tokens,
            table,
            decoder.parts,
            decoder.caches,
            frequencies,
            torch.tensor([0]),
            decoder.shape,
            decoder.norm,
            decoder.output,
        )

    assert whole().shape == (1, 50)
    for given, message in (
        ({"tokens": torch.tensor([[50]])}, "token 50 is not in a table of 50"),
        ({"tokens": torch.tensor([[-1]])}, "token -1"),
        ({"tokens": torch.tensor([[1, 2]])}, r"\(B, 1\)"),
        ({"tokens": torch.tensor([[1]], dtype=torch.int32)}, "int64"),
        ({"table": model.tok_embeddings.weight[:40]}, r"a weight is \(50, 96\), not \(40, 96\)"),
        ({"table": model.tok_embeddings.weight.double()}, "dtype|float32"),
        ({"frequencies": decoder.frequencies.double()}, "frequencies"),
        ({"frequencies": decoder.frequencies[:7]}, "cache"),
    ):
        with pytest.raises(RuntimeError, match=message):
            whole(**given)
    for given, message in (
        ({"position": 8}, "position 8 is not in a cache of 8"),
        ({"position": -1}, "position -1"),
        ({"x": x.double()}, "dtype|float32"),
        ({"cos": cos[..., :7]}, "cache"),
        ({"width": 100}, r"a weight is \(400, 96\), not \(200, 96\)"),
        ({"caches": wide}, "of x's dtype"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**given)
