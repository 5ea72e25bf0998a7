"""The caches that a decoding step in C++ fills, against those that Python fills, bit for bit."""

import dataclasses
import itertools

import pytest
import torch

from quantbench.generate import Generator
from quantbench.kv_cache import CACHES
from quantbench.ops.cpu import step
from quantbench.ops.kv import WRITTEN_BY_STEPS, dequantize
from tests.ops.exact import DTYPES
from tests.ops.instructions import NEEDS_COMPILER
from tests.ops.test_cpu_step import PLAIN, built, decoder_step, refuses

pytestmark = NEEDS_COMPILER

# ---------------------------------------------------------------------------------- numbers


def heads_of(dtype, E):
    """Heads (X, E) of numbers of all kinds."""
    limits = torch.finfo(dtype)
    normal = torch.randn(64, E)
    magnitudes = torch.logspace(-45, 38, 64, dtype=torch.float64)[:, None]
    ties = torch.randint(-3, 4, (16, E)) / 2.0
    halves = torch.randint(-254, 255, (16, E)) / 2.0  # between two codes of int8, where 127 is one
    halves[:, 0] = 127
    outlier = torch.randn(8, E)
    outlier[:, 5] = torch.tensor([1e3, -1e3, 3e4, -3e4] * 2)
    denormal = torch.randint(-9, 10, (8, E)) * limits.smallest_normal * limits.eps
    extreme = torch.randint(-1, 2, (8, E)) * limits.max
    sparse = normal[:8] * (torch.rand(8, E) < 0.1)
    finite = (normal, normal.double() * magnitudes, ties, halves, outlier, denormal, extreme)
    whole = torch.cat([x.double() for x in (*finite, sparse, torch.zeros(2, E))])
    return whole.clamp(limits.min, limits.max).to(dtype)


def with_some_not_finite(x):
    """The heads, a number or two of each replaced."""
    x = x.clone()
    for value in (torch.inf, -torch.inf, torch.nan):
        where = torch.rand(x.shape) < 1 / x.shape[1]
        x[where] = value
    return x


