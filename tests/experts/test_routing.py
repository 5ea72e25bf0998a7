"""Recorded routing is what the routers chose, and distinguishes models. Popularity on tiny_moe's
real routing: counts of one half of the held-out text, tried on the other."""

import dataclasses
import random

import pytest
import sentencepiece
import torch

from quantbench.errors import UsageError
from quantbench.experts.placement import hit_rates, hits, place
from quantbench.experts.popularity import Popularity
from quantbench.experts.routing import digest, identity, profile, routers_of
from quantbench.models.config import Mixture
from quantbench.models.formats import EMBEDDED, EMBEDDED_MODELS
from quantbench.models.registry import build
from tests.experts.small import tiered, whole
from tests.models.small import small_model

MIXTURE = Mixture(6, 2, 32, dense_layers=(1,))
SMALL = small_model().config
CONFIG = dataclasses.replace(SMALL, num_layers=3, mixture=MIXTURE, architecture="mixtral")
CONTEXT = 512  # positions of a window of the held-out text


@pytest.fixture
def model():
    return build(CONFIG).eval()


def test_a_profile_counts_what_the_routers_choose_in_both_halves(model):
    """Assignments by layer, from the routers' inputs and products in float64."""
    tokens, done = torch.randint(CONFIG.vocab_size, (40,)), []
    popularity = profile(model, tokens, 8, "words", lambda *now: done.append(now))
    counts = [[0] * 6, [], [0] * 6]

    def count(mixture, inputs, number):
        scores = inputs[0].flatten(0, -2).double() @ mixture.router.weight.double().T
        for expert in scores.topk(2).indices.flatten().tolist():
            counts[number][expert] += 1

    for number in (0, 2):
        mixture = model.layers[number].feed_forward
        mixture.register_forward_pre_hook(lambda *a, number=number: count(*a, number))
    for window in (tokens[:8], tokens[8:16], tokens[16:20]):
        model(window[None])
    assert popularity.halves[0] == tuple(map(tuple, counts))
    assert popularity.tokens == 40 and done[-1] == (40, 40)
    assert [sum(layer) for layer in popularity.counts] == [80, 0, 80]
    assert popularity.routers == identity(model)


def test_a_mixture_of_dense_layers_has_no_routers():
    dense = dataclasses.replace(MIXTURE, dense_layers=(0, 1, 2))
    with pytest.raises(UsageError, match="is no mixture of experts"):
        routers_of(dataclasses.replace(CONFIG, mixture=dense))


def test_the_digest_distinguishes_models_and_not_precisions(model):
    weight = model.layers[0].feed_forward.router.weight
    other = weight.clone()
    other[0, 0] *= -1
    assert digest(weight) != digest(other)
    same = {digest(weight.to(dtype)) for dtype in (torch.bfloat16, torch.float16)}
    assert same == {digest(weight)}
    mine = identity(model)
    assert mine.dense_layers == (1,) and mine.digests[1] == "" and mine.experts == (6, 0, 6)
    assert mine.difference(routers_of(CONFIG)) is None


@pytest.fixture(scope="module")
def tokens():
    """The first 8192 tokens of the held-out text."""
    folder = EMBEDDED_MODELS["tiny_moe"]
    processor = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    return torch.tensor(processor.encode((EMBEDDED / "heldout.txt").read_text())[:8192])


@pytest.fixture(scope="module")
def popularity(tokens):
    return profile(whole(scheme="none"), tokens, CONTEXT, "heldout.txt")


def test_popularity_is_above_uniform_on_text_that_it_has_not_seen(popularity):
    first, second = popularity.halves
    for pair in ((first, second), (second, first)):
        *partial, whole = hit_rates(popularity.routers, [pair])
        assert all(row.uniform < row.popularity <= row.ideal for row in partial)
        assert whole.popularity == 1
        # What a text's halves have in common is most of what there is to gain.
        assert max(row.gain_share for row in partial) > 0.5


def test_hits_while_the_model_reads_are_those_of_the_counts(tokens, popularity):
    """To one assignment: the tiers' own counters on the second half, with nothing cached."""
    first, second = popularity.halves
    nothing = tuple((0,) * len(layer) for layer in first)
    made = Popularity(popularity.routers, "first", 4096, (first, nothing))
    model, tiers = tiered("fetch", None, scheme="none")
    for how in ("popularity", "uniform", "first"):
        capacity = random.randrange(1, 38)
        placement = place(how, popularity.routers, capacity, made, seed=3)
        tiers.hold(placement, capacity + tiers.least)
        before = tiers.counted()
        with torch.no_grad():
            for window in torch.split(tokens[len(tokens) // 2 :], CONTEXT):
                model.hidden(window[None])
        traffic = tiers.counted().since(before)
        assert traffic.assignments == sum(map(sum, second)) == 5 * 2 * 4096
        assert traffic.hits == hits(placement, second), (how, capacity)
        assert traffic.hit_rate == traffic.hits / (5 * 2 * 4096)
