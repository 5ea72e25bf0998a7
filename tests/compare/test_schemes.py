"""quantbench schemes: the table of schemes, and its messages for wrong input."""

import sys

import gguf

from quantbench.quantize.spec import SHOWN
from tests.programs import json_of, python, worked

ON_CPU = ("schemes", "--device", "cpu")


def test_the_command_lists_every_scheme_with_bits_and_kernel():
    done = python("-m", "quantbench", "schemes", "--device", "cpu")
    assert done.returncode == 0 and done.stderr == ""
    head, *rows = done.stdout.split("\n\n")[0].splitlines()
    assert head.split() == ["scheme", "bits/weight", "GGUF", "kernel", "in", "words"]
    assert [row[2:].split()[0] for row in rows] == [*SHOWN, "autoquant", "autoquant-int4"]
    assert all(len(row) <= 140 for row in rows if " cpu " in row)
    bits = dict(row[2:].split()[:2] for row in rows).items()
    assert bits >= {"none": "16.00", "int4wo-64": "4.50", "sparse-marlin": "3.25"}.items()
    assert ("autoquant", "measured") in bits
    assert done.stdout.splitlines()[-1].startswith("Forms: none, int8wo, int8dq, embed-int8")


def test_names_alone_need_no_torch_and_three_are_marked(monkeypatch):
    monkeypatch.setitem(sys.modules, "quantbench.compare.schemes", None)  # which imports torch
    result = worked("schemes", "--list")
    head, *rows = result.stdout.split("\n\n")[0].splitlines()
    assert head.split() == ["scheme", "GGUF", "in", "words"]
    assert [row.split()[1] for row in rows if row.startswith("*")] == ["int8wo", "fp6", "int4wo-64"]
    kinds = dict(row[2:].split()[:2] for row in rows)
    assert list(kinds) == [*SHOWN, "autoquant", "autoquant-int4"]
    assert kinds.items() >= {"none": "BF16", "uintx-3-64-hqq": "Q3_K", "bnb-int8": "Q8_0"}.items()
    assert max(map(len, rows)) <= 120


def test_a_gguf_type_has_about_as_many_bits(tmp_path):
    """llama.cpp's bits per weight, from the gguf package, are within a bit of the scheme's."""
    found, _ = json_of(tmp_path / "rows.json", *ON_CPU)
    for row in found["rows"]:
        if "bits_per_weight" in row and row["gguf"] != "-":
            values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[row["gguf"]]]
            assert abs(row["bits_per_weight"] - 8 * size / values) <= 1.01, row["scheme"]


def test_measured_quality_is_as_it_has_to_be(tmp_path):
    """1024 tokens of held-out text, in pairs: the ratios' errors are below 0.01."""
    names = "none int8wo int4wo-64 int4wo-64-hqq uintx-2-64".split()
    words = (*ON_CPU, "--measure", "--tokens", "1024", *names)
    found, result = json_of(tmp_path / "rows.json", *words)
    rows = {row["scheme"]: row for row in found["rows"]}
    assert list(rows) == names and rows["none"]["ratio"] == 1
    ratio = {name: row["ratio"] for name, row in rows.items()}
    assert abs(ratio["int8wo"] - 1) < 0.005
    assert ratio["int4wo-64-hqq"] < ratio["int4wo-64"]
    assert ratio["uintx-2-64"] > 2
    assert all(row["tokens"] == 1024 for row in rows.values())
    # 1.11 bits per byte, some 3 bytes a token: a perplexity between 6 and 12
    assert 6 < rows["none"]["perplexity"] < 12
    assert "5 of 5: uintx-2-64" in result.stderr


def test_a_scheme_the_model_cannot_take_says_why():
    words = ("--checkpoint_path", "dummy:Qwen2.5-0.5B", "int4wo-256", "int4wo-64")
    result = worked(*ON_CPU, *words)
    refused, taken = result.stdout.splitlines()[1:3]
    assert "in_features 896, no multiple of 256; 32 and 64 and 128 would fit" in refused
    assert taken.split()[:5] == ["*", "int4wo-64", "4.50", "Q4_0", "cpu"]
