"""Sizes from shapes alone, against published ones; and what --dry_run says."""

import dataclasses
import json
import re

import pytest
import torch

from quantbench import devices
from quantbench.errors import MemoryShortage
from quantbench.kv_cache.dense import DenseKVCache
from quantbench.log.config import RunConfig
from quantbench.models.formats import EMBEDDED
from quantbench.models.formats.saved import inner_tensors
from quantbench.models.llama import weight_bytes
from quantbench.models.loading import load_config, load_model
from quantbench.models.presets import PRESETS
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import SHOWN, parse
from quantbench.run.sizes import check_memory, kv_cache_bytes, size_of
from tests import seeds
from tests.programs import worked

pytestmark = pytest.mark.usefixtures("in_tmp")
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
# These formats spend less than upstream's did: at most these GB, to two decimals.
AT_MOST = {"uintx-4-64": (3.92, 4.46), "uintx-2-8": (6.61, 7.51), "sparse-marlin": (2.68, 3.05)}
MODELS = ("Llama-2-7b-chat-hf", "Meta-Llama-3-8B")


def gigabytes(model, scheme):
    return size_of(PRESETS[model], parse(scheme), CPU, torch.bfloat16).model_bytes / 1e9


@pytest.mark.parametrize("scheme", [*PUBLISHED, *AT_MOST])
def test_sizes_are_the_published_ones_or_less(scheme):
    for number, model in enumerate(MODELS):
        found = gigabytes(model, scheme)
        if scheme in AT_MOST:
            assert round(found, 2) <= AT_MOST[scheme][number]
        else:
            assert found == pytest.approx(PUBLISHED[scheme][number], rel=0.015)


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


# Bytes of a position in bfloat16, keys and values: 16 layers of 8 heads of 64
POSITION = {"dense": 2 * 16 * 8 * 64 * 2, "int8": 2 * 16 * 8 * 66, "fp8": 2 * 16 * 8 * 66}
POSITION["int4"] = 2 * 16 * 8 * (32 + 2 * 2)
LLAMA = PRESETS["Llama-3.2-1B"]
# 16 layers of (2048 + 1024) · 2048 and 2048 · 2048, 3 · 2048 · 8192 and two norms; the last norm;
# and the table, 128256 · 2048, which is the output's weight too
WEIGHTS = 2 * (16 * (2048 * (3072 + 2048 + 3 * 8192 + 2)) + 2048 + 128256 * 2048)


def memory(positions, free, architecture=LLAMA, **options):
    config = RunConfig(**options)
    return check_memory(config, architecture, parse(config.quantization), CPU, positions, free)


@pytest.mark.parametrize("kind", POSITION)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("spare", [0, 1, -1])
def test_the_largest_cache_size_it_names_does_fit_and_one_more_does_not(kind, rows, spare):
    free = WEIGHTS + rows * 777 * POSITION[kind] + spare
    options = {"kv_cache": kind, "batch_size": rows}
    with pytest.raises(MemoryShortage) as shortage:
        memory(100_000, free, **options)
    (named,) = re.findall(r"--cache_size (\d+) is the largest", str(shortage.value))
    assert int(named) == (776 if spare < 0 else 777)
    need = WEIGHTS + rows * int(named) * POSITION[kind]  # it fits to the byte
    for enough in (need, need + 1, 10 * need, None):
        assert memory(int(named), enough, **options).startswith("Weights: ")
    for positions, left in ((int(named), need - 1), (int(named) + 1, free)):
        with pytest.raises(MemoryShortage):
            memory(positions, left, **options)


def test_the_line_worked_by_hand():
    assert memory(8192, None) == "Weights: 2.47 GB; KV cache: 268.44 MB, dense, 8192 positions"
    assert memory(8192, None, kv_cache_quantization=True, batch_size=5) == (
        "Weights: 2.47 GB; KV cache: 692.06 MB, int8, 8192 positions, batch 5"
    )
    assert memory(9, None, quantization="autoquant") == "KV cache: 0.29 MB, dense, 9 positions"


