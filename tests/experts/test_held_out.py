"""Popularity on tiny_moe's real routing: counts of one half of the held-out text, tried on the
other. Hits are counted by the tiers while the model reads, and compared with the counts."""

import random
from dataclasses import replace
from itertools import product

import pytest
import sentencepiece
import torch

from quantbench.experts.placement import hit_rates, hits, place
from quantbench.experts.routing import profile
from quantbench.experts.tiers import POLICIES
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


def test_popularity_is_above_uniform_on_text_that_it_has_not_seen(popularity):
    first, second = popularity.halves
    for pair in ((first, second), (second, first)):
        *partial, whole = hit_rates(popularity.routers, [pair])
        assert all(row.uniform < row.popularity <= row.ideal for row in partial)
        assert whole.popularity == 1
        # What a text's halves have in common is most of what there is to gain.
        assert max(row.gain_share for row in partial) > 0.5


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
    tiers.hold(placement, capacity + tiers.least)
    before = tiers.counted()
    with torch.no_grad():
        for window in torch.split(tokens[len(tokens) // 2 :], CONTEXT):
            model.hidden(window[None])
    traffic = tiers.counted().since(before)
    assert traffic.assignments == sum(map(sum, second)) == 5 * 2 * 4096
    expected = sum(second[layer][e] for layer, e in product(range(5), range(8))
                   if e in placement[layer])  # fmt: skip
    assert traffic.hits == expected == hits(placement, second)
    assert traffic.hit_rate == expected / (5 * 2 * 4096)
