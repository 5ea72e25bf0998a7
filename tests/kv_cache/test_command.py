"""quantbench caches: a line for each kind of cache."""

import json

import pytest
import torch

from quantbench.kv_cache import CACHES
from quantbench.run.environment import DEFAULTS, GC_THRESHOLD
from tests.programs import worked

SMALL = "caches --checkpoint_path tiny --context_depth 70 --rounds 2 --device cpu".split()


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr("quantbench.bench.cache_timing.AT_LEAST", 1 << 16)


def test_every_kind_is_measured(tmp_path):
    out = worked(*SMALL, "--json", tmp_path / "out.json")
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
    no_int4 = "--kv_cache int4: the model's head_dim 64 is no multiple of 48"
    assert no_int4 in worked(*SMALL).stdout
