"""Published rows: memory from first principles, time by constants that other rows fix."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from quantbench.compare.commands.estimate import estimate
from quantbench.errors import QuantbenchError, UsageError
from quantbench.estimate.datasheets import find
from quantbench.estimate.memory import Peak
from quantbench.estimate.published import (
    CONFIGS,
    FORM,
    FORMS,
    Counted,
    Demand,
    Form,
    chosen_without,
    counted_rows,
    fitted,
    left_out,
)
from quantbench.estimate.tables import Row, parse, read
from quantbench.estimate.validate import Case, as_json, of_results, of_tables, report

PUBLISHED = Path(__file__).parent / "published" / "published_a5000.rst"
CARD = "NVIDIA RTX A6000"


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("transformers")
    return counted_rows(read(PUBLISHED)[0], PUBLISHED.parent)


def test_memory_of_every_row_is_within_a_hundredth_of_a_gibibyte(rows):
    for row in rows:
        estimated = row.demand.peak.allocated / (1 << 30)
        assert abs(estimated - row.memory) < 0.01, row.row.model
        names = [name for name, _ in row.demand.peak.parts]
        assert names[0] == "weights" and names[-1] == "logits, and 1 more of their size"


def test_runtime_of_every_row_by_two_constants_of_the_other_rows(rows):
    for row, estimated in zip(rows, left_out(rows), strict=True):
        assert abs(estimated / row.seconds - 1) < 0.04, row.row.model


def test_with_the_form_chosen_by_the_other_rows_too_the_mean_error_is_below_4_per_cent(rows):
    """docs/published.md says what is chosen, and that two rows are off by more than 3.5 %."""
    assert all(row.demands[FORM] == row.demand for row in rows)
    found = chosen_without(rows)
    errors = [seconds / row.seconds - 1 for row, (seconds, _) in zip(rows, found, strict=True)]
    assert sum(map(abs, errors)) / 6 < 0.04 and max(map(abs, errors)) < 0.06
    chosen = [(form.tile, form.passes) for _, form in found]
    assert chosen == [(256, 8), (128, 8), (256, 10), (256, 8), (1, 10), (128, 8)]
    assert max(passes for _, passes in chosen) < max(form.passes for form in FORMS)


def test_a_row_has_no_part_in_its_estimate_or_in_the_choice_for_it(rows):
    before = chosen_without(rows)
    slower = [dataclasses.replace(row, seconds=1.2 * row.seconds) for row in rows[:1]]
    after = chosen_without([*slower, *rows[1:]])
    assert after[0] == before[0] and after[1] != before[1]


def test_the_form_by_which_rows_were_made_is_chosen():
    """Each form has demands of its own; seconds follow those of one of them exactly."""
    truth, rows = Form(128, 4), []
    for n, (operations, size) in enumerate([(1e12, 1e9), (5e12, 2e9), (2e12, 8e9), (9e12, 1e9),
                                            (4e12, 4e9), (3e12, 7e9)]):  # fmt: skip
        demands = {
            form: Demand(operations * (1 + (form.tile * (n + 1) % 7) / 10),
                         size * (1 + (form.passes * (n + 2) % 5) / 10), 0.0, Peak(0, 0, ()))
            for form in FORMS
        }  # fmt: skip
        seconds = 2e-14 * demands[truth].operations + 3e-12 * demands[truth].bytes
        row = Row("model", "NVIDIA RTX A5000", {}, 1)
        rows.append(Counted(row, 1, seconds, None, demands[FORM], None, demands))
    for row, (seconds, form) in zip(rows, chosen_without(rows), strict=True):
        assert seconds == pytest.approx(row.seconds) and form == truth
    assert chosen_without(rows[:4]) == [None] * 4


def test_the_constants_are_below_the_datasheet(rows):
    constants, sheet = fitted(rows), find("NVIDIA RTX A5000")
    assert 0.5 < 1 / constants.per_operation / sheet.peak("float16") < 1
    assert 0.5 < 1 / constants.per_byte / sheet.bandwidth < 1
    assert constants.residual < 0.03


def test_the_configs_that_are_known_are_those_beside_the_table(rows):
    alone = counted_rows(read(PUBLISHED)[0])
    assert [row.demand for row in alone] == [row.demand for row in rows]
    assert {row.row.model.split("/")[1] for row in rows} <= set(CONFIGS)


def made(device, operations, size, seconds):
    row = Row("model", device, {}, 1)
    return Counted(row, 1, seconds, None, Demand(operations, size, 0.0, Peak(0, 0, ())))


def test_constants_are_those_that_made_the_rows():
    shapes = [(1e12, 1e9), (5e12, 2e9), (2e12, 8e9), (9e12, 1e9)]
    rows = [made("NVIDIA RTX A5000", f, b, 2e-14 * f + 3e-12 * b) for f, b in shapes]
    constants = fitted(rows)
    assert constants.per_operation == pytest.approx(2e-14)
    assert constants.per_byte == pytest.approx(3e-12)
    assert left_out(rows) == pytest.approx([row.seconds for row in rows])
    # Cards of one kind go by their power limits, others by their peaks: 154.8 TFLOPS at 300 W for
    # 111.1 at 230 W; 989.4 of the H100, which has three times the peak for a watt.
    alike = constants.on(find("NVIDIA RTX A6000"))
    assert alike.per_operation == pytest.approx(2e-14 * 230 / 300)
    assert alike.per_byte == pytest.approx(3e-12)
    other = constants.on(find("H100"))
    assert other.per_operation == pytest.approx(2e-14 * 111.1 / 989.4)
    assert other.per_byte == pytest.approx(3e-12 * 768 / 3350)


def test_rows_that_fix_no_constants_are_refused():
    one = made("NVIDIA RTX A5000", 1e12, 1e9, 1.0)
    with pytest.raises(QuantbenchError, match="3 or more measured rows of one card"):
        fitted([one, one])
    with pytest.raises(
        QuantbenchError, match="3 or more measured rows of one card; given are 4 of 2"
    ):
        fitted([one, one, one, made("NVIDIA L4", 1e12, 1e9, 1.0)])
    assert left_out([one, one]) == [None, None]


# ---------------------------------------------------------------------------------- validate


def test_errors_by_both_denominators():
    case = Case("m", "d", "g", True, {"runtime": 0.8}, {"runtime": 1.0})
    assert case.error("runtime") == pytest.approx(0.25)
    assert case.error("runtime", by_estimate=True) == pytest.approx(0.2)
    text = report([case])
    assert "+25.00%" in text and "+20.00%" in text
    assert "mean |error| 25.00% ÷ measured, 20.00% ÷ estimated" in text


def test_results_in_json_are_cases(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(
        '{"device": "here", "cases": [{"model": "a", "kind": "token", "measured_seconds": 2,'
        ' "estimated_seconds": 1.9}, {"model": "b", "measured_bytes": 4e9, "estimated_bytes": 5e9,'
        ' "held_out": false}, {"model": "c", "measured_seconds": 1}]}'
    )
    first, second = of_results(path)
    assert (first.model, first.device, first.group, first.held_out) == ("a", "here", "token", True)
    assert first.error("runtime") == pytest.approx(-0.05)
    assert second.error("memory") == pytest.approx(0.25) and not second.held_out


def test_rows_of_another_card_are_predicted_and_held_out(rows):
    cases = of_tables([PUBLISHED], "NVIDIA RTX A6000")
    held = [case for case in cases if case.held_out]
    assert len(cases) == 24 and len(held) == 18
    predicted = {case.model: case for case in held if case.device == "NVIDIA RTX A6000"}
    large = predicted["facebook/opt-6.7b"]
    assert not large.measured and set(large.estimated) == {
        "runtime",
        "memory",
        "energy",
        "throughput",
    }
    measured = next(row for row in rows if row.row.model == large.model)
    assert 1.2 < measured.seconds / large.estimated["runtime"] < 1.4
    assert "energy" not in cases[0].measured  # power limit × time is no measurement


def test_the_committed_prediction_of_the_a6000_is_what_the_table_gives():
    pytest.importorskip("transformers")
    path = Path(__file__).parents[2] / "docs" / "data" / "rtx_a6000_predicted.json"
    committed, cases = json.loads(path.read_text()), as_json(of_tables([PUBLISHED], CARD))
    assert len(committed) == len(cases) == 24
    assert sum(case["device"] == CARD for case in committed) == 6
    for case, anew in zip(committed, cases, strict=True):
        assert case.keys() == anew.keys()
        for key, value in case.items():
            same = value if isinstance(value, str | bool) else pytest.approx(value, rel=1e-6)
            assert anew[key] == same, (case["model"], key)


# ---------------------------------------------------------------------------------- the command


def run(*arguments):
    return CliRunner().invoke(estimate, list(map(str, arguments)))


def test_audit_prints_what_is_wrong():
    result = run("audit", PUBLISHED)
    assert result.exit_code == 0, result.output
    assert "Single GPU: 6 rows, 7 things wrong" in result.output
    assert "= 23,616 for facebook/opt-1.3b" in result.output


def test_validate_writes_the_table(tmp_path):
    pytest.importorskip("transformers")
    rst, json_path = tmp_path / "out.rst", tmp_path / "out.json"
    result = run("--validate", PUBLISHED, "--rst", rst, "--json", json_path)
    assert result.exit_code == 0, result.output
    assert rst.read_text() == result.output
    assert "Held out\n" in result.output and "Calibrated on\n" in result.output
    assert len(of_results(json_path)) == 18


@pytest.mark.parametrize("name", ["opt-1.3b", "clm-60m"])
def test_a_pass_by_published_rows_is_estimated_as_they_are(rows, tmp_path, name):
    """The command, in time and memory: on the card of the table, and on one made alike."""
    measured = next(row for row in rows if row.row.model.endswith(name))
    seconds = {}
    for device in ("NVIDIA RTX A5000", "NVIDIA RTX A6000"):
        path = tmp_path / f"{device}.json"
        result = run(
            *("--checkpoint_path", PUBLISHED.parent / f"{name}.json", "--device", device),
            *("--calibration", PUBLISHED, "--batch_size", 16, "--sequence_length", 1024),
            *("--json", path),
        )
        assert result.exit_code == 0, result.output
        found = json.loads(path.read_text())
        seconds[device] = found["prompt_seconds"]["value"]
        assert found["peak_memory_bytes"]["value"] == measured.demand.peak.allocated
        assert found["tokens_per_second"]["value"] == pytest.approx(16384 / seconds[device])
    assert seconds["NVIDIA RTX A5000"] == pytest.approx(fitted(rows).seconds(measured.demand))
    ratio = seconds["NVIDIA RTX A5000"] / seconds["NVIDIA RTX A6000"]
    assert 1 < ratio < 300 / 230


BAD = [
    ((), "nothing is given"),
    (("audit",), "takes published tables (.rst, .md); none is given"),
    (("audit", "none.rst"), "none.rst"),
    (("something",), "given: 'something'"),
    (("audit", str(PUBLISHED), "--device", "L4"), "takes files alone"),
    (("--validate", "none.json"), "none.json"),
    (("--validate", str(PUBLISHED), "--device", "A600"), "no datasheet; nearest: NVIDIA RTX A6000"),
    (("--validate", __file__, "--device", "L4"), "give one (.rst, .md)"),
    (("--validate", __file__), "it is neither JSON nor JSON lines"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD)
def test_bad_input_is_one_line(arguments, expected):
    result = run(*arguments)
    assert isinstance(result.exception, QuantbenchError), result.output
    assert expected in str(result.exception) and "\n" not in str(result.exception)


@pytest.mark.parametrize("place", ["a.json", "a/config.json", "org/a/config.json", "org--a.json"])
def test_configs_beside_a_table_lie_in_any_of_the_usual_places(tmp_path, place):
    pytest.importorskip("transformers")
    fields = CONFIGS["clm-60m"] | {"num_hidden_layers": 1, "vocab_size": 1000}
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(json.dumps(fields))
    lines = PUBLISHED.read_text().splitlines()
    text = "\n".join(line for line in lines if line[:3] != "| f" and "/clm-" not in line)
    row = next(line for line in lines if "clm-60m" in line).replace("AICrossSim/clm-60m", "org/a")
    (one,) = counted_rows(parse(f"{text}\n{row}")[0], tmp_path)
    # An embedding and an output of 1000 × 384, and a layer.
    layer = 384 * 384 * 2 + 2 * 384 * 128 + 3 * 384 * 1408 + 2 * 384
    weights = dict(one.demand.peak.parts)["weights"]
    assert weights == pytest.approx(2 * (2 * 1000 * 384 + layer + 384), rel=0.01)


def test_a_published_llama_needs_no_config():
    pytest.importorskip("transformers")
    text = PUBLISHED.read_text().replace("facebook/opt-1.3b  ", "TinyLlama-1.1B-Chat-v1.0")
    (first, *_) = counted_rows(parse(text)[0])
    weights = dict(first.demand.peak.parts)["weights"]
    assert weights == pytest.approx(2 * 1_100_048_384, rel=0.01)


def test_a_model_without_a_config_is_one_line():
    text = PUBLISHED.read_text().replace("facebook/opt-1.3b", "facebook/opt-xyz ")
    with pytest.raises(QuantbenchError, match="put its config.json beside the table, as opt-xyz"):
        counted_rows(parse(text)[0], PUBLISHED.parent)


def changed(tmp_path, *changes, more=""):
    text = PUBLISHED.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "table.rst"
    path.write_text(text + more)
    return path


def rows_of(text, *changes):
    """The table's rows once more, changed."""
    lines = text.splitlines()[12:]
    for old, new in changes:
        lines = [line.replace(old, new) for line in lines]
    return "\n".join(lines) + "\n"


