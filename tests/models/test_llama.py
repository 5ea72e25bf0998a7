"""The model against Hugging Face's: the same weights, the same tokens, the same logits."""

import dataclasses

import pytest
import torch

from quantbench import models
from quantbench.generate import Generator
from quantbench.models.loading import load_model
from quantbench.ops.cpu import build as build_cpp
from tests.models.hugging_face import FAMILIES, LLAMAS, MIXTURES, saved

LENGTH = 40  # past the sliding window of 8, and past the original context of the scaled rotations


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Every family once: our model, tokens of several rows, and Hugging Face's logits for them."""
    folder, made = tmp_path_factory.mktemp("families"), {}
    for family in FAMILIES:
        path, theirs = saved(family, folder)
        tokens = torch.randint(160, (3, LENGTH), generator=torch.Generator().manual_seed(1))
        made[family] = load_model(str(path)), tokens, theirs(tokens).logits
    return made


@pytest.fixture(scope="module")
def on_cpu_kernels(pairs, tmp_path_factory):
    """The same models as users load them: their products by the C++ kernels."""
    if reason := build_cpp.unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("families")
    return {family: models.load(str(saved(family, folder)[0])) for family in FAMILIES}


def assert_same(logits, expected):
    """float32 sums in another order: 1e-4 of the logits' scale leaves room for nothing else."""
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_sequence_without_cache(pairs, family):
    model, tokens, expected = pairs[family]
    assert_same(model(tokens), expected)


@pytest.mark.parametrize("chunk", [LENGTH, 7, 1], ids=["full prefill", "chunks of 7", "by token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_through_the_cache(pairs, family, chunk):
    model, tokens, expected = pairs[family]
    generator = Generator(model, 4, LENGTH + 3, decoder="modules")
    pieces = torch.arange(LENGTH).split(chunk)
    logits = torch.cat([generator.forward(tokens[:, p], int(p[0])) for p in pieces], 1)
    assert_same(logits, expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", LLAMAS | MIXTURES)
def test_decoding_in_cpp(pairs, on_cpu_kernels, family, rows):
    """Every token by a step in C++; and those behind a prompt. Rows choose different experts."""
    model, (_, tokens, expected) = on_cpu_kernels[family], pairs[family]
    tokens, expected = tokens[:rows], expected[:rows]
    generator = Generator(model, rows, LENGTH, decoder="cpu-step")
    logits = torch.cat([generator.forward(tokens[:, [i]], i) for i in range(LENGTH)], 1)
    assert_same(logits, expected)
    begun = Generator(model, 4, LENGTH + 3, decoder="cpu-step")
    assert_same(begun.forward(tokens[:, :21]), expected[:, :21])
    logits = torch.cat([begun.forward(tokens[:, [i]], i) for i in range(21, LENGTH)], 1)
    assert_same(logits, expected[:, 21:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_would_notice(pairs, family):
    """What a wrong rotation or window costs: far more than the tolerance, so it cannot hide."""
    model, tokens, expected = pairs[family]
    wrong = dataclasses.replace(model.config, rope_theta=model.config.rope_theta * 3)
    model.config, right = wrong, model.config
    try:
        error = (model(tokens) - expected).abs().max() / expected.abs().max()
    finally:
        model.config = right
    assert error > 1e-2


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_as_close_as_its_rounding(pairs, dtype, digits, tmp_path):
    path, theirs = saved("tiny-llama", tmp_path)
    tokens = torch.arange(3, 23)[None]
    expected = theirs.double()(tokens).logits
    half = load_model(str(path), precision=dtype)
    # some thirty roundings on the way, each of relative size `digits`, mostly cancelling
    error = (half(tokens).double() - expected).norm() / expected.norm()
    assert error <= 30 * digits
