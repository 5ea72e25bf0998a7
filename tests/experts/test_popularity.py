"""Counts of experts: what a file keeps, which models it fits, what is said of damaged ones, and how
uneven a layer is."""

import dataclasses
import json

import pytest

from quantbench.errors import UsageError
from quantbench.experts.popularity import (
    Popularity,
    effective_experts,
    find,
    keep,
    path_of,
    skews,
)
from tests.experts.counted import ROUTERS, counts_of, popularity_of

FIRST, SECOND = (counts_of(ROUTERS, 20, seed) for seed in (1, 2))
POPULARITY = Popularity(ROUTERS, "heldout.txt", 40, (FIRST, SECOND))


def test_a_file_keeps_all_of_it(tmp_path):
    POPULARITY.save("--output", tmp_path / "p.json")
    assert Popularity.load("", tmp_path / "p.json") == POPULARITY
    halves = ((1, 2), ()), ((3, 4), ())
    assert dataclasses.replace(POPULARITY, halves=halves).counts == ((4, 6), ())


def first(layers):
    """The routers of the first layers, as --num_layers loads them."""
    dense = tuple(layer for layer in ROUTERS.dense_layers if layer < layers)
    return dataclasses.replace(ROUTERS, dense_layers=dense, digests=ROUTERS.digests[:layers])


def test_a_model_with_fewer_of_the_same_layers_takes_their_counts():
    two = POPULARITY.of_model(first(2), "", "")
    assert two.counts == POPULARITY.counts[:2] and two.routers.dense_layers == (1,)
    assert POPULARITY.of_model(first(1), "", "").routers.dense_layers == ()


def test_a_model_whose_weights_were_not_read_is_known_by_its_shape():
    unread = dataclasses.replace(ROUTERS, digests=("",) * 3)
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
    with pytest.raises(UsageError) as raised:
        POPULARITY.of_model(other, "--expert_placement", "p.json")
    assert str(raised.value) == (
        f"--expert_placement p.json is of another model: mine has {difference} theirs; write one "
        "with quantbench experts profile"
    )


def changed(**changes):
    return json.dumps(json.loads(json.dumps(dataclasses.asdict(POPULARITY))) | changes).encode()


HALF = [list(layer) for layer in FIRST]
DAMAGED = {
    "empty": (b"", "it is no JSON (line 1, column 1: Expecting value)"),
    "cut off": (changed()[:-20], "it is no JSON (line 1, column "),
    "binary": (bytes(range(256)), "is no JSON"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "another file": (b"[1, 2]", "it holds no counts"),
    "another format": (changed(format=2), "its format is not 1"),
    "no routers": (changed(routers=None), "routers takes Routers; given: None"),
    "a text for counts": (changed(halves=["a", "b"]), "takes"),
    "a layer less": (changed(halves=[HALF[:2], HALF[:2]]), "other layers and experts than its rou"),
    "an expert less": (
        changed(halves=[[HALF[0][:3], *HALF[1:]], HALF]),
        "other layers and experts",
    ),
    "below 0": (changed(halves=[[[-1, 1, 1, 1], *HALF[1:]], HALF]), "a count is below 0"),
    "another sum": (changed(tokens=41), "layer 0 counts 80 assignments, where 41 tokens give 82"),
    "no experts": (
        changed(routers=dataclasses.asdict(ROUTERS) | {"experts_per_token": 0}),
        "0 of 4 experts per token is impossible",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file(name, tmp_path):
    data, message = DAMAGED[name]
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(UsageError) as raised:
        Popularity.load("--expert_placement", tmp_path / "p.json")
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).endswith("write it anew with quantbench experts profile")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="^--x .*p.json: No such file or directory$"):
        Popularity.load("--x", tmp_path / "p.json")


def test_effective_experts():
    assert effective_experts([5, 5, 5, 5]) == pytest.approx(4)
    assert effective_experts([7, 0, 0]) == 1
    assert effective_experts([0, 0]) == 0
    assert 1 < effective_experts([9, 1]) < 2


def test_the_first_half_alone():
    assert popularity_of(FIRST).counts == FIRST


# -------------------------------------------------------------------------------- skew

SKEWED = ((12, 4, 3, 1), (), (4, 6, 5, 5))
MORE = ((10, 2, 5, 3), (), (6, 4, 5, 5))
UNEVEN = Popularity(ROUTERS, "a text", 20, (SKEWED, MORE))


def test_a_skew_by_hand():
    skewed, flat = skews(UNEVEN)
    assert (skewed.layer, flat.layer) == (0, 2)
    assert skewed.shares == (22 / 40, 6 / 40, 8 / 40, 4 / 40)
    # By the first half experts 0 and 1 serve 12 of 20; by the second half 0 and 2 serve 15.
    assert skewed.half_serves == pytest.approx((12 / 20 + 15 / 20) / 2)
    assert not skewed.is_flat
    # Experts 1 and 2 serve 9 of 20, then 0 and 2 serve 9: less than even.
    assert flat.half_serves == pytest.approx(9 / 20) and flat.is_flat
    assert flat.effective == pytest.approx(4, abs=0.01)


def test_counts_are_kept_by_their_routers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = "^--expert_placement popularity: the cache folder has no counts of mine's experts; wr"
    with pytest.raises(UsageError, match=message):
        find(ROUTERS, "--expert_placement popularity")
    assert keep(UNEVEN) == path_of(ROUTERS)
    assert find(ROUTERS, "").counts == UNEVEN.counts
    assert find(first(1), "").counts == UNEVEN.counts[:1]
    counts = counts_of(ROUTERS, 20, 1)
    keep(Popularity(ROUTERS, "another", 40, (counts, counts)))
    assert find(ROUTERS, "").text == "another"