def test_rows_of_several_cards_are_not_estimated_as_one(tmp_path):
    more = rows_of(PUBLISHED.read_text(), ("| NVIDIA RTX A5000 ", "| 2 x NVIDIA RTX A5000 "))
    cases = of_tables([changed(tmp_path, more=more)])
    two = [case for case in cases if case.device.startswith("2 x")]
    assert len(two) == 6 and not any(case.estimated for case in two)
    assert two[0].group == "2 x NVIDIA RTX A5000: several cards, not estimated"
    assert two[0].measured["runtime"] == pytest.approx(0.69377)


A6000_ROWS = (" NVIDIA RTX A5000 ", f" {CARD} ")


def test_a_card_with_rows_of_its_own_is_predicted_by_those_of_another(tmp_path):
    """In whichever order they stand: constants that are fitted to a card's rows predict none."""
    text = PUBLISHED.read_text()
    own = rows_of(text, A6000_ROWS, ("    693.77  ", "    555.55  "))
    head, first = "\n".join(text.splitlines()[:12]) + "\n", rows_of(text)
    for order in (first + own, own + first):
        path = tmp_path / "both.rst"
        path.write_text(head + order)
        cases = [case for case in of_tables([path], CARD) if case.device == CARD]
        assert len(cases) == 6 and all(case.held_out and case.measured for case in cases)
        assert {case.group for case in cases} == {f"{CARD}, by the datasheets' ratio"}
        assert cases[0].estimated["runtime"] == pytest.approx(0.5562, rel=1e-3)


