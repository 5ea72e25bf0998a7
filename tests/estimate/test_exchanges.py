"""What ranks exchange: NCCL's own model on cards, and what was measured, by size."""

import pytest
from quantbench.estimate.calibration import ExchangePoint

from quantbench.errors import UsageError
from quantbench.estimate.datasheets import find
from quantbench.estimate.exchanges import Exchanges, ring_seconds
from tests.estimate import invented


def test_a_short_sum_of_eight_cards_is_its_steps():
    """14 steps of 0.6 µs, 6.6 µs once, and 14 · 1 KB of 8 KB over half of 450 GB/s: 64 ns."""
    link = find("H100 SXM").link_among(8)
    assert ring_seconds("all_reduce", 8192, 8, link) == pytest.approx(15.064e-6, rel=1e-3)
    # A gather has half of the steps, each with all of a rank's 8 KB.
    assert ring_seconds("all_gather", 8192, 8, link) == pytest.approx(11.055e-6, rel=1e-3)


def test_a_long_sum_takes_the_whole_link():
    """64 MB: 8.4 µs, 14 steps of 3.4 µs, 14 · 8 MB at 450 GB/s; with flags 249 µs more."""
    link = find("H100 SXM").link_among(8)
    assert ring_seconds("all_reduce", 64_000_000, 8, link) == pytest.approx(304.9e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("card", "ranks", "rate", "nvlink"),
    [
        ("A6000", 2, 56.25e9, True),  # a bridge joins two
        ("A6000", 8, 32e9, False),
        ("L4", 2, 32e9, False),
        ("H100 SXM", 8, 450e9, True),
        ("MI300X", 2, 64e9, True),  # each pair has a link of its own
        ("MI300X", 8, 448e9, True),
    ],
)
def test_links_by_the_number_of_cards(card, ranks, rate, nvlink):
    link = find(card).link_among(ranks)
    assert (link.rate, link.nvlink) == (pytest.approx(rate), nvlink)


def test_what_was_measured_is_given_back_by_size():
    exchanges = Exchanges(invented.exchanges())
    for point in invented.exchanges():
        found = exchanges.seconds(point.kind, point.bytes, 2)
        assert found == pytest.approx(point.seconds, rel=1e-6)
    # Four ranks: 6 steps instead of 2, and 1.5 of a tensor to send instead of one.
    four = exchanges.seconds("all_reduce", 40_000, 4)
    assert four == pytest.approx(3 * invented.CALL + 60_000 / invented.LINK)


def test_a_calibration_without_exchanges_says_how_to_get_them():
    with pytest.raises(UsageError, match="--tp 2: the calibration is of one process"):
        Exchanges([]).seconds("all_reduce", 1, 2)


def test_points_without_spread_are_a_call_alone():
    points = [ExchangePoint("all_reduce", "gloo", 2, size, 3e-6) for size in (8, 16, 32)]
    assert Exchanges(points).seconds("all_reduce", 16, 2) == pytest.approx(3e-6, rel=1e-3)
