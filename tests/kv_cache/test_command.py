"""quantbench caches: a line for each kind of cache, and how it refuses wrong input."""

import json

import pytest
import torch
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.kv_cache import CACHES
from quantbench.run.bandwidth import Bandwidth
from quantbench.run.environment import DEFAULTS, GC_THRESHOLD

SMALL = (
    "caches",
    "--checkpoint_path",
    "tiny",
    "--context_depth",
    "70",
    "--rounds",
    "2",
    "--device",
    "cpu",
)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr("quantbench.bench.cache_timing.AT_LEAST", 1 << 16)


def test_every_kind_is_measured(tmp_path):
    out = CliRunner().invoke(commands, [*SMALL, "--json", str(tmp_path / "out.json")])
    assert out.exit_code == 0, out.output
    lines = out.stdout.splitlines()
    assert lines[0] == "4 heads, 4 for keys and values, head_dim 64, 70 positions, 1 rows, bfloat16"
    assert "attention runs on " in lines[1] and "GB/s" in lines[1]
    report = json.loads((tmp_path / "out.json").read_text())
    assert [kind["name"] for kind in report["kinds"]] == list(CACHES)
    assert [line.split()[0] for line in lines[3:]] == list(CACHES)
    for kind in report["kinds"]:
        cache = CACHES[kind["name"]](1, 4, 70, 64, torch.bfloat16, "meta")
        assert kind["layer_bytes"] == cache.nbytes
        assert len(kind["seconds"]) == 2 and min(kind["seconds"]) > 0
    assert len(report["read_bytes_per_s"]) == 2
    assert report["environment"]["gc_threshold"] == GC_THRESHOLD
    assert report["environment"]["variables"].items() >= DEFAULTS.items()


def test_a_kind_that_cannot_be_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("quantbench.ops.kv.INT4_GROUP", 48)
    monkeypatch.setattr("quantbench.kv_cache.int4.INT4_GROUP", 48)
    out = CliRunner().invoke(commands, list(SMALL))
    assert out.exit_code == 0, out.output
    assert "--kv_cache int4: the model's head_dim 64 is no multiple of 48" in out.stdout


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["--rounds", "0"], "--rounds takes a whole number from 1 to 2**63-1; given: '0'"),
        (
            ["--context_depth", "-5"],
            "--context_depth takes a whole number from 1 to 2**63-1; given: '-5'",
        ),
        (["--precision", "int8"], "--precision takes one of bfloat16, float16, float32"),
        (["--checkpoint_path", "nowhere"], "nowhere does not exist"),
        (["--device", "abacus"], "abacus"),
        (["--json", "/nowhere/out.json"], "No such file"),
    ],
)
def test_wrong_input_is_one_line(given, line):
    out = CliRunner().invoke(commands, [*SMALL, *given])
    assert out.exit_code != 0
    said = [text for text in out.stderr.splitlines() if not text.startswith("Filling")]
    assert len(said) == 1 and said[0].startswith("error: ") and line in said[0]


def test_reading_has_a_speed():
    assert Bandwidth(torch.device("cpu")).measure() > 0
