"""Latency tables: computed by hand, written in two styles, read back, checked by the command."""

import math
import os
import re

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantbench.__main__ import commands
from quantbench.compare.figures.latency import (
    Against,
    Cell,
    LatencySample,
    Rate,
    Row,
    Summary,
    interval,
    latency_rows,
    rate,
    rate_rows,
)
from quantbench.compare.figures.latency_checks import findings, inferred
from quantbench.compare.output.latency_tables import COLUMNS, UNITS, Table, read, table_text

# Two batch sizes, two runs of 3 tokens; batch 4 failed. By hand: prefill 100 and 120 ms, steps of
# 10 and 30, 20 and 20: 40 ms both times, 20 a token. Rows of equal figures are merged.
CELLS = [
    Cell(1, [LatencySample(0.120, [0.01, 0.03]), LatencySample(0.100, [0.02, 0.02])]),
    Cell(2, [LatencySample(0.200, [0.02, 0.02]), LatencySample(0.200, [0.02, 0.02])]),
    Cell(4, [LatencySample(0.300, [0.03, 0.03])], reason="out of memory"),
]
LEGACY = """\
| Step           | Batch Size | Average   | Lowest    | Highest   | p50       | p90       | p99       |
|----------------|------------|-----------|-----------|-----------|-----------|-----------|-----------|
| Prefill        | 1          | 110.00 ms | 100.00 ms | 120.00 ms | 100.00 ms | 100.00 ms | 100.00 ms |
|                | 2          | 200.00 ms | 200.00 ms | 200.00 ms | 200.00 ms | 200.00 ms | 200.00 ms |
|                | 4          | NaN ms    | NaN ms    | NaN ms    | NaN ms    | NaN ms    | NaN ms    |
| Decode (token) | 1          | 20.00 ms  | 20.00 ms  | 20.00 ms  | 20.00 ms  | 20.00 ms  | 20.00 ms  |
|                | 2          |           |           |           |           |           |           |
|                | 4          | NaN ms    | NaN ms    | NaN ms    | NaN ms    | NaN ms    | NaN ms    |
| Decode (total) | 1          | 40.00 ms  | 40.00 ms  | 40.00 ms  | 40.00 ms  | 40.00 ms  | 40.00 ms  |
|                | 2          |           |           |           |           |           |           |
|                | 4          | NaN ms    | NaN ms    | NaN ms    | NaN ms    | NaN ms    | NaN ms    |"""  # noqa: E501
LEGACY_RATES = """\
| Step    | Batch Size | Average            | Lowest             | Highest            |
|---------|------------|--------------------|--------------------|--------------------|
| Prefill | 1          | 9.17 tokens/secs   | 8.33 tokens/secs   | 10.00 tokens/secs  |
|         | 2          | 10.00 tokens/secs  | 10.00 tokens/secs  |                    |
|         | 4          | NaN tokens/secs    | NaN tokens/secs    | NaN tokens/secs    |
| Decode  | 1          | 50.00 tokens/secs  | 50.00 tokens/secs  | 50.00 tokens/secs  |
|         | 2          | 100.00 tokens/secs | 100.00 tokens/secs | 100.00 tokens/secs |
|         | 4          | NaN tokens/secs    | NaN tokens/secs    | NaN tokens/secs    |"""
PARAMETERS = """\
| Parameter       | Value |
|-----------------|-------|
| Model           | tiny  |
| Sequence Length | 100   |
| Decode Length   | 3     |"""
REPORT = f"# A report\n\n{PARAMETERS}\n\n\n{LEGACY}\n\n{LEGACY_RATES}\n"
COMMON = settings(max_examples=60, deadline=None)


def table(text):
    (only,) = read(text).tables
    return only


def test_the_old_style_by_hand():
    assert table_text(Table("latency", "legacy", tuple(latency_rows(CELLS, "legacy")))) == LEGACY
    rates = tuple(rate_rows(CELLS, "legacy", 100))
    assert table_text(Table("throughput", "legacy", rates)) == LEGACY_RATES


