"""Latency tables: computed by hand, and written."""

import pytest

from quantbench.compare.figures.latency import (
    Cell,
    LatencySample,
    interval,
    latency_rows,
    rate,
    rate_rows,
)
from quantbench.report.latency_tables import pairs_text, rows_text

# Two batch sizes, two runs of 3 tokens; batch 4 failed. By hand: prefill 100 and 120 ms, steps of
# 10 and 30, 20 and 20: 40 ms both times, 20 a token.
CELLS = [
    Cell(1, [LatencySample(0.120, [0.01, 0.03]), LatencySample(0.100, [0.02, 0.02])]),
    Cell(2, [LatencySample(0.200, [0.02, 0.02]), LatencySample(0.200, [0.02, 0.02])]),
    Cell(4, [LatencySample(0.300, [0.03, 0.03])], reason="out of memory"),
]
RATES = """\
| Step    | Batch Size | Average          | 95 % Interval | Lowest           | Highest          |
|---------|------------|------------------|---------------|------------------|------------------|
| Prefill | 1          | 909.09 tokens/s  | none          | 833.33 tokens/s  | 1000.00 tokens/s |
| Prefill | 2          | 1000.00 tokens/s | none          | 1000.00 tokens/s | 1000.00 tokens/s |
| Prefill | 4          | NaN tokens/s     | none          | NaN tokens/s     | NaN tokens/s     |
| Prefill | 1          | 9.09 requests/s  | none          | 8.33 requests/s  | 10.00 requests/s |
| Prefill | 2          | 10.00 requests/s | none          | 10.00 requests/s | 10.00 requests/s |
| Prefill | 4          | NaN requests/s   | none          | NaN requests/s   | NaN requests/s   |
| Decode  | 1          | 50.00 tokens/s   | none          | 50.00 tokens/s   | 50.00 tokens/s   |
| Decode  | 2          | 100.00 tokens/s  | none          | 100.00 tokens/s  | 100.00 tokens/s  |
| Decode  | 4          | NaN tokens/s     | none          | NaN tokens/s     | NaN tokens/s     |"""


def test_percentiles_are_of_sorted_samples():
    arrived = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 1.5]
    cell = Cell(1, [LatencySample(ms / 1e3, [ms / 1e3]) for ms in arrived])
    figures = latency_rows([cell])[0].figures
    # Sorted: 1 1.5 2 3 4 5 6 7 8 9. p50 lies at 4.5, p90 at 8.1, p99 at 8.91, counted from 0.
    assert [figures.p50, figures.p90, figures.p99] == pytest.approx([4.5, 8.1, 8.91])
    assert figures.average == pytest.approx(4.65)


def test_rows_by_hand():
    rows = latency_rows(CELLS)
    assert [(row.step, row.batch_size) for row in rows[::3]] == [
        ("Prefill (TTFT)", 1),
        ("Decode (token, TPOT)", 1),
        ("Decode (total)", 1),
        ("Decode (single steps, ITL)", 1),
    ]
    single = rows[9].figures
    assert (single.lowest, single.average, single.highest) == pytest.approx((10, 20, 30))
    total = rows[6].figures
    assert list(total.values.values()) == pytest.approx([40] * 6)
    assert rows_text("latency", rows).count("NaN ms") == 4 * 6
    rates = rate_rows(CELLS, 100)
    # 100 tokens twice in 220 ms together: 909.09 tokens/s, where the mean of the rates is 916.67.
    assert rates[0].figures.average == pytest.approx(2 * 100 / 0.22)
    assert [rate.unit for rate in rates[::3]] == ["tokens/s", "requests/s", "tokens/s"]
    assert rates[6].figures.average == pytest.approx(50)


def test_a_table_by_hand():
    assert rows_text("throughput", rate_rows(CELLS, 100)) == RATES


def test_a_character_of_two_columns_is_counted_as_two():
    assert pairs_text((("Model", "模型 e\u0301"),)) == (
        "| Parameter | Value  |\n|-----------|--------|\n| Model     | 模型 e\u0301 |"
    )


def test_an_interval_by_hand():
    """1, 2, 3, 4: mean 2.5, deviation √(5/3), and t of 3 degrees of freedom is 3.1824 at 95 %: the
    mean's logarithm has a standard error of √(5/3) / 2 / 2.5 = 0.2582, and 3.1824 of it are 0.8217.
    """
    assert interval([1, 2, 3, 4]) == pytest.approx((1.0992, 5.6859), rel=1e-4)
    assert interval([1, 2, 3]) is None


def test_times_that_scatter_much_have_ends_above_zero():
    """One late run of four: the mean minus 3.18 standard errors is -3.4, and a rate's interval from
    that would have no upper end."""
    low, high = interval([1.0, 1.0, 1.0, 9.0])
    assert 0 < low < 3 < high
    rate_of_late = rate(12, [1.0, 1.0, 1.0, 9.0])
    assert rate_of_late.interval == pytest.approx((12 / high, 12 / low))
