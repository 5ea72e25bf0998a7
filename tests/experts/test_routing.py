"""Recorded routing is what the routers chose, and tells one model from another."""

import dataclasses

import pytest
import torch

from quantbench.errors import UsageError
from quantbench.experts.routing import digest, identity, profile, routers_of
from quantbench.models.mixture import Mixture
from quantbench.models.registry import build
from tests.models.small import small_model

MIXTURE = Mixture(6, 2, 32, dense_layers=(1,))
SMALL = small_model().config
CONFIG = dataclasses.replace(SMALL, num_layers=3, mixture=MIXTURE, architecture="mixtral")
TOKENS = torch.randint(CONFIG.vocab_size, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    return build(CONFIG).eval()


def chosen_by_hand(model, tokens):
    """Assignments by layer, from the routers' inputs and products in float64."""
    counts = [[0] * 6, [], [0] * 6]
    for number in (0, 2):
        layer = model.layers[number].feed_forward

        def count(module, inputs, number=number):
            scores = inputs[0].flatten(0, -2).double() @ module.router.weight.double().T
            for row in scores.argsort(-1, descending=True)[:, :2]:
                for expert in row.tolist():
                    counts[number][expert] += 1

        hook = layer.register_forward_pre_hook(count)
        model(tokens)
        hook.remove()
    return tuple(map(tuple, counts))


def test_a_profile_counts_both_halves(model):
    done = []
    popularity = profile(model, TOKENS, 8, "words", lambda *now: done.append(now))
    windows = [TOKENS[None, i : i + 8] for i in (0, 8)] + [TOKENS[None, 16:20]]
    first = chosen_by_hand(model, windows[0])
    for window in windows[1:]:
        layers = zip(first, chosen_by_hand(model, window), strict=True)
        first = tuple(tuple(map(sum, zip(*layer, strict=True))) for layer in layers)
    assert popularity.halves[0] == first
    assert popularity.tokens == 40 and done[-1] == (40, 40)
    assert [sum(layer) for layer in popularity.counts] == [80, 0, 80]
    assert popularity.routers == identity(model)


def test_what_a_profile_refuses(model):
    with pytest.raises(UsageError, match="^words: 1 tokens are too few to count experts; give mor"):
        profile(model, TOKENS[:1], 8, "words")
    with pytest.raises(UsageError, match="^small is no mixture of experts: no layer has any; give"):
        profile(small_model(), TOKENS, 8, "words")
    dense = dataclasses.replace(MIXTURE, dense_layers=(0, 1, 2))
    with pytest.raises(UsageError, match="is no mixture of experts"):
        routers_of(dataclasses.replace(CONFIG, mixture=dense))


def test_the_digest_tells_models_apart_and_not_precisions(model):
    weight = model.layers[0].feed_forward.router.weight
    other = weight.clone()
    other[0, 0] *= -1
    assert digest(weight) != digest(other)
    assert {digest(weight.to(dtype)) for dtype in (torch.bfloat16, torch.float16)} == {
        digest(weight)
    }
    mine = identity(model)
    assert mine.dense_layers == (1,) and mine.digests[1] == ""
    assert mine.experts == (6, 0, 6)
    assert mine.difference(routers_of(CONFIG)) is None
