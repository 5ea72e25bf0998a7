"""What ranks exchange on cards, by NCCL's own model."""

import pytest

from quantbench.estimate.datasheets import find
from quantbench.estimate.exchanges import ring_seconds


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
        ("MI300X", 2, 64e9, True),  # each pair has a separate link
        ("MI300X", 8, 448e9, True),
    ],
)
def test_links_by_the_number_of_cards(card, ranks, rate, nvlink):
    link = find(card).link_among(ranks)
    assert (link.rate, link.nvlink) == (pytest.approx(rate), nvlink)