def test_old_percentiles_are_those_of_the_order_of_arrival():
    """With ten runs, p50 is the sixth that came, and p90 and p99 are the tenth."""
    arrived = [9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 1.5]
    cell = Cell(1, [LatencySample(ms / 1e3, [ms / 1e3]) for ms in arrived])
    old = latency_rows([cell], "legacy")[0].figures
    assert [old.p50, old.p90, old.p99] == pytest.approx([3.0, 1.5, 1.5])
    new = latency_rows([cell], "correct")[0].figures
    # Sorted: 1 1.5 2 3 4 5 6 7 8 9. p50 lies at 4.5, p90 at 8.1, p99 at 8.91, counted from 0.
    assert [new.p50, new.p90, new.p99] == pytest.approx([4.5, 8.1, 8.91])
    assert new.average == old.average == pytest.approx(4.65)


def test_the_correct_style_by_hand():
    rows = latency_rows(CELLS, "correct")
    assert [(row.step, row.batch_size) for row in rows[::3]] == [
        ("Prefill (TTFT)", 1),
        ("Decode (token, TPOT)", 1),
        ("Decode (total)", 1),
        ("Decode (single steps, ITL)", 1),
    ]
    single = rows[9].figures
    assert (single.lowest, single.average, single.highest) == pytest.approx((10, 20, 30))
    text = table_text(Table("latency", "correct", tuple(rows)))
    assert "|            |" not in text and text.count("NaN ms") == 4 * 6
    rates = rate_rows(CELLS, "correct", 100)
    # 100 tokens twice in 220 ms together: 909.09 tokens/s, where the mean of the rates is 916.67.
    assert rates[0].figures.average == pytest.approx(2 * 100 / 0.22)
    assert [rate.unit for rate in rates[::3]] == ["tokens/s", "requests/s", "tokens/s"]
    assert rates[6].figures.average == pytest.approx(50)


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
    rate_of_late = rate(12, [1.0, 1.0, 1.0, 9.0], "correct")
    assert rate_of_late.interval == pytest.approx((12 / high, 12 / low))


def test_a_single_batch_size_is_merged_over_all_steps():
    text = table_text(Table("latency", "legacy", tuple(latency_rows(CELLS[1:2], "legacy"))))
    assert [line.split("|")[2].strip() for line in text.splitlines()[2:]] == ["2", "", ""]
    assert [row.batch_size for row in table(text).table.rows] == [2, 2, 2]


# ---------------------------------------------------------------------------------- reading back


@st.composite
def tables(draw):
    kind, style = draw(st.sampled_from(sorted(UNITS)))
    two_decimals = st.integers(0, 10 ** draw(st.integers(2, 9))).map(lambda n: n / 100)
    number = st.sampled_from([math.nan, math.inf, 0.0, 1.25]) | two_decimals
    ends = st.none() | st.tuples(number, number)
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        step, size = draw(st.sampled_from(["Prefill", "Decode (total)"])), draw(st.integers(1, 3))
        values = [draw(number) for _ in range(6 if kind == "latency" else 3)]
        made = Summary if kind == "latency" else Rate
        if kind == "estimates":
            error = draw(st.just(math.nan) | st.integers(-(10**6), 10**6).map(lambda n: n / 1e4))
            figures = Against(*values[:2], error)
        else:
            figures = made(*values, interval=draw(ends) if style == "correct" else None)
        rows.append(Row(step, size, draw(st.sampled_from(UNITS[kind, style])), figures))
    return Table(kind, style, tuple(rows))


OFF = Table("estimates", "correct", (Row("Prefill", 1, "ms", Against(1.0, 2.0, 0.0007)),))


