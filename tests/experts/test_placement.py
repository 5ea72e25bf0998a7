"""A placement never holds more experts than fit into memory, and their hit rates are hits ÷ all."""

import itertools
import random

import pytest

from quantbench.errors import UsageError
from quantbench.experts.placement import (
    PLACEMENTS,
    from_file,
    hit_rates,
    hits,
    most_popular,
    place,
    uniform_hits,
)
from quantbench.experts.popularity import Popularity
from tests.experts.counted import ROUTERS, counts_of, popularity_of

COUNTS = ((6, 1, 3, 0), (), (2, 2, 5, 1))  # 10 assignments in each of two layers of four experts
POPULARITY = popularity_of(COUNTS)


def test_placements_by_hand():
    placement = place("popularity", ROUTERS, 3, POPULARITY)  # of all layers together
    assert placement == (frozenset({0, 2}), frozenset(), frozenset({2}))
    assert hits(placement, COUNTS) == 6 + 3 + 5
    equal = place("popularity", ROUTERS, 4, popularity_of(((5,) * 4, (), (5,) * 4)))
    assert [len(fast) for fast in equal] == [2, 0, 2]  # no layer is favored
    uniform = place("uniform", ROUTERS, 5, seed=3)
    assert [len(fast) for fast in uniform] == [3, 0, 2]
    assert place("uniform", ROUTERS, 5, seed=3) == uniform
    assert len({place("uniform", ROUTERS, 4, seed=seed) for seed in range(20)}) > 5
    first = place("first", ROUTERS, 6)
    assert first == (frozenset(range(4)), frozenset(), frozenset({0, 1}))


@pytest.mark.parametrize("how", PLACEMENTS)
def test_memory_for_all_takes_all(how):
    for capacity in (8, 9, 1000):
        placement = place(how, ROUTERS, capacity, POPULARITY)
        assert sum(map(len, placement)) == 8 and hits(placement, COUNTS) == 20
    assert not any(place(how, ROUTERS, 0, POPULARITY))


def test_the_expected_hits_of_uniform_are_the_mean_of_all_draws():
    draws = itertools.product(
        itertools.combinations(range(4), 2), [()], itertools.combinations(range(4), 1)
    )
    counted = [hits(tuple(map(frozenset, fast)), COUNTS) for fast in draws]
    assert len(counted) == 6 * 4
    assert uniform_hits(COUNTS, 3) == pytest.approx(sum(counted) / len(counted), rel=1e-12)


def test_hit_rates_are_those_of_placements_and_the_ideal_is_the_best_of_all():
    draw = random.Random(5)
    profiled, held_out, more = (counts_of(ROUTERS, 50, draw.random()) for _ in range(3))
    places = [(layer, expert) for layer in (0, 2) for expert in range(4)]
    (*rates, last), every = hit_rates(ROUTERS, [(profiled, held_out)]), sum(map(sum, held_out))
    for row in rates:
        placement = most_popular(profiled, row.capacity)
        assert row.popularity_hits == hits(placement, held_out)
        assert row.popularity == row.popularity_hits / row.assignments
        assert row.uniform == pytest.approx(uniform_hits(held_out, row.capacity) / every)
        assert row.ideal_hits == max(
            sum(held_out[layer][expert] for layer, expert in chosen)
            for chosen in itertools.combinations(places, row.capacity)
        )
        assert row.assignments == every and row.share == row.capacity / 8
    assert [row.capacity for row in rates] == list(range(2, 8))  # a token takes two
    assert last.popularity == last.ideal == pytest.approx(last.uniform) == 1
    other = hit_rates(ROUTERS, [(profiled, more)])
    for one, two, both in zip(
        [*rates, last], other, hit_rates(ROUTERS, [(profiled, held_out), (profiled, more)]),
        strict=True,
    ):  # fmt: skip
        assert both.popularity_hits == one.popularity_hits + two.popularity_hits
        assert both.uniform == pytest.approx((one.uniform + two.uniform) / 2)


def test_a_file_is_counts_or_a_list_of_experts(tmp_path):
    path = tmp_path / "experts.json"
    POPULARITY.save("", path)
    assert Popularity.load("", path) == POPULARITY
    assert from_file("--x", str(path), ROUTERS, 3) == place("popularity", ROUTERS, 3, POPULARITY)
    path.write_text('{"fast": [[3], [], [0, 1]]}')
    assert from_file("--x", str(path), ROUTERS, 3) == ({3}, set(), {0, 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"fast": [[0], []]}',
            "a list of experts for each of mine's 3 layers, such as [[0, 3], []]",
        ),
        ('{"fast": [[0], [], [4]]}', "layer 2 has experts 0 to 3; given: 4"),
        ('{"fast": [[0], [1], []]}', "layer 1 has none; given: 1"),
        ('{"fast": [[0], [], [-1]]}', "layer 2 has experts 0 to 3; given: -1"),
        ('{"fast": [[0, 1, 2, 3], [], []]}', "lists 4 experts, and memory is for 3; list fewer"),
        ('{"fast": "all"}', "3 layers, such as [[0, 3], []]; given: 'all'"),
        ('{"fast": [[0.5], [], []]}', "fast is a list of experts for each of mine's 3 layers"),
        ("{}", "it holds no counts; write it anew with quantbench"),
    ],
)
def test_a_file_that_asks_for_the_impossible(text, message, tmp_path):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UsageError) as raised:
        from_file("--expert_placement", str(tmp_path / "f.json"), ROUTERS, 3)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"--expert_placement {tmp_path / 'f.json'}")
