"""Popularity on tiny_moe's real routing: counts of one half of the held-out text, tried on the
other. Hits are counted by the tiers while the model reads, and compared with the counts."""

import random
from dataclasses import replace
from itertools import product

import pytest
import sentencepiece
import torch

from quantbench.experts.placement import capacities, hits, place, uniform_hits
from quantbench.experts.routing import profile
from quantbench.experts.store import POLICIES
from quantbench.models.formats import EMBEDDED, EMBEDDED_MODELS
from tests.experts.small import tiered, whole

CONTEXT = 512  # positions of a window


@pytest.fixture(scope="module")
def tokens():
    """The first 8192 tokens of the held-out text."""
    folder = EMBEDDED_MODELS["tiny_moe"]
    processor = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    return torch.tensor(processor.encode((EMBEDDED / "heldout.txt").read_text())[:8192])


@pytest.fixture(scope="module")
def popularity(tokens):
    model = whole("tiny_moe", "none")  # by the kernels that the tiers compute with
    return profile(model, tokens, CONTEXT, "heldout.txt")


def best(counts, capacity):
    """The most hits of any placement, in hindsight: each expert by itself, one after the other."""
    left = {(i, e): n for i, of_layer in enumerate(counts) for e, n in enumerate(of_layer)}
    return sum(left.pop(max(left, key=left.__getitem__)) for _ in range(capacity))


def test_popularity_is_above_uniform_on_text_that_it_has_not_seen(popularity):
    for counted, held_out in (popularity.halves, reversed(popularity.halves)):
        made = profile_of(popularity, counted)
        gains = 0.0
        for capacity in capacities(popularity.routers):
            served = hits(place("popularity", popularity.routers, capacity, made), held_out)
            uniform, ideal = uniform_hits(held_out, capacity), best(held_out, capacity)
            assert served <= ideal
            if capacity < sum(popularity.routers.experts):
                assert served > uniform
                gains = max(gains, (served - uniform) / (ideal - uniform))
        # What a text's halves have in common is most of what there is to gain.
        assert gains > 0.5


def profile_of(popularity, counts):
    nothing = tuple((0,) * len(layer) for layer in counts)
    return replace(popularity, halves=(counts, nothing))


@pytest.mark.parametrize("how", ["popularity", "uniform", "first"])
def test_hits_while_the_model_reads_are_those_of_the_counts(how, tokens, popularity, tmp_path):
    """To one assignment: the tiers' own counters on the second half, with nothing cached."""
    first, second = popularity.halves
    model, tiers = tiered("tiny_moe", "none", POLICIES["fetch"], tmp_path / "slow")
    capacity = random.Random(torch.initial_seed()).randrange(1, 38)
    made = profile_of(popularity, first)
    placement = place(how, popularity.routers, capacity, made, seed=3)
    tiers.hold(placement.fast, capacity + tiers.least)
    before = tiers.counted()
    with torch.no_grad():
        for window in torch.split(tokens[len(tokens) // 2 :], CONTEXT):
            model.hidden(window[None])
    traffic = tiers.counted().since(before)
    assert traffic.assignments == sum(map(sum, second)) == 5 * 2 * 4096
    expected = sum(second[layer][e] for layer, e in product(range(5), range(8))
                   if e in placement.fast[layer])  # fmt: skip
    assert traffic.hits == expected == hits(placement, second)
    assert traffic.hit_rate == expected / (5 * 2 * 4096)
