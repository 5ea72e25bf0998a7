"""A layer's skew is what its counts say, and is judged by text that was not seen."""

import pytest

from quantbench.errors import UsageError
from quantbench.experts.popularity import Popularity, find, keep, path_of, skews
from tests.experts.counted import ROUTERS, counts_of

FIRST = ((12, 4, 3, 1), (), (4, 6, 5, 5))
SECOND = ((10, 2, 5, 3), (), (6, 4, 5, 5))
POPULARITY = Popularity(ROUTERS, "a text", 20, (FIRST, SECOND))


def test_by_hand():
    skewed, flat = skews(POPULARITY)
    assert (skewed.layer, flat.layer) == (0, 2)
    assert skewed.shares == (22 / 40, 6 / 40, 8 / 40, 4 / 40)
    assert (skewed.most, skewed.least) == (0, 3)
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
    assert keep(POPULARITY) == path_of(ROUTERS)
    assert find(ROUTERS, "").counts == POPULARITY.counts
    assert find(ROUTERS.first(1), "").counts == POPULARITY.counts[:1]
    counts = counts_of(ROUTERS, 20, 1)
    keep(Popularity(ROUTERS, "another", 40, (counts, counts)))
    assert find(ROUTERS, "").text == "another"