@COMMON
@given(tables(), st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "# x\n\n"]))
@example(OFF, "\n", "")  # 0.07 / 100 is another number than 0.0007
def test_what_is_written_is_read_back(made, newline, before):
    text = table_text(made, newline)
    document = read(f"{before}{text}{newline}after")
    (again,) = document.tables
    assert again.renders and repr(again.table) == repr(made)  # NaN is not equal to itself
    assert again.line == 1 + before.count("\n")
    assert document.rendered == f"{before}{text}{newline}after"


@COMMON
@given(st.text(st.sampled_from("|- \n\rStep1.5NaNms") | st.characters()), st.integers(0, 2000))
def test_a_text_is_the_sum_of_its_parts(noise, place):
    text = REPORT[:place] + noise + REPORT[place:]
    parts = read(text).parts
    assert "".join(part if isinstance(part, str) else part.text for part in parts) == text
    findings(read(text))


@COMMON
@given(st.integers(0, len(LEGACY)))
@example(len(LEGACY))
def test_a_table_that_is_cut_off_renders_or_says_where_it_is_torn(length):
    document = read(LEGACY[:length])
    assert document.tables or length < len(LEGACY)
    whole_lines = LEGACY[:length] + "\n" in LEGACY + "\n" and LEGACY[:length].count("\n") > 0
    for at in document.tables:
        assert at.renders == (at.problem is None and at.difference is None)
        if whole_lines:  # cut between rows: what is left is a table, unless a column got narrower
            assert at.problem is None
        elif at.problem is not None:
            assert re.match(r"line \d+: ", at.problem)


@pytest.mark.parametrize(
    "old, new",
    [
        ("| 110.00 ms", "|  110.00 ms"),  # a space more
        ("| 1          | 110", "| 01         | 110"),
        ("| 2          |           |", "| 2          | 20.00 ms  |"),  # not merged
        ("110.00 ms", "110.0 ms "),
        ("110.00 ms", "١١٠.00 ms"),  # digits of another script
        ("|----------------|", "|----------------:"),
        ("| Batch Size |", "| batch size |"),
        (" ms |\n|                | 4", " ms\n|                | 4"),
        ("NaN ms", "nan ms"),
    ],
)
def test_what_does_not_render(old, new):
    assert old in LEGACY
    assert not table(LEGACY.replace(old, new, 1)).renders


@pytest.mark.parametrize("spaces", [" ", "  \t"])
def test_spaces_behind_a_row_are_all_that_is_wrong(spaces):
    """The table is read all the same, so what disagrees in it is found."""
    at = read(LEGACY.replace("|\n", f"|{spaces}\n")).tables[0]
    assert repr(at.table) == repr(table(LEGACY).table) and not at.renders
    line, stands, ours = at.difference
    assert line == 1 and stands == ours + spaces


def test_one_other_line_end_is_what_differs():
    at = read(LEGACY.replace("\n", "\r\n", 3)).tables[0]
    line, stands, ours = at.difference
    assert line == 4 and ours == f"{stands}\r" and len(stands) < 200


def test_findings_of_a_line_are_in_the_order_of_the_table(tmp_path):
    rows = [Row("Prefill", size, "ms", Summary(*[1.0] * 6)) for size in (1, 2, 16)]
    (tmp_path / "a.md").write_text(table_text(Table("latency", "legacy", tuple(rows))))
    sizes = re.findall(
        r"Decode \(total\): batch size (\d+) has no row", check(tmp_path / "a.md").stdout
    )
    assert sizes == ["1", "2", "16"]


def test_a_byte_order_mark_belongs_to_no_table():
    document = read(f"\ufeff{LEGACY}")
    assert [(at.line, at.renders) for at in document.tables] == [(1, True)]
    assert document.rendered == f"\ufeff{LEGACY}"


def test_a_bar_in_a_name_is_no_column():
    text = "| Parameter | Value |\n|-----------|-------|\n| Model     | a\\|b  |"
    assert table(text).renders and table(text).table.parameters == (("Model", "a\\|b"),)


