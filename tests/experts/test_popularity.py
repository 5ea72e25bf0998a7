"""How often experts are chosen: what a file keeps, which models it fits, and how uneven a layer is;
and placements, which never hold more experts than fit, and whose hits are those of the counts."""

import dataclasses
import itertools
import json
import random
import re

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
from quantbench.experts.popularity import Popularity, effective_experts, find, keep, path_of, skews
from quantbench.experts.tables import heat
from quantbench.models.formats import EMBEDDED
from tests.experts.counted import ROUTERS, counts_of, popularity_of
from tests.models.refused import refusal
from tests.programs import command, worked
from tests.refusals import one_line

FIRST, SECOND = (counts_of(ROUTERS, 20, seed) for seed in (1, 2))
POPULARITY = Popularity(ROUTERS, "heldout.txt", 40, (FIRST, SECOND))
COUNTS = ((6, 1, 3, 0), (), (2, 2, 5, 1))  # 10 assignments in each of two layers of four experts


def test_a_file_keeps_all_of_it(tmp_path):
    POPULARITY.save("--output", tmp_path / "p.json")
    assert Popularity.load("", tmp_path / "p.json") == POPULARITY
    halves = ((1, 2), ()), ((3, 4), ())
    assert dataclasses.replace(POPULARITY, halves=halves).counts == ((4, 6), ())
    with pytest.raises(UsageError, match="^--x .*q.json: No such file or directory$"):
        Popularity.load("--x", tmp_path / "q.json")


def first(layers):
    """The routers of the first layers, as --num_layers loads them."""
    dense = tuple(layer for layer in ROUTERS.dense_layers if layer < layers)
    return dataclasses.replace(ROUTERS, dense_layers=dense, digests=ROUTERS.digests[:layers])


def test_models_that_take_the_counts():
    two = POPULARITY.of_model(first(2), "", "")
    assert two.counts == POPULARITY.counts[:2] and two.routers.dense_layers == (1,)
    assert POPULARITY.of_model(first(1), "", "").routers.dense_layers == ()
    unread = dataclasses.replace(ROUTERS, digests=("",) * 3)  # known by its shape alone
    assert POPULARITY.of_model(unread, "", "").counts == POPULARITY.counts


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"digests": ("aaaa", "", "dddd")}, "another router in layer 2 than"),
        ({"digests": ("aaaa", "", "cccc", "eeee")}, "3 layers, not 4 as in"),
        ({"num_experts": 8}, "4 experts a layer, not 8 as in"),
        ({"experts_per_token": 1}, "2 experts a token, not 1 as in"),
        ({"dense_layers": ()}, "other layers without experts than"),
    ],
)
def test_counts_of_another_model(change, difference):
    other = dataclasses.replace(ROUTERS, model="theirs", **change)
    assert refusal(UsageError, POPULARITY.of_model, other, "--expert_placement", "p.json") == (
        f"--expert_placement p.json is of another model: mine has {difference} theirs; write one "
        "with quantbench experts profile"
    )


def test_counts_are_kept_by_their_routers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = "^--expert_placement popularity: the cache folder has no counts of mine's experts; wr"
    with pytest.raises(UsageError, match=message):
        find(ROUTERS, "--expert_placement popularity")
    assert keep(POPULARITY) == path_of(ROUTERS)
    assert find(ROUTERS, "").counts == POPULARITY.counts
    assert find(first(1), "").counts == POPULARITY.counts[:1]
    keep(dataclasses.replace(POPULARITY, text="another"))
    assert find(ROUTERS, "").text == "another"


def changed(**changes):
    return json.dumps(json.loads(json.dumps(dataclasses.asdict(POPULARITY))) | changes)


HALF = [list(layer) for layer in FIRST]
DAMAGED = {  # a file, and a part of the message
    "[1, 2]": "it holds no counts",
    "{}": "it holds no counts",
    changed(format=2): "its format is not 1",
    changed(routers=None): "routers takes Routers; given: None",
    changed(halves=["a", "b"]): "takes",
    changed(halves=[HALF[:2], HALF[:2]]): "other layers and experts than its routers",
    changed(halves=[[HALF[0][:3], *HALF[1:]], HALF]): "other layers and experts than its routers",
    changed(halves=[[[-1, 1, 1, 1], *HALF[1:]], HALF]): "a count is below 0",
    changed(tokens=41): "layer 0 counts 80 assignments, where 41 tokens give 82",
    changed(routers=dataclasses.asdict(ROUTERS) | {"experts_per_token": 0}): (
        "0 of 4 experts per token is impossible"
    ),
}
IMPOSSIBLE = {
    '{"fast": [[0], []]}': "a list of experts for each of mine's 3 layers, such as [[0, 3], []]",
    '{"fast": "all"}': "3 layers, such as [[0, 3], []]; given: 'all'",
    '{"fast": [[0.5], [], []]}': "a list of experts for each of mine's 3 layers",
    '{"fast": [[0], [], [4]]}': "layer 2 has experts 0 to 3; given: 4",
    '{"fast": [[0], [1], []]}': "layer 1 has none; given: 1",
    '{"fast": [[0], [], [-1]]}': "layer 2 has experts 0 to 3; given: -1",
    '{"fast": [[0, 1, 2, 3], [], []]}': "lists 4 experts, and memory is for 3; list fewer",
}