@pytest.mark.parametrize(
    ("options", "free", "message"),
    [
        ({}, 4 * 10**9,
            "out of memory: weights of 2.47 GB and a KV cache of 4.29 GB for 131072 positions need "
            "6.77 GB, and cpu has 4.00 GB free; "
            f"--cache_size {(4 * 10**9 - WEIGHTS) // POSITION['dense']} is the largest that fits; "
            "--kv_cache int8 or fp8 or int4 makes it smaller"),
        ({"kv_cache": "fp8"}, 4 * 10**9, "fits; --kv_cache int4 makes it smaller"),
        ({"kv_cache": "int4"}, 3 * 10**9, " is the largest that fits"),
        ({}, 2 * 10**9, "not even the weights fit: a --quantization makes them smaller"),
        ({"batch_size": 100_000}, 4 * 10**9,
            "the weights fit, but no position of a KV cache with them"),
        ({"quantization": "autoquant"}, 10**9, "--cache_size 30517 is the largest that fits"),
    ],
)  # fmt: skip
def test_what_is_said_where_it_does_not_fit(options, free, message):
    with pytest.raises(MemoryShortage) as shortage:
        memory(131072, free, **options)
    assert message in str(shortage.value)
    assert ("makes it smaller" in str(shortage.value)) == (
        "fits" in message and "weights fit" not in message and options.get("kv_cache") != "int4"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_what_a_loaded_model_stores(tied, tmp_path):
    """A tied output that is stored as the embedding's table is, takes nothing."""
    config = json.loads((EMBEDDED / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = f"dummy:{tmp_path / 'config.json'}"
    architecture = load_config(path)
    cached = 5 * 2 * 256 * 2 * 7  # of 7 positions
    others = [name for name in SHOWN if not name.endswith(("hqq", "gptq"))]  # which take long
    for scheme in ("none", "int8wo", "embed-int8", *seeds.sample(others, 6)):
        quantizer = Quantizer(parse(scheme), CPU, torch.bfloat16)
        model = load_model(path, precision=torch.bfloat16, transform=quantizer)
        parts = [
            part
            for name, parameter in model.named_parameters()
            for part in inner_tensors(name, parameter.data).values()
        ]
        stored = {part.data_ptr(): part.nbytes for part in parts}  # weights may share memory
        need = sum(stored.values()) + cached
        size = size_of(architecture, parse(scheme), CPU, torch.bfloat16)
        with seeds.naming(scheme):
            assert size.model_bytes == weight_bytes(model)
            assert size.kernel == (", ".join(quantizer.ran) or "torch")
            assert memory(7, need, architecture, quantization=scheme)
            with pytest.raises(MemoryShortage):
                memory(7, need - 1, architecture, quantization=scheme)


def test_a_cache_that_the_model_s_heads_do_not_fit_is_not_advised():
    heads_of_80 = dataclasses.replace(LLAMA, head_dim=80)
    with pytest.raises(MemoryShortage, match="--kv_cache int8 or fp8 makes it smaller"):
        memory(131072, 5 * 10**9, heads_of_80)


def test_a_sliding_window_takes_its_window_and_no_more():
    mistral = PRESETS["Mistral-7B-v0.1"]
    window = memory(4096, None, mistral)
    assert "KV cache: 536.87 MB" in window  # 2 · 32 layers · 8 heads of 128 · 4096 · 2 bytes
    assert memory(32768, None, mistral).replace("32768", "4096") == window
    assert "268.44 MB" in memory(2048, None, mistral)
    weights = size_of(mistral, parse("none"), CPU, torch.bfloat16).memory_bytes
    free = weights + 536_870_912
    assert memory(32768, free, mistral)
    with pytest.raises(MemoryShortage, match="--cache_size 4095 is the largest"):
        memory(32768, free - 1, mistral)


def test_layers_without_the_window_take_every_position():
    mixed = dataclasses.replace(PRESETS["Mistral-7B-v0.1"], full_layers=(0, 5))
    slots = 30 * 4096 + 2 * 32768  # of 32 layers
    assert f"KV cache: {2 * 8 * 128 * 2 * slots / 1e6:.2f} MB" in memory(32768, None, mixed)
    weights = size_of(mixed, parse("none"), CPU, torch.bfloat16).memory_bytes
    free = weights + 2 * 8 * 128 * 2 * (30 * 4096 + 2 * 20000) + 1
    with pytest.raises(MemoryShortage, match="--cache_size 20000 is the largest"):
        memory(32768, free, mixed)


def dry_run(*arguments):
    return worked("generate", *arguments, "--dry_run", "--device", "cpu").stdout


def test_a_dry_run_allocates_nothing_and_lists_every_scheme(tmp_path):
    path = "dummy:Llama-2-70b-hf"
    out = dry_run("--checkpoint_path", path, "--quantization", "int4wo-64", "--cache_size", "4096")
    assert re.search(r"^parameters +68\.977 billion", out, re.M)
    assert re.search(r"^model_size +38\.65 GB as int4wo-64$", out, re.M)
    assert re.search(r"^bits per weight +4\.50 ", out, re.M)
    # 80 layers · 2 · 8 heads · 128 · 4096 positions · 2 bytes
    assert re.search(r"^KV cache +1\.342 GB for 4096 positions, batch 1$", out, re.M)
    listed = re.findall(
        r"^([\w-]+) +\S+ GB +[\d.]+ +[\d.]+ GB +(?:yes|no|-)  (?:torch|torchao|cpu|reference|bits)",
        out, re.M,
    )  # fmt: skip
    assert listed == list(SHOWN)
    assert not list(tmp_path.iterdir())  # no log


def test_a_dry_run_adds_up_and_says_what_fits(monkeypatch):
    """Llama 2 of 70 B in bfloat16: 137.95 GB of weights with its embedding, 1.342 GB of cache."""
    monkeypatch.setattr(devices, "free_memory", lambda device: 40_500_000_000)
    out = dry_run("--checkpoint_path", "dummy:Llama-2-70b-hf", "--cache_size", "4096")
    total = 2 * 68.976648192 + 1.342177280  # all parameters of two bytes, and the cache
    assert re.search(
        rf"^total +{total:.2f} GB .*: does not fit, 40.50 GB of cpu are free$", out, re.M
    )
    assert re.search(rf"^none .* {total:.2f} GB +no  ", out, re.M)
    # 38.65 GB, 0.52 GB of embedding and 1.34 GB of cache; of sparse-marlin 3.25 bits a weight
    assert re.search(r"^int4wo-64 +38.65 GB +4.50 +40.52 GB +no  ", out, re.M)
    assert re.search(r"^sparse-marlin .* yes  ", out, re.M)


def test_a_dry_run_of_autoquant_says_that_it_measures():
    assert "not known before autoquant has measured" in dry_run("--quantization", "autoquant")


def test_a_scheme_that_does_not_fit_the_model_says_why_in_its_row():
    out = dry_run("--checkpoint_path", "dummy:Qwen2.5-0.5B")  # 896 wide: no multiple of 256
    assert re.search(r"^int4wo-256 .* has in_features 896, no multiple of 256; 32 and", out, re.M)
