"""Sizes from shapes alone, against published ones; and what --dry_run says."""

import re

import pytest
import torch
from click.testing import CliRunner

import generate
from kv_cache.dense import DenseKVCache
from models.config import PRESETS
from quantize.registry import SHOWN
from quantize.spec import parse
from sizes import kv_cache_bytes, size_of

CPU = torch.device("cpu")
# GB that torchao's log of 2024 shows, for Llama-2-7b and Meta-Llama-3-8B; within 1.5 %.
PUBLISHED = {
    "none": (13.21, 15.01),
    "int8wo": (6.62, 7.52),
    "int8dq": (6.62, 7.52),
    "int4wo-64": (3.74, 4.22),
    "float8wo": (6.62, 7.52),
    "float8dq-row": (6.62, 7.52),
    "float8dq-tensor": (6.62, 7.52),
    "fp6": (4.96, 5.63),
}
# These formats spend less than upstream's did: no more than so many GB, to two decimals.
AT_MOST = {
    "uintx-4-64": (3.92, 4.46),
    "uintx-2-8": (6.61, 7.51),
    "sparse-marlin": (2.68, 3.05),
}
MODELS = ("Llama-2-7b-chat-hf", "Meta-Llama-3-8B")


def gigabytes(model, scheme):
    return size_of(PRESETS[model], parse(scheme), CPU, torch.bfloat16).model_bytes / 1e9


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_sizes_are_the_published_ones(scheme):
    for model, published in zip(MODELS, PUBLISHED[scheme], strict=True):
        assert gigabytes(model, scheme) == pytest.approx(published, rel=0.015)


@pytest.mark.parametrize("scheme", AT_MOST)
def test_sizes_are_no_more_than_the_table_allows(scheme):
    for model, most in zip(MODELS, AT_MOST[scheme], strict=True):
        assert round(gigabytes(model, scheme), 2) <= most


def test_bits_per_weight_by_hand():
    """Per weight: the code's bits, and 16 for a scale and for a zero point of its group."""
    bits = {"int4wo-64": 4 + 32 / 64, "uintx-3-32": 3 + 32 / 32, "sparse-marlin": 3 + 16 / 64}
    bits |= {"mxfp4": 4 + 8 / 32, "int8dq-int4wo-32": 4 + 16 / 32, "bnb-nf4": 4 + 32 / 64}
    for scheme, expected in bits.items():
        size = size_of(PRESETS["Llama-3.2-1B"], parse(scheme), CPU, torch.bfloat16)
        assert size.bits_per_weight == pytest.approx(expected, rel=1e-6)


def test_a_kv_cache_by_hand():
    """Keys and values of 32 layers, 8 heads of 128, 131072 positions, 2 bytes: 17.18 GB."""
    cached = kv_cache_bytes(PRESETS["Meta-Llama-3.1-8B"], 1, 131072, torch.bfloat16, DenseKVCache)
    assert cached == 2 * 32 * 8 * 128 * 131072 * 2


def dry_run(*arguments):
    result = CliRunner().invoke(generate.main, [*arguments, "--dry_run", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_dry_run_allocates_nothing_and_lists_every_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "dummy:Llama-2-70b-hf"
    out = dry_run("--checkpoint_path", path, "--quantization", "int4wo-64", "--cache_size", "4096")
    assert re.search(r"^parameters +68\.977 billion", out, re.M)
    assert re.search(r"^model_size +38\.65 GB as int4wo-64$", out, re.M)
    assert re.search(r"^bits per weight +4\.50 ", out, re.M)
    # 80 layers · 2 · 8 heads · 128 · 4096 positions · 2 bytes
    assert re.search(r"^KV cache +1\.342 GB for 4096 positions, batch 1$", out, re.M)
    listed = re.findall(r"^([\w-]+) +\S+ GB +[\d.]+  (?:torch|torchao|reference|bits)", out, re.M)
    assert listed == list(SHOWN)
    assert not list(tmp_path.iterdir())  # no log


def test_a_dry_run_of_autoquant_says_that_it_measures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "autoquant measures first" in dry_run("--quantization", "autoquant")


def test_a_scheme_that_does_not_fit_the_model_says_why_in_its_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = dry_run("--checkpoint_path", "dummy:Qwen2.5-0.5B")  # 896 wide: no multiple of 256
    assert re.search(r"^int4wo-256 .* has in_features 896, no multiple of 256; 32 and", out, re.M)