def test_other_tables_are_no_business_of_ours():
    document = read(f"| a | b |\n|---|---|\n| 1 | 2 |\n\n{PARAMETERS}")
    assert document.others == (1,) and [at.line for at in document.tables] == [5]


# ---------------------------------------------------------------------------------- what agrees


def texts(document, *lengths):
    return [(f.line, f.text) for f in findings(document, *lengths)]


def test_reports_of_ours_agree_with_themselves():
    assert (
        texts(read(REPORT.replace("100.00 ms | 100.00 ms |\n", "120.00 ms | 120.00 ms |\n"))) == []
    )
    ours = [
        table_text(Table("parameters", "legacy", (), (("Decode Length", "3"), ("Sequence Length", "100")))),  # noqa: E501
        table_text(Table("latency", "correct", tuple(latency_rows(CELLS, "correct")))),
        table_text(Table("throughput", "correct", tuple(rate_rows(CELLS, "correct", 100)))),
    ]  # fmt: skip
    assert texts(read("\n\n".join(ours))) == []


@COMMON
@given(
    st.lists(st.lists(st.floats(1e-4, 10), min_size=8, max_size=8), min_size=1, max_size=12),
    st.integers(1, 64),
)
def test_whatever_was_measured_agrees(runs, batch_size):
    """But for percentiles in the order of arrival, and an average above p90."""
    cell = Cell(batch_size, [LatencySample(run[0], run[1:]) for run in runs])
    header = table_text(Table("parameters", "legacy", (), (("Sequence Length", "7"),)))
    for style in ("correct", "legacy"):
        latency = table_text(Table("latency", style, tuple(latency_rows([cell], style))))
        rates = table_text(Table("throughput", style, tuple(rate_rows([cell], style, 7))))
        for line, text in texts(read(f"{header}\n\n{latency}\n\n{rates}"), 8):
            assert re.search(r": p\d\d .* is below (average|p\d\d|lowest)", text), (line, text)
            assert style == "legacy" or "p90" in text and "average" in text


@pytest.mark.parametrize(
    "old, new, line, message",
    [
        ("| 110.00 ms |", "| 121.00 ms |", 12, "Prefill, batch size 1: highest 120.00 is below"),
        ("| 40.00 ms  |", "| 40.05 ms  |", 18, "batch size 1: average 40.05 is not 2 × 20.00"),
        ("9.17 tokens/secs ", "8.99 tokens/secs ", 24, "average 8.99 tokens/secs, and the laten"),
        ("8.33 tokens/secs", "8.40 tokens/secs", 24, "lowest 8.40 tokens/secs, and the latencies "
         "say 8.33"),
        ("| 50.00 tokens/secs  |", "| NaN tokens/secs    |", 27, "NaN, and the other figures"),
        ("| NaN ms    ", "| 1.00 ms   ", 14, "lowest, highest, p50, p90, p99 NaN"),
    ],
)  # fmt: skip
def test_what_does_not_agree_is_listed_by_line(old, new, line, message):
    assert old in REPORT
    found = texts(read(REPORT.replace(old, new, 1)))
    assert [text for at, text in found if at == line and message in text], found


def test_missing_rows_and_tables_that_differ_in_batch_sizes():
    torn = REPORT[: REPORT.rindex("|         | 4")]
    found = texts(read(torn))
    assert (28, "Decode: batch size 4 has no row, and other steps have one") in found
    one = "\n".join(line for line in LEGACY_RATES.splitlines() if "| 4 " not in line)
    found = texts(read(f"{LEGACY}\n\n{one}"))
    assert (18, "batch size 4: there are no rates of it") in found
    twice = REPORT.replace("|         | 2 ", "|         | 1 ", 1)
    assert any("stands in line" in text or "batch size 1" in text for _, text in texts(read(twice)))


