"""Placements hold as many experts as there is memory for, and their hit rates are hits ÷ all."""

import itertools
import json
import random

import pytest

from quantbench.errors import UsageError
from quantbench.experts.placement import (
    PLACEMENTS,
    Placement,
    from_file,
    hit_rate,
    hit_rates,
    hits,
    ideal_hits,
    place,
    require_room,
    uniform_hits,
)
from quantbench.experts.popularity import Popularity
from tests.experts.counted import ROUTERS, counts_of, popularity_of

COUNTS = ((6, 1, 3, 0), (), (2, 2, 5, 1))  # 10 assignments in each of two layers of four experts
POPULARITY = popularity_of(COUNTS)


def test_popularity_takes_those_chosen_most_often_of_all_layers():
    placement = place("popularity", ROUTERS, 3, POPULARITY)
    assert placement.fast == (frozenset({0, 2}), frozenset(), frozenset({2}))
    assert hits(placement, COUNTS) == 6 + 3 + 5
    assert hit_rate(placement, COUNTS) == 14 / 20 == ideal_hits(COUNTS, 3) / 20


def test_equally_popular_experts_favor_no_layer():
    placement = place("popularity", ROUTERS, 4, popularity_of(((5,) * 4, (), (5,) * 4)))
    assert [len(fast) for fast in placement.fast] == [2, 0, 2]


def test_uniform_has_equally_many_of_each_layer():
    placement = place("uniform", ROUTERS, 5, seed=3)
    assert [len(fast) for fast in placement.fast] == [3, 0, 2]
    assert place("uniform", ROUTERS, 5, seed=3) == placement
    assert len({place("uniform", ROUTERS, 4, seed=seed) for seed in range(20)}) > 5


def test_the_expected_hit_rate_of_uniform_is_the_mean_of_all_draws():
    draws = itertools.product(
        itertools.combinations(range(4), 2), [()], itertools.combinations(range(4), 1)
    )
    rates = [hit_rate(Placement(tuple(map(frozenset, fast))), COUNTS) for fast in draws]
    assert len(rates) == 6 * 4
    assert uniform_hits(COUNTS, 3) / 20 == pytest.approx(sum(rates) / len(rates), rel=1e-12)


def test_first_takes_whole_layers():
    placement = place("first", ROUTERS, 6)
    assert placement.fast == (frozenset(range(4)), frozenset(), frozenset({0, 1}))


@pytest.mark.parametrize("how", PLACEMENTS)
def test_memory_for_all_takes_all(how):
    for capacity in (8, 9, 1000):
        placement = place(how, ROUTERS, capacity, POPULARITY)
        assert placement.count == 8 and hit_rate(placement, COUNTS) == 1
    assert place(how, ROUTERS, 0, POPULARITY).count == 0


def test_the_ideal_is_the_best_of_all_placements():
    counts = counts_of(ROUTERS, tokens=9, seed=4)
    places = [(layer, expert) for layer in (0, 2) for expert in range(4)]
    for capacity in range(9):
        best = max(
            sum(counts[layer][expert] for layer, expert in chosen)
            for chosen in itertools.combinations(places, capacity)
        )
        assert ideal_hits(counts, capacity) == best


def test_hit_rates_of_held_out_text():
    rng = random.Random(5)
    profiled, held_out = (counts_of(ROUTERS, 50, rng.random()) for _ in range(2))
    for rates in hit_rates(ROUTERS, profiled, held_out, range(9)):
        placement = place("popularity", ROUTERS, rates.capacity, popularity_of(profiled))
        assert rates.popularity == pytest.approx(hit_rate(placement, held_out))
        assert rates.popularity_hits == hits(placement, held_out)
        assert rates.popularity == rates.popularity_hits / rates.assignments
        assert rates.assignments == sum(map(sum, held_out))
        assert rates.popularity <= rates.ideal and rates.uniform <= rates.ideal
        assert rates.share == rates.capacity / 8
    assert rates.popularity == rates.ideal == pytest.approx(rates.uniform) == 1


def test_a_file_is_counts_or_a_list_of_experts(tmp_path):
    path = str(tmp_path / "experts.json")
    POPULARITY.save("", path)
    assert from_file("--x", path, ROUTERS, 3) == place("popularity", ROUTERS, 3, POPULARITY)
    (tmp_path / "experts.json").write_text('{"fast": [[3], [], [0, 1]]}')
    assert from_file("--x", path, ROUTERS, 3).fast == ({3}, set(), {0, 1})
    assert Popularity.load("", saved(tmp_path, POPULARITY)) == POPULARITY


def saved(folder, popularity):
    popularity.save("", folder / "saved.json")
    return folder / "saved.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"fast": [[0], []]}', "lists experts of 2 layers; mine has 3: list one for each, [] for"),
        ('{"fast": [[0], [], [4]]}', "layer 2 has experts 0 to 3; given: 4"),
        ('{"fast": [[0], [1], []]}', "layer 1 has none; given: 1"),
        ('{"fast": [[0], [], [-1]]}', "layer 2 has experts 0 to 3; given: -1"),
        (
            '{"fast": [[0, 1, 2, 3], [], []]}',
            "lists 4 experts, and memory is for 3; list fewer, or",
        ),
        (
            '{"fast": "all"}',
            "fast is a list of experts for each layer, such as [[0, 3], []]; given",
        ),
        ('{"fast": [[0.5], [], []]}', "fast is a list of experts for each layer, such as"),
        (
            "{}",
            "it holds no counts; write it anew with quantbench",
        ),
    ],
)
def test_a_file_that_asks_for_the_impossible(text, message, tmp_path):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UsageError) as raised:
        from_file("--expert_placement", str(tmp_path / "f.json"), ROUTERS, 3)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"--expert_placement {tmp_path / 'f.json'}")


def test_words_that_are_no_placement():
    with pytest.raises(UsageError, match="is popularity, uniform, first or a file; given: 'best'"):
        place("best", ROUTERS, 3)
    with pytest.raises(UsageError, match="needs counts; write them with quantbench experts prof"):
        place("popularity", ROUTERS, 3)
    with pytest.raises(UsageError, match="a placement of -1 experts is impossible"):
        place("first", ROUTERS, -1)


def test_memory_for_fewer_experts_than_a_token_takes():
    require_room("--expert_memory", "2", 2, ROUTERS)
    message = "--expert_memory 1 holds 1 experts, and a token of mine goes through 2 in each layer;"
    with pytest.raises(UsageError, match=f"^{message} give at least 2$"):
        require_room("--expert_memory", "1", 1, ROUTERS)


def test_a_listed_placement_is_plain_json():
    fast = json.loads('{"fast": [[0, 3], []]}')["fast"]
    assert Placement(tuple(map(frozenset, fast))).count == 2
