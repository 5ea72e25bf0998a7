"""Reading published tables, and what is wrong with them: derived from figures, in any layout."""

from pathlib import Path

import pytest

from quantbench.errors import QuantbenchError
from quantbench.estimate.audit import audit
from quantbench.estimate.audit_energy import cards
from quantbench.estimate.tables import grid, parse, read

PUBLISHED = Path(__file__).parent / "published" / "published_a5000.rst"
CARD = "NVIDIA RTX A6000"  # 300 W
# Runtime of three passes of 4 × 512 tokens in ms, measured and estimated.
TIMES = ((100.0, 110.0), (250.0, 240.0), (900.0, 990.0))
TOKENS = 4 * 512


def table(energy, throughput, error, title="Throughput (token/sec)", card=CARD, order=(0, 1, 2)):
    """A table of three rows. energy, throughput: of milliseconds, measured or not, as printed."""
    columns = ("Measured", "Estimated", "Error")
    names = ["Runtime (ms)", "Energy (J/token)", title]
    rows = []
    for number, (m, e) in enumerate(TIMES):
        groups = [(f"{m:.2f}", f"{e:.2f}", f"{error(m, e):.2%}")]
        for of in (energy, throughput):
            a, b = of(m, number), of(e, number)
            groups.append((f"{a:.6g}", f"{b:.6g}", f"{error(a, b):.2%}"))
        rows.append([f"org/model-{number}", card, *(x for i in order for x in groups[i])])
    head = [("Model", ()), ("Device", ()), *((names[i], columns) for i in order)]
    text = "Input Sequence Size = :math:`4 \\times 512`\n\nSingle GPU\n----------\n"
    return parse(text + grid(head, rows))[0]


def honest_error(m, e):
    return (e - m) / m


def by_estimate(m, e):
    return (e - m) / e


def true_rate(ms, number):
    return TOKENS / ms * 1e3


def own_energy(ms, number):
    return (180 + 40 * number) * ms / 1e3 / TOKENS * (1 + 0.03 * (ms in (110.0, 240.0)))


def limit_energy(ms, number):
    return 300 * ms / 1e3 / TOKENS


def texts(table):
    return {f.column: f.text for f in audit(table) if f.wrong}


def test_the_published_table_is_read_as_it_stands():
    (read_table,) = read(PUBLISHED)
    assert (read_table.title, read_table.batch, read_table.length) == ("Single GPU", 16, 1024)
    assert len(read_table.rows) == 6
    row = read_table.rows[2]
    assert (row.model, row.device) == ("AICrossSim/clm-60m", "NVIDIA RTX A5000")
    assert read_table.seconds(row.cell("runtime").measured).value == 0.12146
    assert row.cell("memory").error.value == -0.0016
    assert row.cell("energy").measured.half == 0.0005


def test_what_is_wrong_with_the_published_table():
    remarks = texts(read(PUBLISHED)[0])
    throughput = remarks["Throughput (token/sec), Measured"]
    assert "microseconds per token, not tokens per second" in throughput
    assert "16384 tokens ÷ 0.694 s = 23,616 for facebook/opt-1.3b" in throughput
    energy = remarks["Energy (J/token), Measured"]
    assert "power limit × time ÷ tokens in all 6 rows" in energy and "230 W" in energy
    assert remarks["Runtime (ms), Error"].startswith("it divides by the estimate")
    assert "it is the runtime's error" in remarks["Energy (J/token), Error"]
    assert not any("Memory" in column for column in remarks)  # too near to tell them apart


def test_an_honest_table_has_nothing_wrong():
    assert texts(table(own_energy, true_rate, honest_error)) == {}


def test_the_order_of_the_columns_does_not_matter():
    remarks = texts(table(limit_energy, true_rate, by_estimate, order=(2, 0, 1)))
    assert "Energy (J/token), Measured" in remarks and "Runtime (ms), Error" in remarks
    assert "Throughput (token/sec), Measured" not in remarks