@pytest.mark.parametrize("text", [*DAMAGED, *IMPOSSIBLE], ids=lambda text: text[:60])
def test_a_file_that_is_refused(text, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(text)
    message = refusal(UsageError, from_file, "--expert_placement", str(path), ROUTERS, 3)
    assert message.startswith(f"--expert_placement {path}")
    assert (DAMAGED | IMPOSSIBLE)[text] in message
    if text in DAMAGED:
        assert message.endswith("write it anew with quantbench experts profile")
        assert refusal(UsageError, Popularity.load, "--expert_placement", path) == message


def test_a_file_is_counts_or_a_list_of_experts(tmp_path):
    path = tmp_path / "experts.json"
    popularity_of(COUNTS).save("", path)
    assert from_file("--x", str(path), ROUTERS, 3) == most_popular(COUNTS, 3)
    path.write_text('{"fast": [[3], [], [0, 1]]}')
    assert from_file("--x", str(path), ROUTERS, 3) == ({3}, set(), {0, 1})


def test_placements_by_hand():
    popular = place("popularity", ROUTERS, 3, popularity_of(COUNTS))  # of all layers together
    assert popular == (frozenset({0, 2}), frozenset(), frozenset({2}))
    assert hits(popular, COUNTS) == 6 + 3 + 5
    equal = most_popular(((5,) * 4, (), (5,) * 4), 4)
    assert [len(fast) for fast in equal] == [2, 0, 2]  # no layer is favored
    uniform = place("uniform", ROUTERS, 5, seed=3)
    assert [len(fast) for fast in uniform] == [3, 0, 2]
    assert place("uniform", ROUTERS, 5, seed=3) == uniform
    assert len({place("uniform", ROUTERS, 4, seed=seed) for seed in range(20)}) > 5
    assert place("first", ROUTERS, 6) == (frozenset(range(4)), frozenset(), frozenset({0, 1}))
    for how in PLACEMENTS:
        for capacity in (8, 9, 1000):  # memory for all takes all
            assert hits(place(how, ROUTERS, capacity, popularity_of(COUNTS)), COUNTS) == 20
        assert not any(place(how, ROUTERS, 0, popularity_of(COUNTS)))


def test_hit_rates_are_those_of_placements_and_the_ideal_is_the_best_of_all():
    profiled, held_out, more = (counts_of(ROUTERS, 50, random.random()) for _ in range(3))
    # The expected hits of uniform are the mean of all draws: 2 experts of one layer, 1 of another.
    draws = itertools.product(
        itertools.combinations(range(4), 2), [()], itertools.combinations(range(4), 1)
    )
    found = [hits(tuple(map(frozenset, fast)), held_out) for fast in draws]
    assert uniform_hits(held_out, 3) == pytest.approx(sum(found) / (6 * 4), rel=1e-12)
    places = [(layer, expert) for layer in (0, 2) for expert in range(4)]
    rates, every = hit_rates(ROUTERS, [(profiled, held_out)]), sum(map(sum, held_out))
    for row in rates:
        assert row.popularity_hits == hits(most_popular(profiled, row.capacity), held_out)
        assert row.popularity == row.popularity_hits / row.assignments
        assert row.uniform == pytest.approx(uniform_hits(held_out, row.capacity) / every)
        assert row.ideal_hits == max(
            sum(held_out[layer][expert] for layer, expert in chosen)
            for chosen in itertools.combinations(places, row.capacity)
        )
        assert row.assignments == every and row.share == row.capacity / 8
    assert [row.capacity for row in rates] == list(range(2, 9))  # a token takes two
    assert rates[-1].popularity == rates[-1].ideal == pytest.approx(rates[-1].uniform) == 1
    other = hit_rates(ROUTERS, [(profiled, more)])
    pairs = hit_rates(ROUTERS, [(profiled, held_out), (profiled, more)])
    for one, two, both in zip(rates, other, pairs, strict=True):
        assert both.popularity_hits == one.popularity_hits + two.popularity_hits
        assert both.uniform == pytest.approx((one.uniform + two.uniform) / 2)


def test_effective_experts():
    for counts, effective in (([5] * 4, 4), ([7, 0, 0], 1), ([0, 0], 0), ([1, 1, 0], 2)):
        assert effective_experts(counts) == pytest.approx(effective)


def test_a_skew_by_hand():
    halves = ((12, 4, 3, 1), (), (4, 6, 5, 5)), ((10, 2, 5, 3), (), (6, 4, 5, 5))
    skewed, flat = skews(Popularity(ROUTERS, "a text", 20, halves))
    assert (skewed.layer, flat.layer) == (0, 2)
    assert skewed.shares == (22 / 40, 6 / 40, 8 / 40, 4 / 40)
    # By the first half experts 0 and 1 serve 12 of 20; by the second half 0 and 2 serve 15.
    assert skewed.half_serves == pytest.approx((12 / 20 + 15 / 20) / 2)
    assert not skewed.is_flat
    # Experts 1 and 2 serve 9 of 20, then 0 and 2 serve 9: less than even.
    assert flat.half_serves == pytest.approx(9 / 20) and flat.is_flat
    assert flat.effective == pytest.approx(4, abs=0.01)


# ---------------------------------------------------------------------------- quantbench experts

WORDS = (EMBEDDED / "heldout.txt").read_text()[:3000]
PROFILE = "profile --checkpoint_path tiny_moe --device cpu"


def run(arguments):
    return command("experts", *arguments.split())


def printed(arguments):
    return worked("experts", *arguments.split()).stdout


@pytest.fixture
def files(in_tmp):
    (in_tmp / "words.txt").write_text(WORDS)
    first, second = counts_of(ROUTERS, 20, 1), counts_of(ROUTERS, 20, 2)
    Popularity(ROUTERS, "a & b.txt", 40, (first, second)).save("", "mine.json")
    return in_tmp


def test_a_text_is_counted_and_shown(files):
    profiled = printed(f"{PROFILE} --text words.txt --output p.json")
    popularity = Popularity.load("", "p.json")
    assert popularity.text == "words.txt" and popularity.routers.experts == (8,) * 5
    assert sum(map(sum, popularity.counts)) == 5 * 2 * popularity.tokens
    title = rf"tiny_moe: 5 layers of 8 experts, 2 for each token; {popularity.tokens} tokens of wor"
    assert re.match(title, profiled)
    shown = printed("show p.json --against p.json")
    assert shown.startswith(profiled)
    assert "popularity is tried on the text words.txt" in shown
    for capacity in range(5, 41, 5):
        (line,) = re.findall(rf"^ *{capacity} \({capacity / 40:.0%}\) .*$", shown, re.M)
        uniform, popular, hits, ideal, best = line.split()[2:7]
        assert uniform == f"{capacity / 40:.1%}" and (popular, hits) == (ideal, best)
        assignments = sum(map(sum, popularity.counts))
        assert (
            popular == f"{int(hits) / assignments:.1%}"
            and float(popular[:-1]) >= 100 * capacity / 40
        )


def test_without_output_the_counts_are_kept_in_the_cache_folder(files, monkeypatch):
    """Here of fewer layers and tokens."""
    monkeypatch.setattr("quantbench.files.cache_folder", lambda: files / "cache")
    result = worked("experts", *f"{PROFILE} --tokens 50 --num_layers 2".split())
    (path,) = (files / "cache" / "popularity").glob("*.json")
    popularity = Popularity.load("", path)
    assert f"Wrote {path}" in result.stderr and popularity.text == "heldout.txt"
    assert popularity.tokens == 50 and popularity.routers.experts == (8, 8)
    message = one_line(run(f"show {path} --against mine.json"))
    assert message.startswith("--against mine.json is of another model: mine has 4 experts a layer")


def test_a_heat_map_of_many_experts_fits_into_a_line():
    assert heat([0.25] * 4) == "▄▄▄▄"
    assert heat([0, 0.5, 0.25, 0.25]) == " █▄▄"
    assert heat([1 / 128] * 128) == "▄" * 64
    assert heat([1.0, 0.0]) == "█ "


def test_a_text_that_is_too_short(files):
    (files / "empty.txt").write_text("")
    message = one_line(run(f"{PROFILE} --text empty.txt"))
    assert message == "--text empty.txt: 1 token; give a longer text"
