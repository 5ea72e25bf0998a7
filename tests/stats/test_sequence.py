"""What looks cost: against simulated random walks."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.stats.sequence import EIGHT_LOOKS, FIRST, multiple, of_looks


def test_student_t():
    assert multiple(0.05, 4.5) == pytest.approx(stats.t.isf(0.025, 4.5))


@pytest.mark.parametrize("level", [0.05, 0.0167])
@pytest.mark.parametrize("planned", [40, 400])
def test_random_walks_leave_the_boundary_as_rarely_as_promised(level, planned):
    """8,000 walks that are looked at from FIRST cycles on, after each tenth more. The fourth root
    is of a family whose constants lie between 1.1 and 1.2 (Wang and Tsiatis 1987)."""
    generator = np.random.default_rng(5)
    looks = [FIRST]
    while looks[-1] < planned:
        looks.append(min(planned, math.ceil(1.1 * looks[-1])))
    walks = np.cumsum(generator.normal(0, 1, (8000, planned)), axis=1)[:, np.array(looks) - 1]
    spent = np.array(looks) / planned
    edge = np.array([multiple(level, 1e6) * of_looks(share) for share in spent]) * np.sqrt(looks)
    outside = (np.abs(walks) > edge).any(axis=1).mean()
    assert level / 2 < outside < level + 3 * math.sqrt(level / 8000)


def test_eight_looks_of_an_unknown_session():
    generator = np.random.default_rng(6)
    walks = np.cumsum(generator.normal(0, 1, (20_000, 8)), axis=1) / np.sqrt(np.arange(1, 9))
    outside = (np.abs(walks) > multiple(0.05, 1e6) * EIGHT_LOOKS).any(axis=1).mean()
    assert outside == pytest.approx(0.05, abs=0.005)
    assert of_looks(None) == EIGHT_LOOKS > of_looks(1.0) > 1