RATES = [
    (lambda ms, n: 1e3 * ms / TOKENS, "Throughput (token/sec)", "microseconds per token"),
    (lambda ms, n: ms / TOKENS, "Throughput (tokens/s)", "milliseconds per token"),
    (lambda ms, n: 512 / ms * 1e3, "Throughput (token/s)", "tokens per second of one sequence"),
    (lambda ms, n: 4 / ms * 1e3, "Throughput (tokens per sec)", "sequences per second"),
    (lambda ms, n: TOKENS / ms, "Throughput (token/s)", "thousands of tokens per second"),
    (lambda ms, n: 7.0 + n, "Throughput (token/s)", "does not follow from the runtime in 3 rows"),
]


@pytest.mark.parametrize(("of", "title", "expected"), RATES)
def test_a_throughput_in_another_unit_is_named(of, title, expected):
    remarks = texts(table(own_energy, of, honest_error, title))
    assert expected in remarks[f"{title}, Measured"]


def test_a_unit_that_the_title_names_is_right():
    title = "Throughput (us/token)"
    remarks = texts(table(own_energy, lambda ms, n: 1e3 * ms / TOKENS, honest_error, title))
    assert not any("Throughput" in c and "Error" not in c for c in remarks)


ENERGIES = [
    (limit_energy, CARD, "power limit × time ÷ tokens in all 3 rows"),
    (lambda ms, n: 2 * limit_energy(ms, n), f"2 x {CARD}", "and the limit is 600 W"),
    (lambda ms, n: 300 * ms / 1e3, CARD, "of the whole pass, not of a token"),
    (lambda ms, n: 120 * ms / 1e3 / TOKENS, "Some Card", "every row is one power, 120.0"),
    (lambda ms, n: (400 + n) * ms / 1e3 / TOKENS, CARD, "would need more than the 300 W"),
]


@pytest.mark.parametrize(("of", "card", "expected"), ENERGIES)
def test_an_energy_that_nobody_measured_is_named(of, card, expected):
    remarks = texts(table(of, true_rate, honest_error, card=card))
    assert expected in remarks["Energy (J/token), Measured"]


ERRORS = [
    (by_estimate, "it divides by the estimate, (estimated − measured) ÷ estimated"),
    (lambda m, e: (m - e) / e, "it divides by the estimate, (measured − estimated) ÷ estimated"),
    (lambda m, e: abs(m - e) / e, "it divides by the estimate, |estimated − measured|"),
    (lambda m, e: 0.5, "in 3 rows of 3 it follows from no definition"),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS)
def test_an_error_by_another_definition_is_named(error, expected):
    assert expected in texts(table(own_energy, true_rate, error))["Runtime (ms), Error"]


@pytest.mark.parametrize("error", [lambda m, e: abs(e - m) / m, lambda m, e: (m - e) / m])
def test_errors_by_what_was_measured_are_right(error):
    assert "Runtime (ms), Error" not in texts(table(own_energy, true_rate, error))


def test_without_the_number_of_tokens_a_time_is_still_no_throughput():
    text = PUBLISHED.read_text().replace("16 \\times 1024", "unknown")
    remarks = texts(parse(text)[0])
    line = remarks["Throughput (token/sec), Measured"]
    assert "it grows with the runtime" in line and "16384 tokens" in line


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA L4", (1, "NVIDIA L4")),
        ("8 × NVIDIA L4", (8, "NVIDIA L4")),
        ("NVIDIA L4 x2", (2, "NVIDIA L4")),
        ("NVIDIA L4 (4 GPUs)", (4, "NVIDIA L4")),
    ],
)
def test_several_cards_are_counted(device, expected):
    assert cards(device) == expected


