"""How work follows the machine's speed, learned from rounds of it: laws with known answers."""

import pytest

from quantbench.estimate.calibration import Speed
from quantbench.estimate.drift import Drift, by_rate, learned

FAST, SLOW = Speed(80e9, 800e9), Speed(40e9, 1000e9)


def rounds(memory, arithmetic, base, speeds):
    return [(base * s.read**-memory * s.multiply**-arithmetic, s) for s in speeds]


def test_exponents_are_ratios_of_speeds():
    """At half of memory's speed and 1.25 of arithmetic's: 2 ** 0.5 ÷ 1.25."""
    assert Drift(0.5, 1.0).slower(SLOW, FAST) == pytest.approx(2**0.5 / 1.25)
    assert Drift(0.5, 1.0).slower(FAST, FAST) == 1.0


def test_a_law_is_found_from_works_of_different_sizes():
    speeds = [FAST, SLOW, Speed(60e9, 600e9), Speed(75e9, 1100e9)]
    works = [rounds(0.7, 0.2, base, speeds) for base in (1e6, 3e7, 4e8) for _ in range(10)]
    drift = learned(works, Drift(0.2, 0.7))
    # The pull towards what was expected: SCATTER ** 2 ÷ TRUST ** 2, a quarter, against sums of
    # squared logarithms of 30 times 0.3.
    assert drift.memory == pytest.approx(0.7, abs=0.05)
    assert drift.arithmetic == pytest.approx(0.2, abs=0.05)


def test_where_nothing_changed_what_was_expected_stays():
    works = [rounds(0.7, 0.2, 1e6, [FAST, FAST]), [(1.0, SLOW)]]
    assert learned(works, Drift(0.3, 0.6)) == Drift(pytest.approx(0.3), pytest.approx(0.6))


def test_faster_memory_makes_nothing_slower():
    works = [rounds(-0.5, 0.0, 1e6, [FAST, SLOW])]
    assert learned(works, Drift(0.0, 0.0)).memory == 0.0


def test_work_that_reads_at_memorys_speed_goes_with_it():
    """At all of it and at half: (1 ÷ 2)³, and arithmetic's share of the rest."""
    assert by_rate(50e9, 40e9) == Drift(1.0, 0.0)
    assert by_rate(20e9, 40e9) == Drift(0.125, pytest.approx(0.3 * 0.875))