def test_a_card_is_not_predicted_by_its_own_rows(tmp_path):
    path = changed(tmp_path, A6000_ROWS)
    assert {case.device for case in of_tables([path])} == {CARD}
    with pytest.raises(UsageError) as caught:
        of_tables([path], CARD)
    assert str(caught.value).startswith(
        f"--device {CARD}: the table has enough rows of no other card to predict it by; leave "
    )


def test_a_table_in_markdown_is_one_for_validate_and_calibration(tmp_path):
    text = PUBLISHED.read_text()
    lines = ["Input Sequence Size = 16 x 1024", ""]
    lines += [line for line in text.splitlines() if line.startswith("|")]
    path = tmp_path / "table.md"
    path.write_text("\n".join(lines) + "\n")
    result = run("--validate", path)
    assert result.exit_code == 0 and "each row left out of its fit" in result.output
    result = run("--calibration", path, "--device", CARD, "--checkpoint_path",
                 PUBLISHED.parent / "clm-60m.json")  # fmt: skip
    assert result.exit_code == 0 and "table.md: 6 rows of NVIDIA RTX A5000" in result.output


def test_rows_of_a_card_without_a_datasheet_say_so(tmp_path):
    more = rows_of(PUBLISHED.read_text(), ("NVIDIA RTX A5000", "Foo 9000"))
    cases = of_tables([changed(tmp_path, more=more)])
    (case,) = [c for c in cases if c.device == "Foo 9000" and c.model == "facebook/opt-1.3b"]
    assert case.group == "Foo 9000, of which there is no datasheet"
    assert "runtime" not in case.estimated