BAD_TABLES = [
    ("", "there is no table in it"),
    ("no table here\n", "there is no table in it"),
    ("| a | b |\n|---|---|\n| 1 | 2 |\n", "there is no table in it"),
    (
        "| Model | Runtime (ms) |\n|  | Measured | Estimated | Measured |\n| a | 1 | 2 | 3 |\n",
        "they do not agree",
    ),
    (
        "| Model | Mood (good) |\n|  | Measured | Estimated |\n| a | 1 | 2 |\n",
        "'Mood (good)' is no quantity that is known",
    ),
    (
        "| Model | Runtime (ms) |\n|  | Measured | Estimated |\n| a | 1 |\n",
        "2 cells, and the table has 3 columns",
    ),
    ("| Model | Runtime (ms) |\n|  | Measured | Estimated |\n", "the table has no rows"),
    (".. csv-table:: T\n   :file: rows.csv\n", "there is no table in it"),
    (".. csv-table:: T\n   :delim: ab\n\n   a, b\n", "there is no table in it"),
    (
        ".. list-table:: T\n\n   * - Model\n     - Time measured\n     - Time estimated\n\n"
        "   * - a\n     - 1\n",
        "line 7: 2 cells, and the table has 3 columns",
    ),
    ("=====  =====\nModel  Time\n", "there is no table in it"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_TABLES)
def test_a_table_that_is_no_table_is_one_line(text, expected):
    with pytest.raises(QuantbenchError) as caught:
        parse(text, "file.rst")
    assert expected in str(caught.value) and "file.rst" in str(caught.value)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------- the same table, written otherwise

LINES = PUBLISHED.read_text().splitlines()
CELLS = [[c.strip() for c in line.strip("|").split("|")] for line in LINES if "facebook" in line]
CELLS += [[c.strip() for c in line.strip("|").split("|")] for line in LINES if "AICross" in line]
TITLES = ["Runtime (ms)", "Memory (GB)", "Energy (J/token)", "Throughput (token/sec)"]
SIZE = "Input Sequence Size = :math:`16 \\times 1024`\n\nSingle GPU\n----------\n"
ORDER = ("Measured", "Estimated", "Error")


def written(quantities=(0, 1, 2, 3), columns=(0, 1, 2), titles=TITLES, names=ORDER, change=None):
    """The published rows as a grid of other quantities and columns; change: of (title, cell)."""
    change = change or (lambda title, cell: cell)
    rows = [
        cells[:2] + [change(titles[q], cells[2 + 3 * q + c]) for q in quantities for c in columns]
        for cells in CELLS
    ]
    head = [("Model", ()), ("Device", ())]
    head += [(titles[q], [names[c] for c in columns]) for q in quantities]
    return SIZE + grid(head, rows)


def in_seconds(title, cell):
    return f"{float(cell) / 1000:.5f}" if title == "Runtime (s)" and "%" not in cell else cell


def in_millijoules(title, cell):
    return f"{1000 * float(cell):.0f}" if "mJ" in title and "%" not in cell else cell


def in_one_heading(title, name):
    words, unit = title.split(" (")
    return f"{words} {name.lower()} ({unit}"


HEADINGS = ["Model", "Device", *(in_one_heading(title, name) for title in TITLES for name in ORDER)]


def simple():
    """reStructuredText's table without bars, its quantities underlined above their columns."""
    under = ["", "", *(ORDER * 4)]
    widths = [max(len(row[i]) + 3 for row in [under, *CELLS]) for i in range(14)]
    spans = widths[:2] + [sum(widths[i : i + 3]) + 2 for i in range(2, 14, 3)]

    def line(cells, widths):
        return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))

    rule, dashes = (" ".join(sign * width for width in wide)
                    for sign, wide in (("=", widths), ("-", spans)))  # fmt: skip
    head = [rule, line(["Model", "Device", *TITLES], spans), dashes, line(under, widths), rule]
    return SIZE + "\n".join([*head, *(line(cells, widths) for cells in CELLS), rule, "", "Text."])


def quoted(cells):
    return ", ".join(f'"{cell}"' for cell in cells)


def merged_devices(text):
    """The device stands in the first row alone."""
    head, first, rest = text.partition("NVIDIA RTX A5000")
    return head + first + rest.replace("NVIDIA RTX A5000", " " * 16)


