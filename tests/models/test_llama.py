"""The model without a cache against Hugging Face's: the same weights, tokens and logits. With a
cache, and by a step in C++: test_families.py."""

import dataclasses

import pytest
import torch

from quantbench.models.loading import load_model
from tests.models.hugging_face import FAMILIES, saved

LENGTH = 40  # past the sliding window of 8, and past the original context of the scaled rotations


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_hugging_faces_and_those_of_a_wrong_rotation_are_far_off(family, tmp_path):
    """float32 sums in another order: 1e-4 of the logits' scale leaves room for nothing else. What a
    wrong rotation or window costs is far more than the tolerance, so it cannot hide."""
    path, theirs = saved(family, tmp_path)
    model = load_model(str(path))
    tokens = torch.randint(160, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits

    def error():
        return (model(tokens) - expected).abs().max() / expected.abs().max()

    assert error() <= 1e-4
    model.config = dataclasses.replace(model.config, rope_theta=model.config.rope_theta * 3)
    assert error() > 1e-2


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_as_close_as_its_rounding(dtype, digits, tmp_path):
    path, theirs = saved("tiny-llama", tmp_path)
    tokens = torch.arange(3, 23)[None]
    expected = theirs.double()(tokens).logits
    half = load_model(str(path), precision=dtype)
    # some thirty roundings on the way, each of relative size `digits`, mostly cancelling
    error = (half(tokens).double() - expected).norm() / expected.norm()
    assert error <= 30 * digits
