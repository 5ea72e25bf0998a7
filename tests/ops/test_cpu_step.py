"""A decoding step in C++ against the model's own modules, and these in float64."""

import dataclasses
import itertools
import random
import re

import pytest
import torch

from quantbench.generate import Generator
from quantbench.kv_cache import CACHES
from quantbench.models import build
from quantbench.models.config import Mixture, ModelConfig, RopeScaling
from quantbench.ops import formats
from quantbench.quantize.registry import SCHEMES, Quantizer
from quantbench.quantize.spec import parse
from tests import seeds
from tests.models.refused import refuses
from tests.models.small import by_steps, on_kernel
from tests.ops.exact import DTYPES
from tests.ops.instructions import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

ISAS = ("portable", "avx2", "avxvnni", "avx512vnni", "avx512bf16", "amx")
ON_EVERY_ISA = pytest.mark.parametrize("isa", ISAS, indirect=True)
# Bound on a model's outputs, in norm, against float64 on the same weights: two layers of some ten
# roundings each. Where the modules' own roundings cost more, twice theirs.
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.003}
PLAIN = ModelConfig(
    "small", dim=96, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, ffn_dim=200,
    vocab_size=50, max_position=64,
)  # fmt: skip
GEMMA = dataclasses.replace(
    PLAIN, architecture="gemma", sliding_window=5, attention_scale=0.2, post_norms=True
)
# Widths of experts are no multiple of a vector's 16 and 32 numbers; the first layer may be dense.
MIXTURE = dataclasses.replace(PLAIN, architecture="mixtral")
SOME = Mixture(5, 2, 72, normalized=False, shared_dim=40, dense_layers=(0,))
MODELS = {
    "llama": PLAIN,
    "qwen-2": dataclasses.replace(PLAIN, qkv_bias=True),
    "qwen-3": dataclasses.replace(PLAIN, qk_norm=True, head_dim=24),
    "every-bias": dataclasses.replace(PLAIN, attention_out_bias=True, mlp_bias=True),
    "mistral": dataclasses.replace(PLAIN, sliding_window=8),
    "smollm3": dataclasses.replace(PLAIN, no_rope_layers=(1,)),
    "granite": dataclasses.replace(
        PLAIN, embedding_multiplier=3.0, residual_multiplier=0.4, logits_divisor=4.0,
        attention_scale=0.3,
    ),
    "olmo-2": dataclasses.replace(
        PLAIN, pre_norms=False, post_norms=True, qk_norm=True, joint_qk_norm=True,
    ),
    "arcee": dataclasses.replace(PLAIN, squared_relu=True, mlp_bias=True),
    "glm-4": dataclasses.replace(PLAIN, post_norms=True, rotary_dim=8, qkv_bias=True),
    "gemma-2": dataclasses.replace(
        GEMMA, full_layers=(1,), attention_softcap=5.0, logit_softcap=8.0,
    ),
    "gemma-3": dataclasses.replace(
        GEMMA, full_layers=(1,), window_rope_theta=100.0, qk_norm=True, head_dim=256,
        num_kv_heads=1, attention_scale=0.05, rope_scaling=RopeScaling(8.0, kind="linear"),
    ),
    "some experts": dataclasses.replace(MIXTURE, num_layers=3, mixture=SOME),
    "normalized": dataclasses.replace(MIXTURE, mixture=Mixture(7, 3, 24)),
    "all experts": dataclasses.replace(MIXTURE, mixture=Mixture(3, 3, 56, shared_dim=104)),
}  # fmt: skip
PACKED = dataclasses.replace(PLAIN, dim=128, num_heads=4, head_dim=32, ffn_dim=256)


def built(config, dtype, scheme="none"):
    """A model whose every weight is random, quantized for the C++ kernels."""
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 1
    return on_kernel(model.to(dtype).requires_grad_(False), scheme, dtype)


def doubled(model):
    """The model in float64, with the same weights."""
    exact = build(model.config).double().requires_grad_(False)
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    return exact