def stored_by_a_step(name, heads):
    """A cache of two slots in whose second one a step has stored `heads` (K, E), as the keys and
    as the values of its only row."""
    K, E = heads.shape
    D, width, dtype = 16, 16, heads.dtype
    cache = CACHES[name](1, K, 2, E, dtype, "cpu")
    ones = torch.ones(D, dtype=dtype)
    queries = torch.zeros(K * E, dtype=dtype)
    layer = step.Layer(
        attention_norm=ones,
        wqkv=step.Linear(  # whatever x is, the result is the bias
            torch.zeros(3 * K * E, D, dtype=dtype),
            torch.cat([queries, heads.flatten(), heads.flatten()]),
        ),
        query_norm=None,
        key_norm=None,
        wo=step.Linear(torch.zeros(D, K * E, dtype=dtype), None),
        ffn_norm=ones,
        w13=step.Linear(torch.zeros(2 * width, D, dtype=dtype), None),
        w2=step.Linear(torch.zeros(D, width, dtype=dtype), None),
    )
    caches = step.Caches(list(cache.buffers()), cache.format)
    shape, output = step.Shape(K, K, width, 1e-5), step.Linear(torch.zeros(1, D, dtype=dtype), None)
    how = (torch.zeros(E // 2), torch.tensor([1]), shape, ones, output, [1])  # rotates by nothing
    step.decode(ones[None], None, layer.parts(), caches, *how)
    return cache


@pytest.mark.parametrize("name", CACHES)
def test_any_numbers(isa, name):
    """Those that are not finite are read back as no finite numbers; what shares no scale with them
    is as it would be."""
    for dtype, E in itertools.product(DTYPES, (32, 64, 96, 256, 8, 80)):
        if name == "int4" and E % 32:
            continue
        x = heads_of(dtype, E)
        expected = CACHES[name].encode(CACHES[name](1, 1, 1, E, dtype, "cpu"), x[None, :, None])
        cache = stored_by_a_step(name, x)
        for (part, tensor), side in itertools.product(expected.items(), ("key", "value")):
            buffer = getattr(cache, f"{side}_{part}")
            assert torch.equal(buffer[:, :, 1:], tensor), (dtype, E, side, part)
            assert (buffer[:, :, 0] == 0).all()
        x = with_some_not_finite(x)
        whole = CACHES[name](1, len(x), 2, E, dtype, "cpu")
        whole.update(torch.tensor([1]), x[None, :, None], x[None, :, None])
        # keys go through the rotation, which multiplies infinity by a sine of 0
        both = (
            dequantize(c.stored("value", 1))[0, :, 1] for c in (stored_by_a_step(name, x), whole)
        )
        got, wanted = both
        finite = x.isfinite()
        assert not got[~finite].isfinite().any()
        torch.testing.assert_close(got[finite], wanted[finite], rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------- refusals


class Halving(CACHES["int8"]):  # type: ignore[misc]
    """Read as int8 is, but encoded differently."""

    def encode(self, x):
        return super().encode(x / 2)


class Unknown(CACHES["int8"]):  # type: ignore[misc]
    format = "unknown"


@pytest.mark.parametrize("kind", [Halving, Unknown])
def test_a_cache_that_only_python_can_write(kind):
    from quantbench.run.cpu_step import why_not_fused
    from quantbench.run.decoding import name_of

    model = built(PLAIN, torch.float32)
    caches = [kind(1, 2, 8, 16, torch.float32, "cpu", None, "cpu") for _ in model.layers]
    reason = f"the KV cache is a {kind.__name__}, which the op cannot write"
    assert why_not_fused(model, caches, 1) == reason
    assert name_of("auto", model, caches, 1) == ("modules", reason)
    others = [CACHES[name](1, 2, 8, 16, torch.float32, "cpu") for name in ("int8", "fp8")]
    assert why_not_fused(model, others, 1)


def test_every_format_that_is_written_is_a_cache():
    assert {CACHES[name].format for name in WRITTEN_BY_STEPS} == set(WRITTEN_BY_STEPS)


def test_what_does_not_fit_is_an_error():
    model = built(dataclasses.replace(PLAIN, head_dim=32), torch.bfloat16)
    decoder = Generator(model, 1, 8, "int4", decoder="cpu-step").decoder
    x = torch.randn(1, 96).bfloat16()

    def run(index=0, tensor=decoder.cached.tensors[0], format="int4", drop=0):
        tensors = list(decoder.cached.tensors)
        tensors[index] = tensor
        caches = step.Caches(tensors[drop:], format)
        return decoder_step(decoder, x, None, caches=caches)

    assert run().shape == (1, 50)
    codes, scale = decoder.cached.tensors[:2]
    wrong = (
        ({"format": "int3"}, "stores no keys and values as int3"),
        ({"format": "int8"}, r"as int8 has to be \(B, 2, 8, 32\) of its format's dtype"),
        ({"format": "dense"}, "8 tensors of caches for 2 layers"),
        ({"drop": 1}, "7 tensors of caches for 2 layers"),
        ({"tensor": codes[:, :1]}, r"has to be \(B, 2, 8, 16\)"),
        ({"tensor": codes[..., :8]}, r"has to be \(B, 2, 8, 16\)"),
        ({"tensor": codes[:, :, :4]}, r"has to be \(B, 2, 4, 1\) of scales of x's dtype"),
        ({"tensor": codes.char()}, "of its format's dtype"),
        ({"index": 1, "tensor": scale.float()}, "scales of x's dtype"),
        ({"index": 1, "tensor": scale[:, :, :4]}, "scales of x's dtype"),
        ({"index": 2, "tensor": codes[:0]}, r"has to be \(B, 2, 8, 16\)"),
    )
    refuses(run, wrong)
