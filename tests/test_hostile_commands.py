"""What refuses damaged and coinciding files, and commands whose stdout is full."""

import dataclasses
import math
import os
from pathlib import Path

import pytest

from quantbench import files
from quantbench.errors import LogError, UsageError
from quantbench.report.documents import rewritten
from quantbench.typed_json import from_json, parsed, require
from tests.test_refusals import BAD_JSON


def test_a_document_of_data_that_nothing_can_be_made_of():
    def block(words):
        raise ZeroDivisionError("float division by zero")

    marks = "<!-- readme: x a.json -->\n<!-- end -->\n"
    with pytest.raises(UsageError, match="D.md, line 1: .*: its data do not fit this table: float"):
        rewritten("D.md", marks, {"x": block})


def test_options_of_some_schemes_stay_with_those_that_take_them(tmp_path, monkeypatch):
    """One arm of the comparison is calibrated, and another has a least SQNR."""
    from quantbench.bench.arm import make_arms
    from quantbench.log.config import RunConfig

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Once upon a time\n")
    common = RunConfig(calibration_text="text.txt", min_sqnr=20.0)
    schemes = ("int8wo", "sparse-marlin-wanda", "autoquant")
    arms = make_arms(common, [f"--quantization {scheme}" for scheme in schemes])
    given = [(arm.name, arm.config.calibration_text, arm.config.min_sqnr) for arm in arms]
    assert given == [
        ("int8wo", None, 35.0),
        ("sparse-marlin-wanda", "text.txt", 35.0),
        ("autoquant", "text.txt", 20.0),
    ]
    with pytest.raises(UsageError, match="--min_sqnr is for --quantization autoquant"):
        make_arms(common, [f"--quantization {scheme}" for scheme in schemes[:2]])
    with pytest.raises(UsageError, match="arm 3, .*--min_sqnr is for --quantization autoquant; gi"):
        make_arms(RunConfig(), ["", "--quantization fp6", "--quantization int8wo --min_sqnr 20"])


# ---------------------------------------------------------------------------------- the mechanisms


NO_JSON = {name: data for name, data in BAD_JSON.items() if name != "digits"}


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_no_json_is_one_value_error(data):
    with pytest.raises(ValueError, match="^it is no JSON [(].+[)]$"):
        parsed(data)


def test_a_number_of_thousands_of_digits_is_infinite():
    """As 1e400 is: the reader of the value refuses it by its key."""
    assert parsed(BAD_JSON["digits"]) == [math.inf] and parsed(b"-" + b"9" * 400) == -math.inf


def test_measured_values_are_finite_and_above_a_limit():
    require("seconds", 1.0, None, 1e9)
    for value in (0.0, -1.0, float("nan"), float("inf"), 10**200):
        with pytest.raises(ValueError, match="seconds takes numbers above 0; given: "):
            require("seconds", 1.0, value)


def test_a_class_that_cannot_take_a_value_names_it():
    @dataclasses.dataclass
    class Even:
        number: int

        def __post_init__(self):
            if self.number % 2:
                raise UsageError(f"{self.number} is odd")

    assert from_json(Even, {"number": 2}) == Even(2)
    with pytest.raises(ValueError, match="^Even: 3 is odd$"):
        from_json(Even, {"number": 3})


def test_outputs_and_inputs_are_told_apart_by_file(tmp_path):
    (tmp_path / "a").write_text("")
    (tmp_path / "link").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "hard")
    for name in ("a", "link", "hard", "../" + tmp_path.name + "/a"):
        with pytest.raises(UsageError, match="--json and --text name the same file"):
            files.refuse_coinciding({"--json": tmp_path / "a"}, {"--text": tmp_path / name})
    files.refuse_coinciding({}, {"--text": tmp_path / "a", "--calibration": tmp_path / "a"})
    files.refuse_coinciding({"--json": tmp_path / "b", "--csv": None}, {"--text": tmp_path / "a"})


def test_a_folder_that_can_be_made(tmp_path):
    files.check_folder("--output", tmp_path / "new" / "er")
    files.check_folder("--output", tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="--output .*file/x: Not a directory"):
        files.check_folder("--output", tmp_path / "file" / "x")
    with pytest.raises(LogError, match="--output /proc/new: "):
        files.check_folder("--output", "/proc/new")
