"""The file of a calibration, what it refuses, and when it warns."""

import dataclasses
import json

import pytest

from errors import QuantbenchError, UsageError
from estimate.calibration import (
    BandwidthPoint,
    Calibration,
    Speed,
    contradictions,
    of_this_machine,
    refuse,
)
from estimate.datasheets import find
from tests.estimate import invented
from typed_json import to_json


def test_a_file_is_read_back(tmp_path):
    calibration = invented.calibration()
    calibration.save("--json", str(tmp_path / "c.json"))
    assert Calibration.load(str(tmp_path / "c.json")) == calibration


def write(path, text):
    path.write_text(text)
    return str(path)


def without_products():
    value = to_json(invented.calibration())
    del value["products"]
    return json.dumps(value)


def damaged():
    value = to_json(invented.calibration())
    value["products"][0]["seconds"] = "fast"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("not json", "it is no JSON (line 1, column 1: Expecting value); `calibrate` writes one"),
        ("[1, 2]", "no calibration; `quantbench calibrate --json PATH` writes one"),
        (without_products(), "no calibration"),
        (
            damaged(),
            "damaged: Calibration.products[].seconds takes float; given: 'fast'; calibrate again",
        ),
        (json.dumps(to_json(invented.calibration(format=99))), "format 99, and this version reads"),
    ],
    ids=["text", "list", "other", "damaged", "format"],
)
def test_what_is_no_calibration_is_one_line(tmp_path, text, expected):
    with pytest.raises(UsageError) as caught:
        Calibration.load(write(tmp_path / "c.json", text))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Calibration.load(str(tmp_path / "none.json"))


def test_this_machine_s_calibration_is_named_where_it_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr("estimate.calibration.default_path", lambda: path)
    assert of_this_machine("cpu") is None
    invented.calibration().save("--json", str(path))
    assert of_this_machine("cpu") == invented.calibration() and of_this_machine("cuda") is None
    for text in ("not json", without_products(), damaged(), "{}"):
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            of_this_machine("cpu")
        said = str(caught.value)
        assert said.startswith(f"this machine's calibration, {path}: ") and "calibrate" in said
        assert "\n" not in said


def test_another_machine_or_version_is_said():
    calibration = invented.calibration()
    here = {"name": "Other CPU", "threads": 2}
    assert calibration.warnings(here, {"torch": "2.13.0", "torchao": "0.18.0"}) == [
        "calibrated with name Invented CPU, here Other CPU",
        "calibrated with torch 2.12.0, here 2.13.0",
    ]
    same = {"name": "Invented CPU", "threads": 2}
    assert calibration.warnings(same, calibration.versions) == []


def card(read, multiply, copy):
    calibration = invented.calibration(
        name="NVIDIA RTX A6000", bandwidth=[BandwidthPoint(2**30, read, copy)]
    )
    speed = Speed(read, multiply)
    products = [dataclasses.replace(p, speed=speed) for p in calibration.products]
    return dataclasses.replace(calibration, products=products)


@pytest.mark.parametrize(
    ("read", "multiply", "copy", "expected"),
    [
        (700e9, 120e12, 700e9, None),
        (900e9, 120e12, 700e9, "memory was read at 900 GB/s, above the datasheet's 768 GB/s"),
        (700e9, 120e12, 900e9, "memory was copied at 900 GB/s, above the datasheet's 768 GB/s"),
        (700e9, 200e12, 700e9, "bfloat16 was multiplied at 200 Tflop/s, above the datasheet's 155"),
    ],
)
def test_what_contradicts_the_datasheet_is_refused(read, multiply, copy, expected):
    calibration, sheet = card(read, multiply, copy), find("A6000")
    if expected is None:
        refuse(calibration, sheet)
        return
    with pytest.raises(QuantbenchError) as caught:
        refuse(calibration, sheet)
    assert expected in str(caught.value) and "nothing is written" in str(caught.value)


def test_a_time_of_zero_is_refused():
    calibration = invented.calibration()
    broken = [dataclasses.replace(calibration.products[0], seconds=0.0)]
    assert contradictions(dataclasses.replace(calibration, products=broken), None)