def test_measured_energies_of_one_card_stay_where_those_of_another_were_not_measured(tmp_path):
    """The A6000's rows have powers from 180 W to 255; all of the A5000's have its limit."""
    rows = []
    for number, line in enumerate(rows_of(PUBLISHED.read_text()).splitlines()[::2]):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        cells[1] = "NVIDIA RTX A6000"
        joules = (180 + 15 * number) * float(cells[2]) / 1e3 / 16384
        cells[8:11] = [f"{joules:.6f}", cells[9], ""]
        rows += ["| " + " | ".join(cells) + " |", PUBLISHED.read_text().splitlines()[11]]
    path = changed(tmp_path, more="\n".join(rows) + "\n")
    measured = {case.device: case.measured.get("energy") for case in of_tables([path])}
    assert measured["NVIDIA RTX A5000"] is None
    assert measured["NVIDIA RTX A6000"] == pytest.approx(255 * 0.74717 / 16384, rel=1e-3)
    result = run("--validate", str(path))
    assert "Energies that a table calls measured are left out for NVIDIA RTX A5000:" in (
        result.output
    )


def test_energies_of_a_pass_are_divided_by_its_tokens(tmp_path):
    """Joules of a pass, at 140 W and more."""
    lines = PUBLISHED.read_text().replace("Energy (J/token)", "Energy (J)      ").splitlines()
    for number, at in enumerate(range(12, len(lines), 2)):
        cells = lines[at].strip("|").split("|")
        cells[8:11] = [f" {(140 + 10 * number) * float(cells[2]) / 1e3:.2f} ", "", ""]
        lines[at] = "|" + "|".join(cells) + "|"
    (tmp_path / "table.rst").write_text("\n".join(lines) + "\n")
    cases = of_tables([tmp_path / "table.rst"])
    assert cases[0].measured["energy"] == pytest.approx(140 * 0.69377 / 16384, rel=1e-3)


def test_a_row_of_means_is_no_model(tmp_path):
    cells = ["Mean error", "", *["", "", "5.6%"] * 4]
    more = "| " + " | ".join(cells) + " |\n"
    assert len(of_tables([changed(tmp_path, more=more)])) == len(of_tables([PUBLISHED]))


def test_a_negative_runtime_is_none(tmp_path):
    cases = of_tables([changed(tmp_path, ("    693.77  ", "   -693.77  "))])
    first = [case for case in cases if case.model == "facebook/opt-1.3b"]
    assert not any("runtime" in case.measured for case in first)
    assert all(case.estimated.get("runtime", 1) > 0 for case in first)


def test_a_row_that_stands_twice_is_left_out_twice(rows):
    again = [dataclasses.replace(row) for row in rows]
    assert left_out([*rows, *again])[: len(rows)] == pytest.approx(left_out(rows))