def test_a_table_that_lost_its_widest_row_is_as_wide_as_that_was():
    whole = LEGACY_RATES.replace(" |\n", "  |\n").replace("-|\n", "--|\n")
    assert not table(f"{whole[:-1]} |").renders  # nothing is missing, and nothing is so wide
    torn = whole[: whole.rindex("\n")]
    assert table(torn).renders
    assert not table(torn.replace("|\n| Decode", " |\n| Decode")).renders
    assert [text for _, text in texts(read(torn))] == [
        "Decode: batch size 4 has no row, and other steps have one"
    ]


def test_a_step_that_is_none_is_listed():
    strange = LEGACY_RATES.replace("| Decode  |", "| Decoda  |")
    assert (6, "Decoda, batch size 1: no such step; there are Prefill, Decode") in texts(
        read(strange)
    )


def test_the_decode_length_comes_from_the_figures_where_nothing_names_it():
    assert inferred(table(LEGACY).table) == 3
    assert inferred(Table("latency", "legacy")) == 1
    wrong = REPORT.replace("| Decode Length   | 3     |", "| Decode Length   | 8     |")
    assert any("is not 7 × 20.00" in text for _, text in texts(read(wrong)))


# ---------------------------------------------------------------------------------- the command


def check(*paths):
    return CliRunner().invoke(commands, ["latency", "check", *map(str, paths)])


def test_check_says_how_many_tables_there_are(tmp_path):
    (tmp_path / "a.md").write_text(REPORT)
    (tmp_path / "b.md").write_text(PARAMETERS)
    done = check(tmp_path / "a.md", tmp_path / "b.md")
    assert done.exit_code == 0, done.output
    assert "a.md: 3 tables, of which 3 are intact" in done.stdout
    assert "2 files: 4 tables, of which 4 are intact" in done.stdout
    assert "  line 10: latency, 9 rows, legacy style\n" in done.stdout


def test_check_fails_where_a_table_does_not_render(tmp_path):
    (tmp_path / "a.md").write_text(REPORT.replace("| 110.00 ms", "|  110.00 ms"))
    done = check(tmp_path / "a.md")
    assert done.exit_code == 1 and "3 tables, of which 2 are intact" in done.stdout
    assert "line 12: '| Prefill        | 1          |  110.00" in done.stdout


HOSTILE = {
    "torn": (REPORT[: len(REPORT) // 2].encode(), 1, ""),
    "empty": (b"", 1, "there is no latency table in it"),
    "prose": (b"Once upon a time\n", 1, "there is no latency table in it"),
    "utf16": (REPORT.encode("utf-16"), 1, "it is no UTF-8 text"),
    "binary": (bytes(range(256)), 1, "it is no UTF-8 text"),
    "huge numbers": (LEGACY.replace("110.00", "9" * 400 + ".00").encode(), 1, ""),
    "large numbers": (REPORT.replace("110.00", "9" * 29 + ".00").encode(), 1, ""),
    "wide": (b"| Step " + b"|" * 1_000_000, 1, ""),
    "deep": (b"| Step |\n" * 100_000, 1, ""),
    "huge parameter": (PARAMETERS.replace("3     |", "9" * 5000 + " |").encode(), 1, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_one_line_each(tmp_path, name):
    data, code, message = HOSTILE[name]
    (tmp_path / "x.md").write_bytes(data)
    done = check(tmp_path / "x.md")
    assert done.exit_code == code and "Traceback" not in done.output
    assert message in done.stderr and len(done.output) < 20_000
    assert done.stderr.count("\n") == bool(message)


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "nope", "No such file"),
    ):
        done = check(path)
        assert done.exit_code == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert "takes one or more files" in check().stderr and check().exit_code == 2


def test_a_file_of_fifty_megabytes_is_refused(tmp_path):
    with open(tmp_path / "x.md", "wb") as file:
        file.truncate(50_000_000)
    done = check(tmp_path / "x.md")
    assert done.exit_code == 1 and "50.00 MB are more than" in done.stderr


def test_columns_are_as_in_the_tool_before_this_one():
    assert COLUMNS["latency", "legacy"][:3] == ("Step", "Batch Size", "Average")