def decoded(model, tokens, cache="dense", decoder="cpu-step", prompt=4):
    """Logits of tokens (B, S), each but the first four, the prompt's, decoded on its own."""
    generator = Generator(model, len(tokens), 16, cache, decoder)
    logits = generator.forward(tokens[:, :prompt])[:, -1:]
    return torch.cat([logits, by_steps(generator, tokens[:, prompt:], prompt)], 1)


def decoded_by(decoder, model, tokens, cache, start, size, rows=None):
    """Logits of steps for tokens (B, S) behind `start` random positions; and the caches."""
    generator = filled(model, rows or len(tokens), start, cache, decoder, size)
    assert generator.decoder.name == decoder
    return by_steps(generator, tokens, start), generator.caches


def filled(model, rows, depth, cache, decoder="cpu-step", size=None):
    """A Generator whose caches have the same random numbers in every call."""
    generator = Generator(model, rows, size or depth, cache, decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator.fill_randomly(depth)
    return generator


def error(one, other):
    return float((one.double() - other.double()).norm() / other.double().norm())


def close(found, by_modules, wanted, roundings):
    """Every row of logits, for none may be a mixture of others, is about as near to float64's as
    the modules' own are. `roundings`: how many times as far it may be."""
    own = max(map(error, by_modules, wanted))
    allowed = max(ALLOWED[found.dtype], roundings * own)
    assert max(map(error, found, wanted)) < allowed


@pytest.mark.parametrize("name", MODELS)
@ON_EVERY_ISA
def test_what_the_modules_mean(isa, name):
    """Token by token; and several of a sequence at once, which modules read as a part of a prompt.
    Blocks of rows in the products differ in size, and one row is shared out in another way."""
    # In 16 bits another expert may be chosen where two score alike.
    dtype = torch.float32 if name in ("some experts", "normalized") else random.choice(DTYPES)
    model, slots = built(MODELS[name], dtype), MODELS[name].sliding_window or 32
    exact = doubled(model)
    for rows in (1, random.choice((2, 3, 4)), random.choice((5, 12, 16))):
        tokens = torch.randint(0, 50, (rows, 12))
        by_modules, wanted = (decoded(m, tokens, decoder="modules") for m in (model, exact))
        with seeds.naming((dtype, rows)):
            close(decoded(model, tokens), by_modules, wanted, 2)
    for rows, most in ((1, 16), (random.choice((2, 3, 4)), 4)):
        count = random.randint(2, min(most, slots))
        at = random.randint(0, slots - count)
        prompt, tokens = torch.randint(0, 50, (rows, at + count)).split((at, count), 1)

        def behind(model, decoder, prompt=prompt):
            generator = Generator(model, len(prompt), 32, decoder=decoder)
            if prompt.numel():
                generator.forward(prompt)
            return generator

        by_modules, wanted = (behind(m, "modules").forward(tokens, at) for m in (model, exact))
        with seeds.naming((dtype, at, tokens)):  # few tokens scatter more than whole texts
            close(stepped(behind(model, "cpu-step"), tokens, at), by_modules, wanted, 3)


@torch.no_grad()
def stepped(generator, tokens, *positions):
    """Logits (B, S, V) of a step for tokens (B, S), the first of each row at these positions."""
    logits = generator.decoder.step(tokens, torch.tensor(positions))
    return logits.view(*tokens.shape, -1)


SOME_OF_ALL = "none int8wo int8dq int4wo-64 fp6 float8wo bnb-nf4 sparse-marlin".split()


@pytest.mark.parametrize("scheme", SOME_OF_ALL)
@ON_EVERY_ISA
def test_a_token_among_others_of_its_sequence_gets_the_bits_it_gets_alone(isa, scheme):
    """So guesses that are read together, or one by one, lead to the same text."""
    experts = {"architecture": "mixtral", "mixture": Mixture(4, 2, 128, shared_dim=64)}
    config = dataclasses.replace(PACKED, num_heads=8, num_kv_heads=8, max_position=2048)
    config = dataclasses.replace(config, **random.choice(({}, experts)))
    cache, dtype = random.choice(list(CACHES)), random.choice(DTYPES)
    rows, count = random.choice(((1, random.randint(2, 16)), (2, 8), (3, 5)))
    at = random.choice((3, 1500))
    model, tokens = built(config, dtype, scheme), torch.randint(0, 50, (rows, count))
    together = filled(model, rows, at + count, cache)
    separate = [filled(model, 1, at + count, cache) for _ in range(rows)]
    for row, generator in enumerate(separate):
        for mine, of_all in buffers(generator, together):
            mine.copy_(of_all[[row]])
    alone = [by_steps(generator, tokens[[row]], at) for row, generator in enumerate(separate)]
    with seeds.naming((config, cache, dtype, rows, count, at)):
        assert torch.equal(stepped(together, tokens, at), torch.cat(alone))


def buffers(*generators):
    """The buffers of their caches, pair by pair."""
    return zip(*([b for c in each.caches for b in c.buffers()] for each in generators), strict=True)


@ON_EVERY_ISA
def test_each_row_at_its_own_position(isa):
    """A row's logits, and what it stores, are those of a step with all rows at its position."""
    rows, cache, dtype = random.randint(2, 6), random.choice(list(CACHES)), random.choice(DTYPES)
    config = dataclasses.replace(random.choice((PLAIN, MODELS["mistral"])), head_dim=32)
    model, tokens = built(config, dtype), torch.randint(0, 50, (rows, 1))
    positions = [random.randrange(24) for _ in range(rows)]
    each = filled(model, rows, 24, cache)
    logits = stepped(each, tokens, *positions)
    for row, position in enumerate(positions):
        same = filled(model, rows, 24, cache)
        with seeds.naming((config, cache, dtype, positions)):
            assert torch.equal(logits[row], stepped(same, tokens, position)[row])
            assert all(torch.equal(mine[row], wanted[row]) for mine, wanted in buffers(each, same))


@pytest.mark.parametrize("scheme", ["none", "int8dq", "int4wo-32", "fp6", "sparse-marlin"])
@ON_EVERY_ISA
def test_any_number_of_threads_gives_the_same_bits(isa, pieces, scheme, same_for_any_threads):
    """Wherever a piece of a dense layer or of an expert starts and ends. Prompts have one token:
    more than 16 rows are torch's, whose bits differ with AMX."""
    mixture = Mixture(6, 3, 192, normalized=False, shared_dim=128, dense_layers=(0,))
    width = 1600 if scheme in ("none", "int4wo-32") else 256
    config = dataclasses.replace(PACKED, architecture="mixtral", ffn_dim=width, mixture=mixture)
    model = built(config, torch.bfloat16, scheme)
    tokens = torch.randint(0, 50, (random.choice((1, 3, 9)), 8))
    same_for_any_threads(lambda: decoded(model, tokens, prompt=1))


@pytest.mark.parametrize(
    ("depth", "rows", "cache"), [*itertools.product([1500], [1, 3], CACHES), (60_011, 1, "dense")]
)
def test_a_deep_context_is_shared_by_the_team(depth, rows, cache, same_for_any_threads):
    """More than a thread takes alone. In float32 hardly a number is near enough to the middle of
    two codes to go to the other, which would cost 1/254 of it, or an eighth.

    The deepest position is rotated by float32 angles, of which 60011 radians are rounded to 2^-9 of
    one, in the float64 modules as well: only sums differ."""
    config = dataclasses.replace(PLAIN, head_dim=64, max_position=depth + 3)
    model = built(config, torch.float32)
    tokens = torch.randint(0, 50, (rows, 3))
    given = (tokens, cache, depth, depth + 3)
    y = same_for_any_threads(lambda: decoded_by("cpu-step", model, *given)[0])
    wanted = decoded_by("modules", doubled(model) if cache == "dense" else model, *given)[0]
    # a sum of 1500 float32 products is off by some more than one of 16
    assert error(y, wanted) < {"dense": 2e-5, "int8": 0.005, "fp8": 0.02, "int4": 0.1}[cache]


# One scheme for each format of ops/formats.py, and for each way in which scales lie
EXACT = (
    *("int8wo", "int8dq", "float8wo", "fp6", "int4wo-32", "int4wo-64", "int8dq-int4wo-32"),
    *("mxfp4", "nvfp4", "bnb-nf4", "bnb-fp4", "sparse-marlin", "uintx-2-8"),
    *(f"uintx-{bits}-32" for bits in range(1, 8)),
)


def test_every_format_has_its_scheme():
    """Those that ops/formats.py's docstring lists, which defines their codes."""
    quantize = {name: SCHEMES[type(parse(name))].quantize for name in EXACT}
    weight = torch.randn(16, 128)
    packed = {quantize[name](weight, parse(name)).format for name in EXACT}
    of_files = {"uint", "iq4nl"}  # tests/models/test_as_is.py has these
    assert packed | of_files == set(re.findall(r"^ {4}(\S+) ", formats.__doc__, re.M))


@pytest.mark.parametrize("scheme", EXACT)
def test_packed_weights_in_float32(scheme):
    """Logits against modules with the same kernels, whose products test_linear.py compares with
    float64: only sums differ. Each row alone, for a row that is another row's is off by 1. All
    experts are chosen: a sum may decide which.

    An activation that is rounded to 8 bits and lies between two codes may go to either. That
    happens in a row of four, which is off by some steps of 1/254 of its largest then.
    """
    rounding = scheme.startswith("int8dq")
    mixture = Mixture(3, 3, 128, shared_dim=64)
    for more in ({}, {"architecture": "mixtral", "mixture": mixture}):
        model = built(dataclasses.replace(PACKED, **more), torch.float32, scheme)
        errors = []
        for rows in (1, 3, 5, 12, 16):  # from 5 on, products of several rows at a time
            tokens = torch.randint(0, 50, (rows, 9))
            errors += map(error, decoded(model, tokens), decoded(model, tokens, decoder="modules"))
        assert max(errors) < (0.2 if rounding else 1e-4)
        assert not rounding or sorted(errors)[len(errors) // 4] < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scheme", ["none", "embed-int8"])
def test_a_quantized_embedding_and_a_biased_output(scheme, rows):
    """Against float64 modules of the same weights; the int8 table is read back as numbers."""
    model = built(PLAIN, torch.bfloat16)
    exact = doubled(model)
    bias = torch.randn(50).bfloat16()
    model.output.bias = torch.nn.Parameter(bias, requires_grad=False)
    exact.output.bias = torch.nn.Parameter(bias.double(), requires_grad=False)
    if scheme != "none":
        quantizer = Quantizer(parse(scheme), torch.device("cpu"), torch.bfloat16, "cpu")
        model.tok_embeddings = quantizer("tok_embeddings", model.tok_embeddings)
        table = model.tok_embeddings(torch.arange(50)).double()
        exact.tok_embeddings.weight = torch.nn.Parameter(table, requires_grad=False)
    tokens = torch.randint(0, 50, (rows, 10))
    wanted = decoded(exact, tokens, decoder="modules")
    own = error(decoded(model, tokens, decoder="modules"), wanted)
    assert error(decoded(model, tokens), wanted) < max(ALLOWED[torch.bfloat16], 1.5 * own)


def decoder_step(decoder, x, positions=(0,), sequences=None, **changed):
    """A step of a CpuStep, some of its arguments changed."""
    op = dataclasses.replace(decoder.op, **changed)
    return op(x, torch.tensor(positions), sequences)


def test_experts_that_do_not_fit_together_are_an_error():
    model = built(MODELS["some experts"], torch.float32)
    decoder = Generator(model, 1, 8, decoder="cpu-step").decoder
    parts = 14  # of a layer, in the order of `Part` in step/step.h
    router, gate, table = parts + 9, parts + 10, parts + 11

    def run(index, part):
        given = list(decoder.op.parts)
        given[index] = part
        return decoder_step(decoder, torch.randn(1, 96), parts=given)

    whole = decoder.op.parts[table]
    assert run(table, whole).shape == (1, 50)
    narrow = whole.clone()
    narrow[2] = 0
    wrong = [
        (router, decoder.op.parts[router][:4], "the table of 4 experts"),
        (router, decoder.op.parts[router].double(), "a router has to be"),
        (gate, decoder.op.parts[gate][:95], "96 numbers of x's dtype"),
        (gate, torch.empty(0), "a shared expert and its gate go together"),
        (table, whole[:5], "the table of 5 experts has 5 numbers"),
        (table, narrow, "the table of 5 experts"),
    ]
    refuses(run, [({"index": index, "part": part}, message) for index, part, message in wrong])


def test_what_it_does_not_take_is_an_error():
    model = built(PLAIN, torch.bfloat16)
    decoder = Generator(model, 1, 8, decoder="cpu-step").decoder
    x = torch.randn(1, 96).bfloat16()

    def run(x=x, **changed):
        return decoder_step(decoder, x, **changed)

    assert run().shape == (1, 50)
    wide = [tensor.float() for tensor in decoder.op.caches]
    short = decoder.op.output._replace(bias=torch.zeros(49).bfloat16())
    several = {"x": x.expand(2, -1).contiguous(), "sequences": 1}
    wraps = decoder.op.hows + torch.tensor([1, 0, 0, 0, 0, 0])
    wrong = (
        ({"x": x.double()}, "dtype|float32"),
        ({"x": x[:, None]}, r"\(B, D\)"),
        ({"vocabularies": [40]}, r"a weight is \(50, 96\), not \(40, 96\)"),
        ({"vocabularies": [25, 25]}, "there are 2 vocabularies"),
        ({"output": short}, "50 numbers of x's dtype"),
        ({"rotations": decoder.op.rotations.double()}, "rotations"),
        ({"rotations": decoder.op.rotations[0]}, "rotations"),
        ({"rotations": decoder.op.rotations[..., :7].contiguous()}, "cache"),
        ({"hows": decoder.op.hows[1:]}, "28 tensors and 6 numbers for 2 layers"),
        ({"hows": decoder.op.hows.float()}, "for 2 layers"),
        ({"hows": decoder.op.hows + torch.tensor([0, 1, 0, 0, 0, 0])}, "no such rotation or gate"),
        ({"hows": decoder.op.hows + torch.tensor([0, 0, 3, 0, 0, 0])}, "no such rotation or gate"),
        ({"norm": decoder.op.norm.bfloat16()}, "96 float32 numbers"),
        ({"positions": (8,)}, "position 8 is not in a cache of 8"),
        ({"positions": (-1,)}, "position -1"),
        ({"positions": (0, 1)}, r"\(B,\) or \(1,\) int64"),
        ({"positions": (0.0,)}, r"\(B,\) or \(1,\) int64"),
        ({"positions": 0}, r"\(B,\) or \(1,\) int64"),
        ({"sequences": 0}, "there are 1 rows for 0 sequences"),
        ({"sequences": 2}, "there are 1 rows for 2 sequences"),
        ({"x": x.expand(2, -1).contiguous()}, r"as dense has to be \(B, 2, 8, 16\)"),
        (several | {"positions": (7, 8)}, "position 8 is not in a cache of 8"),
        (several | {"positions": (3,)}, "row 1 is at position 3, but follows"),
        (several | {"positions": (3, 5)}, "row 1 is at position 5, but follows"),
        (several | {"positions": (7, 8), "hows": wraps}, "position 8 would overwrite what others"),
        ({"width": 100}, r"a weight is \(400, 96\), not \(200, 96\)"),
        ({"caches": wide}, "of x's dtype"),
    )
    refuses(run, wrong)