VARIANTS = {
    "as published": PUBLISHED.read_text(),
    "quantities in another order": written(quantities=(3, 2, 1, 0)),
    "estimated before measured": written(columns=(1, 0, 2)),
    "other words": written(names=("Actual", "Predicted", "Error (%)"),
                           change=lambda title, cell: cell.removesuffix("%")),
    "seconds": written(titles=["Runtime (s)", *TITLES[1:]], change=in_seconds),
    "millijoules": written(titles=[*TITLES[:2], "Energy (mJ/token)", TITLES[3]],
                           change=in_millijoules),
    "a single row of headings": SIZE + "\n".join(
        "| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["---"] * 14, *CELLS)
    ),
    "a simple table": simple(),
    "csv-table": SIZE + f".. csv-table:: Runs\n   :header: {quoted(HEADINGS)}\n\n"
    + "\n".join(f"   {quoted(cells)}" for cells in CELLS) + "\n\nText.\n",
    "csv-table of tabs": SIZE + ".. csv-table::\n   :delim: tab\n   :header-rows: 1\n\n"
    + "\n".join("   " + "\t".join(cells) for cells in (HEADINGS, *CELLS)),
    "list-table": SIZE + ".. list-table:: Runs\n   :header-rows: 1\n   :widths: auto\n\n"
    + "\n".join("   * - " + "\n     - ".join(cells) for cells in (HEADINGS, *CELLS)),
    "a directive around the grid": SIZE.replace("Single GPU\n----------\n", "")
    + ".. table:: Single GPU\n\n" + "\n".join(f"   {line}" for line in LINES if line[:1] in "+|"),
    "the device last": "\n".join(
        line if line[:1] != "|" else "| " + " | ".join([cells[0], *cells[2:], cells[1]]) + " |"
        for line in LINES if line[:2] not in ("+-", "+=")
        for cells in [[c.strip() for c in line.strip("|").split("|")]]
    ),
    "three rows": "\n".join(line for line in LINES if "clm" not in line or "1.1b" in line),
    "devices merged": merged_devices(PUBLISHED.read_text()),
    "Windows' line ends, indented": "\r\n".join(f"   {line}" for line in LINES),
    "cells squeezed": "\n".join(
        "|".join(cell.strip() for cell in line.split("|")) if line[:1] == "|" else line
        for line in LINES
    ),
    "Markdown": SIZE + "\n".join(line for line in LINES if line[:1] == "|"),
    "words for the size": PUBLISHED.read_text().replace(
        "Input Sequence Size = :math:`16 \\times 1024`", "Batch size: 16, sequence length: 1024"
    ),
    "the card in the heading": "\n".join(
        "| " + " | ".join([cells[0], *cells[2:]]) + " |" if line[:1] == "|" else line
        for line in LINES if line[:2] != "+-" and line[:2] != "+="
        for cells in [[c.strip() for c in line.strip("|").split("|")]]
    ).replace("Single GPU", "On one NVIDIA RTX A5000"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_the_published_table_is_audited_however_it_is_written(name):
    (table,) = parse(VARIANTS[name])
    remarks = texts(table)
    throughput, energy, error = (
        remarks[next(column for column in remarks if column.startswith(words) and part in column)]
        for words, part in (
            ("Throughput", "Measured"), ("Energy", "Measured"), ("Runtime", "Error"),
        )
    )  # fmt: skip
    assert "it is microseconds per token, not tokens per second" in throughput
    assert "tokens per second are 16384 tokens ÷ 0.694 s" in throughput
    assert "230 W" in energy and "nothing was measured" in energy
    assert "it divides by the estimate" in error
    assert {row.device for row in table.rows} == {"NVIDIA RTX A5000"}


def test_one_row_that_is_wrong_does_not_hide_what_the_others_show():
    text = PUBLISHED.read_text().replace("|    693.77  ", "|   1693.77  ")
    (table,) = parse(text)
    remarks = texts(table)
    throughput = remarks["Throughput (token/sec), Measured"]
    assert "microseconds per token, not tokens per second, in 5 of 6 rows" in throughput
    assert "in facebook/opt-1.3b:" in throughput and "for facebook/opt-6.7b" in throughput
    energy = remarks["Energy (J/token), Measured"]
    assert "power limit × time ÷ tokens in 5 of 6 rows, all but facebook/opt-1.3b" in energy
    assert "in 1 row of 6 it follows from no definition" in remarks["Runtime (ms), Error"]


@pytest.mark.parametrize(
    ("figure", "wrong", "expected"),
    [("-693.77", True, "it is negative in 1 row: facebook/opt-1.3b (line 13)"),
     ("   -   ", False, "it is no number in 1 row: facebook/opt-1.3b (line 13)"),
     ("  nan  ", False, "it is no number in 1 row: facebook/opt-1.3b (line 13)")],
)  # fmt: skip
def test_a_figure_that_is_none_is_said(figure, wrong, expected):
    (table,) = parse(PUBLISHED.read_text().replace("|    693.77  ", f"|   {figure}  "))
    findings = [f for f in audit(table) if f.column == "Runtime (ms), Measured"]
    assert [(f.wrong, f.text) for f in findings] == [(wrong, expected)]
    assert "in all 5 rows" in texts(table)["Energy (J/token), Measured"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nothing here\n", "there is no table in it with the columns Measured, Estimated"),
        ("| a | b |\n| 1 | 2 |\n", "there is no table in it with the columns Measured, Estimated"),
        (
            written(titles=["Runtime (furlongs)", *TITLES[1:]]),
            "has no unit that is known; known: s",
        ),
        (written(titles=[*TITLES[:2], "Energy (cal)", TITLES[3]]), "known: j, joule"),
        (written(titles=["Joy (ms)", *TITLES[1:]]), "'Joy (ms)' is no quantity that is known"),
    ],
    ids=["text", "another table", "unit of time", "unit of energy", "quantity"],
)
def test_what_is_no_such_table_is_one_line(text, expected):
    with pytest.raises(QuantbenchError) as caught:
        for table in parse(text, "t.rst"):
            audit(table)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def one_line(titles, rows, above="Input size 16 x 1024\n\n"):
    """A table of Markdown with these titles."""
    lines = ("| " + " | ".join(cells) + " |" for cells in [titles, ["-"] * len(titles), *rows])
    return above + "\n".join(lines) + "\n"


HONEST = ["Model", "Device", "Runtime measured (ms)", "Runtime estimated (ms)", "Runtime error"]
FIGURES = [("a", 500.0, 550.0), ("b", 1000.0, 980.0), ("c", 2500.0, 2600.0)]


def honest_rows(error="{:.2%}", factor=1.0, time="{:.2f}", name="{}", device=CARD):
    return [
        [name.format(m), device, time.format(t), time.format(e), error.format((e / t - 1) * factor)]
        for m, t, e in FIGURES
    ]


@pytest.mark.parametrize("said", [{}, {"factor": 100, "error": "{:.2f}"}, {"error": "{:.4f}"}])
def test_errors_are_per_cent_or_shares_as_they_fit(said):
    (table,) = parse(one_line(HONEST, honest_rows(**said)))
    assert table.rows[0].cell("runtime").error.value == pytest.approx(0.1)
    assert audit(table) == []


def test_a_heading_that_is_error_alone_is_of_the_quantity_before_it():
    titles = [*HONEST[:4], "Error"]
    assert audit(parse(one_line(titles, honest_rows()))[0]) == []
    wrong = [[*row[:4], "77.00%"] for row in honest_rows()]
    assert "Runtime (ms), Error" in texts(parse(one_line(titles, wrong))[0])


def test_an_error_that_follows_from_nothing_has_no_others():
    rows = [[*row[:4], "77.00%"] for row in honest_rows()]
    assert texts(parse(one_line(HONEST, rows))[0])["Runtime (ms), Error"] == (
        "in 3 rows of 3 it follows from no definition: a (line 5), b (line 6), c (line 7)"
    )


def test_figures_with_an_exponent_are_read():
    (table,) = parse(one_line(HONEST, honest_rows(time="{:.4e}")))
    time = table.rows[1].cell("runtime").measured
    assert (time.value, time.half) == (1000.0, pytest.approx(0.05))
    assert audit(table) == []


@pytest.mark.parametrize(
    ("figure", "expected"), [("inf", "it is no number"), ("0.0", "it is zero")]
)
def test_a_column_without_any_figure_is_said(figure, expected):
    (table,) = parse(one_line(HONEST, [[*row[:2], figure, *row[3:]] for row in honest_rows()]))
    (finding,) = [f for f in audit(table) if f.column.endswith("Measured")]
    assert finding.text.startswith(f"{expected} in 3 rows: a (line 5)")


@pytest.mark.parametrize(
    "above",
    [
        "Sequence length 1024, batch size 16",
        "batch=16, seq_len=1024",
        "Passes are of 16 sequences of 1024 tokens",
        "Batch size: 16\n\nSequence length: 1,024",
    ],
)
def test_the_tokens_of_a_pass_are_read_however_they_are_said(above):
    (table,) = parse(one_line(HONEST, honest_rows(), f"{above}\n\n"))
    assert (table.batch, table.length) == (16, 1024)


@pytest.mark.parametrize(
    "name", ["**{}**", "[{}](https://huggingface.co/{})", "`{} <https://x.org/{}>`_", "``{}``"]
)
def test_names_are_read_without_what_adorns_them(name):
    adorned = name.replace("{}", CARD)
    rows = [[name.replace("{}", row[0]), adorned, *row[2:]] for row in honest_rows()]
    first = parse(one_line(HONEST, rows))[0].rows[0]
    assert (first.model, first.device) == ("a", CARD)


@pytest.mark.parametrize(
    ("title", "factor"), [("RUNTIME {} (MS)", 1), ("Runtime {} (milliseconds)", 1),
                          ("Runtime {} (s)", 1000)]
)  # fmt: skip
def test_units_of_time_in_other_words(title, factor):
    titles = [*HONEST[:2], title.format("measured"), title.format("estimated"), HONEST[4]]
    (table,) = parse(one_line(titles, honest_rows()))
    seconds = table.seconds(table.rows[0].cell("runtime").measured)
    assert seconds.value == pytest.approx(0.5 * factor)


def energies(title, of):
    """Measured energies of 150 to 250 W; of(joules of the pass) is what stands in the table."""
    titles = [*HONEST, f"Energy measured ({title})", f"Energy estimated ({title})"]
    rows = [
        [*row, *(f"{of((150 + 50 * i) * float(row[column]) / 1e3):.6g}" for column in (2, 3))]
        for i, row in enumerate(honest_rows())
    ]
    return parse(one_line(titles, rows))[0]


@pytest.mark.parametrize(
    ("title", "of"),
    [("J", lambda joules: joules), ("J/token", lambda joules: joules / 16384),
     ("J/sequence", lambda joules: joules / 16), ("mWh per token", lambda j: j / 3.6 / 16384)],
)  # fmt: skip
def test_energies_are_of_what_their_title_says(title, of):
    """250 W are below the card's 300; a pass has 16 sequences of 1024 tokens."""
    assert audit(energies(title, of)) == []


def test_energies_of_another_share_than_the_title_says():
    rows = [(row, float(row[2]) * 0.3) for row in honest_rows()]  # 300 W
    titles = [*HONEST, "Energy measured (J/token)", "Energy estimated (J/token)"]
    (table,) = parse(one_line(titles, [[*row, f"{joules:.2f}", ""] for row, joules in rows]))
    assert "; of the whole pass, not of a token" in texts(table)["Energy (J/token), Measured"]


def test_a_memory_that_the_card_does_not_have():
    titles = [*HONEST, "Memory measured (GB)", "Memory estimated (GB)"]
    rows = [[*row, size, "8.00"] for row, size in zip(honest_rows(), ("9.00", "47.90", "80.00"),
                                                      strict=True)]  # fmt: skip
    assert texts(parse(one_line(titles, rows))[0]) == {
        "Memory (GB), Measured": f"it is more than the 48.0 GiB of {CARD} in 1 row: c (line 7)"
    }
