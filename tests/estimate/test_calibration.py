"""The file of a calibration, what it refuses, and when it warns."""

import dataclasses
import json
import math

import pytest

from quantbench.errors import QuantbenchError, UsageError
from quantbench.estimate import calibration_file
from quantbench.estimate.calibration import (
    BandwidthPoint,
    Power,
    Speed,
)
from quantbench.estimate.calibration_file import of_this_machine
from quantbench.estimate.datasheets import find
from quantbench.estimate.plausible import contradictions, refuse
from quantbench.typed_json import to_json
from tests.estimate import invented


def test_a_file_is_read_back(tmp_path):
    calibration = invented.calibration()
    calibration.save("--json", str(tmp_path / "c.json"))
    assert calibration_file.load(str(tmp_path / "c.json")) == calibration


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
        calibration_file.load(write(tmp_path / "c.json", text))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


IMPOSSIBLE = [
    (("precision",), "fast", "precision takes bfloat16,"),
    (("device", "type"), "toaster", "the device's type takes cpu, cuda"),
    (("device", "name"), "a\nb\x1b[31m", "the device's name takes printable text"),
    (("rest",), [], "it has no rest"),
    (("wholes", 0, "model"), "bogus", "model of a WholePoint takes narrow,"),
    (("wholes", 0, "kv_cache"), "float3", "kv_cache of a WholePoint takes dense,"),
    (("wholes", 0, "depth"), -5, "depth of a WholePoint takes numbers above -1; given: -5"),
    (("wholes", 0, "rows"), 0, "rows of a WholePoint takes numbers above 0; given: 0"),
    (("products", 0, "bytes"), 0, "bytes of a ProductPoint takes numbers above 0"),
    (("products", 0, "speed", "read"), -1.0, "read of the speed beside a ProductPoint takes"),
    (("base_bytes",), -(10**12), "base_bytes takes numbers from 0"),
    (("memory_bytes",), 0, "memory_bytes takes numbers above 0"),
    (("power",), to_json(Power(math.nan, None, None, None)), "watts of the power limit takes"),
    (("power",), to_json(Power(9.0, "RAPL", -3.0, 2.0)), "watts takes numbers from 0; given: -3"),
]


@pytest.mark.parametrize(("path", "value", "expected"), IMPOSSIBLE)
def test_what_no_machine_is_measured_to_be_is_one_line(tmp_path, path, value, expected):
    content = to_json(invented.calibration())
    *folders, last = path
    inside = content
    for key in folders:
        inside = inside[key]
    inside[last] = value
    with pytest.raises(UsageError) as caught:
        calibration_file.load(write(tmp_path / "c.json", json.dumps(content)))
    said = str(caught.value)
    assert f"c.json: damaged: {expected}" in said and "\n" not in said
    assert said.endswith("; calibrate again")


@pytest.mark.parametrize(("kind", "has"), [("prompts", 1), ("steps", 128)])
def test_a_calibration_without_steps_or_prompts_is_refused(tmp_path, kind, has):
    whole = invented.calibration()
    some = dataclasses.replace(whole, wholes=[p for p in whole.wholes if p.tokens == has])
    some.save("--json", str(tmp_path / "c.json"))
    with pytest.raises(UsageError, match=f"it has no {kind} among its wholes"):
        calibration_file.load(str(tmp_path / "c.json"))


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        calibration_file.load(str(tmp_path / "none.json"))


def test_this_machine_s_calibration_is_named_where_it_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr("quantbench.estimate.calibration_file.default_path", lambda: path)
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


def test_readings_beside_products_and_products_themselves_are_held_against_the_datasheet():
    calibration, sheet = card(700e9, 120e12, 700e9), find("A6000")
    fast = dataclasses.replace(calibration.products[0].speed, read=5e12)
    beside = [dataclasses.replace(p, speed=fast) for p in calibration.products]
    (said,) = contradictions(dataclasses.replace(calibration, products=beside, wholes=[]), sheet)
    assert "memory was read beside products and steps at 5000 GB/s" in said
    short = [dataclasses.replace(p, seconds=1e-9) for p in calibration.products]
    (said,) = contradictions(dataclasses.replace(calibration, products=short), sheet)
    assert "bfloat16 was multiplied at" in said and "above the datasheet's 155" in said


def test_a_time_of_zero_is_refused():
    calibration = invented.calibration()
    broken = [dataclasses.replace(calibration.products[0], seconds=0.0)]
    assert contradictions(dataclasses.replace(calibration, products=broken), None)
