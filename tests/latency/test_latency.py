"""Latency tables: computed by hand, written, drawn, and read back."""

import csv
import re
from xml.etree import ElementTree

import pytest

from quantbench.latency import tables as latency
from quantbench.latency.answer import (
    Cell,
    Latencies,
    LatencyRow,
    LatencySample,
    interval,
    latency_rows,
    rate,
    rate_rows,
)
from quantbench.latency.tables import (
    NOT_REACHED,
    draw,
    panels,
    report,
    rows_text,
    samples,
)
from quantbench.report import columns
from quantbench.typed_json import from_json, to_json
from tests.latency.latencies import MACHINE, latencies, plan

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
HEAD = (
    "| Step                       | Batch Size | Average   | 95 % Interval | Lowest    | Highest   "
    "| p50       | p90       | p99       |"
)


def test_percentiles_are_of_sorted_samples():
    arrived = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 1.5]
    cell = Cell(1, [LatencySample(ms / 1e3, [ms / 1e3]) for ms in arrived])
    values = latency_rows([cell])[0].values
    # Sorted: 1 1.5 2 3 4 5 6 7 8 9. p50 lies at 4.5, p90 at 8.1, p99 at 8.91, counted from 0.
    assert [values[p] for p in ("p50", "p90", "p99")] == pytest.approx([4.5, 8.1, 8.91])
    assert values["average"] == pytest.approx(4.65)


def test_rows_by_hand():
    rows = latency_rows(CELLS)
    assert [(row.step, row.batch_size) for row in rows[::3]] == [
        ("Prefill (TTFT)", 1),
        ("Decode (token, TPOT)", 1),
        ("Decode (total)", 1),
        ("Decode (single steps, ITL)", 1),
    ]
    single = rows[9].values
    assert [single[n] for n in ("lowest", "average", "highest")] == pytest.approx([10, 20, 30])
    assert list(rows[6].values.values()) == pytest.approx([40] * 6)
    text = rows_text(rows)
    assert text.count("NaN ms") == 4 * 6 and text.splitlines()[0] == HEAD
    rates = rate_rows(CELLS, 100)
    # 100 tokens twice in 220 ms together: 909.09 tokens/s, where the mean of the rates is 916.67.
    assert rates[0].values["average"] == pytest.approx(2 * 100 / 0.22)
    assert rows_text(rates) == RATES


def test_a_character_of_two_columns_is_counted_as_two():
    rows = [("Model", "模型 e\u0301")]
    assert columns.table(("Parameter", "Value"), rows, padded=True) == (
        "| Parameter | Value  |\n|-----------|--------|\n| Model     | 模型 e\u0301 |"
    )


def test_an_interval_by_hand():
    """1, 2, 3, 4: mean 2.5, deviation √(5/3), and t of 3 degrees of freedom is 3.1824 at 95 %: the
    mean's logarithm has a standard error of √(5/3) / 2 / 2.5 = 0.2582, and 3.1824 of it are 0.8217.
    """
    assert interval([1, 2, 3, 4]) == pytest.approx((1.0992, 5.6859), rel=1e-4)
    assert interval([1, 2, 3]) is None
    late = [1.0, 1.0, 1.0, 9.0]  # the mean minus 3.18 standard errors is -3.4
    low, high = interval(late)
    assert 0 < low < 3 < high
    assert rate(LatencyRow("", 1, "", {}), 12, late).interval == pytest.approx(
        (12 / high, 12 / low)
    )


@pytest.fixture
def made():
    """Two arms; of the second, batch 2 failed and batch 4 was not reached."""
    everything = latencies({"none": 1.0, "int8wo": 0.8})
    cells = everything.tables[1].cells
    everything.tables[1].cells = [cells[0], Cell(2, cells[1].samples[:3], "out of | memory\n2 GB")]
    return everything


def test_a_report_names_every_reason(made):
    text = report(made)
    for heading, count in (("| Parameter", 2), ("| Step", 4), ("# tiny, ", 2)):
        assert len(re.findall(f"^{re.escape(heading)}", text, re.MULTILINE)) == count
    assert "- batch size 2: out of \\| memory 2 GB\n" in text
    assert f"- batch size 4: {NOT_REACHED}" in text
    second = text[text.index("# tiny, int8wo") :]
    prefill = re.findall(r"^\| Prefill \(TTFT\) +\| (\d) +\| (\S+) ms", second, re.MULTILINE)
    assert [size for size, average in prefill if average == "NaN"] == ["2", "4"]
    made.tables[0].cells[0] = Cell(1, made.tables[0].cells[0].samples[:6])
    assert "- batch size 1: 6 of 16 runs\n" in report(made)
    assert report(Latencies(plan())) == "Nothing was measured.\n"


def test_the_table_of_parameters(made):
    lines = report(made).split("\n\n")[1].splitlines()[2:]
    pairs = dict([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert list(pairs) == [
        "Model", "Sequence Length", "Decode Length", "N Runs", "Warmups", "Sampling", "Arm",
        "Tensor Parallel", "Precision", "Kernel", "Decoder", "Compiled", "Device", "Machine",
    ]  # fmt: skip
    assert (pairs["Decode Length"], pairs["N Runs"], pairs["Machine"]) == ("3", "16", MACHINE)


def test_the_tables_go_through_their_json(made):
    assert from_json(Latencies, to_json(made)) == made  # results.json


def test_every_sample_is_in_the_csv(made):
    rows = list(csv.DictReader(samples(made).splitlines()))
    for table in made.tables:
        for cell in table.cells:
            own = (table.arm, str(cell.batch_size))
            lines = [row for row in rows if (row["arm"], row["batch_size"]) == own]
            assert len(lines) == 3 * len(cell.samples)
            for row in lines:
                sample = cell.samples[int(row["run"]) - 1]
                seconds = [sample.prefill_seconds, *sample.step_seconds][int(row["step"])]
                assert float(row["seconds"]) == seconds
            assert {row["reason"] for row in lines} == {(cell.reason or "").replace("\n", " ")}
    (last,) = [row for row in rows if row["seconds"] == "NaN"]
    assert last["batch_size"] == "4" and last["reason"] == NOT_REACHED


def test_panels_by_hand():
    everything = latencies({"none": 1.0}, ranks=[1, 2], sequence_lengths=[100, 200])
    del everything.tables[2].cells[2]  # 2 ranks, prompt 100: no batch size 4
    shown = panels(everything)
    assert list(shown) == [latency.LATENCY, latency.BATCH, latency.PROMPT, latency.RANKS]
    line = shown[latency.BATCH]["none, 1 rank, prompt 100"]
    assert [point.x for point in line] == [1, 2, 4]
    cell = everything.tables[0].cells[1]
    steps = [second for sample in cell.samples for second in sample.step_seconds]
    assert line[1].y == pytest.approx(2 * len(steps) / sum(steps))
    point = next(p for p in shown[latency.LATENCY]["none, 1 rank, prompt 100"] if p.label == "2")
    assert point.y == pytest.approx(1e3 * sum(steps) / len(steps)) and point.x == line[1].y
    assert [point.x for point in shown[latency.PROMPT]["none, 2 ranks"]] == [100, 200]
    # The largest batch size that both have.
    assert set(shown[latency.RANKS]) == {"none, prompt 100, batch 2", "none, prompt 200, batch 4"}


def test_the_same_results_give_the_same_picture(made, tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(panels(made), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    texts = [element.text for element in ElementTree.parse(tmp_path / "a.svg").iter()]
    assert "batch size" in texts and "none" in texts
    assert "int8wo" not in texts  # a single point is no line
    assert panels(Latencies(plan())) == {}
