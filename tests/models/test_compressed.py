"""Checkpoints in compressed-tensors' formats: the package writes them, transformers reads them."""

import json
import random
import re

import pytest
import torch
from compressed_tensors import quantization as ct
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantbench import models
from quantbench.errors import CheckpointError
from quantbench.models.loading import load_config, load_model
from tests.models.hugging_face import edit_config, model, rewritten, saved
from tests.models.refused import refusal

TOKENS = torch.arange(5, 35)[None]
WEIGHTS = {
    "int8 per row": {"num_bits": 8, "strategy": "channel"},
    "int8 per tensor": {"num_bits": 8, "strategy": "tensor"},
    "int8 in groups": {"num_bits": 8, "strategy": "group", "group_size": 16},
    "int4 in groups": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "float8 per row": {"num_bits": 8, "type": "float", "strategy": "channel"},
}


def scales(weight, weights):
    """What covers the weight's largest values, in the shape of the strategy."""
    largest = 448.0 if weights.type == "float" else 2 ** (weights.num_bits - 1) - 1
    if weights.strategy == "tensor":
        return weight.abs().amax().view(1) / largest
    return weight.unflatten(1, (-1, weights.group_size or weight.shape[1])).abs().amax(2) / largest


def compress(folder, weights, layout):
    """Quantize the matrices of a folder, but for embedding, output and routers, by the package."""
    weights = ct.QuantizationArgs(**weights)
    scheme = ct.QuantizationScheme(targets=["Linear"], weights=weights, format=layout)
    compressor = BaseCompressor.get_value_from_registry(layout)
    with rewritten(folder) as tensors:
        for name in [name for name in tensors if re.search(r"(_proj|\.w\d)\.weight$", name)]:
            weight = tensors.pop(name)
            parts = {"weight": weight, "weight_scale": scales(weight, weights)}
            for kind, part in compressor.compress(parts, scheme).items():
                tensors[name.removesuffix("weight") + kind] = part.contiguous()
    how = ct.QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, quantization_status="compressed"
    )
    edit_config(folder, quantization_config=how.model_dump(mode="json"))


def read_by_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        attn_implementation="eager",
    )


def assert_gives(folder, expected):
    logits = load_model(str(folder))(TOKENS)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


LAYOUTS = {
    weights: ("naive-quantized", "float-quantized")
    if "float" in weights
    else ("naive-quantized", "int-quantized", "pack-quantized")
    for weights in WEIGHTS
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_logits_are_those_of_transformers(tmp_path, weights):
    layout = random.choice(LAYOUTS[weights])
    folder, exact = saved("llama-3", tmp_path)
    compress(folder, WEIGHTS[weights], layout)
    assert_gives(folder, read_by_transformers(folder)(TOKENS).logits)
    off = (load_model(str(folder))(TOKENS) - exact(TOKENS).logits).abs().max()
    assert off > 1e-3  # the weights were rounded indeed


@pytest.mark.parametrize("family", ["qwen-2-moe", "mixtral"])
def test_experts(tmp_path, family):
    weights = random.choice(["int8 per row", "int8 in groups"])
    folder, _ = saved(family, tmp_path)
    compress(folder, WEIGHTS[weights], "pack-quantized")
    assert_gives(folder, read_by_transformers(folder)(TOKENS).logits)


def test_what_the_package_saves_as_a_whole(tmp_path):
    """Also the embedding and the output, each in its own number of bits."""
    theirs, folder = model("qwen-2"), tmp_path / "qwen-2"
    groups = {"Linear": ct.QuantizationArgs(**WEIGHTS["int8 per row"]),
              "Embedding": ct.QuantizationArgs(**WEIGHTS["int4 in groups"])}  # fmt: skip
    ct.apply_quantization_config(
        theirs,
        ct.QuantizationConfig(
            config_groups={
                name: ct.QuantizationScheme(targets=[name], weights=weights)
                for name, weights in groups.items()
            }
        ),
        show_progress=False,
    )
    for module in theirs.modules():
        if weights := groups.get(type(module).__name__):
            module.weight_scale.data = scales(module.weight, weights)
    expected = theirs(TOKENS).logits  # of rounded weights: the package's hooks round them
    compressor = ModelCompressor.from_pretrained_model(theirs)
    compressor.compress_model(theirs)
    theirs.save_pretrained(folder)
    compressor.update_config(folder)
    assert load_file(folder / "model.safetensors")["lm_head.weight_packed"].dtype == torch.int32
    assert_gives(folder, expected)


def by_hand(folder, change):
    """A checkpoint with one matrix in int8: in its first row 3, -128 and zeros, scale 0.5 in
    bfloat16. change(tensors) is called before it is written."""
    folder, _ = saved("llama-3", folder)
    with rewritten(folder) as tensors:
        tensors[GATE] = torch.zeros(tensors[GATE].shape, dtype=torch.int8)
        tensors[GATE][0, :2] = torch.tensor([3, -128])
        tensors[f"{GATE}_scale"] = torch.full((96, 1), 0.5, dtype=torch.bfloat16)
        change(tensors)
    edit_config(folder, quantization_config=GOOD)
    return str(folder)


GATE = "model.layers.1.mlp.gate_proj.weight"
WORDS = f"{GATE}_packed"
GOOD = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def test_a_weight_worked_by_hand(tmp_path):
    folder = by_hand(tmp_path, lambda tensors: None)
    weight = load_model(folder).layers[1].feed_forward.w13.weight
    assert weight[0, :3].tolist() == [1.5, -64.0, 0.0] and weight.dtype == torch.float32


def test_schemes_apply_on_top(tmp_path):
    folder = by_hand(tmp_path / "stored", lambda tensors: None)
    plain, _ = saved("llama-3", tmp_path)
    with rewritten(plain) as tensors:
        tensors[GATE].zero_()[0, :2] = torch.tensor([1.5, -64.0])
    logits, expected = (
        models.load(str(path), quantization="int8wo")(TOKENS) for path in (folder, plain)
    )
    assert torch.equal(logits, expected)


def in_words(tensors, columns, shape=None):
    """Add codes of 4 bits, (96, columns) int32, and the shape of the matrix that they encode."""
    tensors[WORDS] = torch.ones(96, columns).int()
    if shape is not None:
        tensors[f"{GATE}_shape"] = torch.tensor(shape)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(f"{GATE}_scale"), f"tensor {GATE} is torch.int8"),
        (lambda t: t.update({f"{GATE}_scale": torch.ones(95, 1)}),
         f"{GATE}_scale is torch.float32 of shape (95, 1); the weight has 96 rows and"),
        (lambda t: t.update({f"{GATE}_scale": torch.ones(96, 5)}), "(96, 5); the weight has"),
        (lambda t: t.update({f"{GATE}_scale": torch.ones(96, 0)}), "(96, 0); the weight has"),
        (lambda t: t.update({f"{GATE}_scale": torch.ones(96, 1).int()}), "int32 of shape (96, 1)"),
        (lambda t: t.update({GATE: torch.ones(96, 64)}), "float32 of shape (96, 64); expected"),
        (lambda t: t.update({GATE: t[GATE][0].clone()}), "is torch.int8 of shape (64,); expected"),
        (lambda t: t.update({GATE: t[GATE][:95].clone(), f"{GATE}_scale": torch.ones(1)}),
         "has shape (95, 64); the config says (96, 64)"),
        (lambda t: t.update({f"{GATE}_zero_point": torch.ones(96, 1)}),
         f"{GATE}_zero_point is torch.float32 of shape (96, 1); expected is int8 of shape (96, 1)"),
        (lambda t: in_words(t, 16) or t.pop(GATE), f"has tensor {WORDS}, but not {GATE}_shape"),
        (lambda t: in_words(t, 16, [96, 64]), f"has both {GATE} and {WORDS}"),
        (lambda t: in_words(t, 15, [96, 64]) or t.pop(GATE),
         f"{WORDS} is torch.int32 of shape (96, 15); its weight_shape is [96, 64], and 4"),
        (lambda t: in_words(t, 16, 96) or t.pop(GATE),
         "its weight_shape is 96, and 4 or 8 bits a value are read"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_one_clear_line(tmp_path, change, message):
    assert message in refusal(CheckpointError, load_model, by_hand(tmp_path, change))


def changed(*path, value):
    """GOOD with another value at the end of a path of keys."""
    config = json.loads(json.dumps(GOOD))
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    "config, message",
    [
        (3, "quantization_config: its value is 3; accepted is an object"),
        ({}, "quant_method None is not read; compressed-tensors, gptq, awq, fp8, bitsandbytes"),
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not read"),
        ({"quant_method": ["gptq"]}, "quant_method ['gptq'] is not read"),
        (changed("format", value="marlin-24"), "format 'marlin-24' is not"),
        (changed("quantization_status", value="frozen"), "'frozen' is not read; compressed is"),
        (changed("kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme given is not read"),
        (changed("sparsity_config", value={"format": "sparse-24-bitmask"}), "sparsity_config give"),
        (changed("transform_config", value={"a": 1}), "transform_config given is not read"),
        (changed("moe_sparsity_config", value={"a": 1}), "'moe_sparsity_config' is not understood"),
        (changed("config_groups", value=None), "config_groups is None; accepted is an object"),
        (changed("config_groups", value={"W8A16": ["Linear"]}), "config_groups.W8A16 is ['Linear'"),
        (changed(*GROUP, "weights", value=None), "'group_0': weights is None; accepted is an obj"),
        (changed(*GROUP, "output_activations", value={"num_bits": 8}),
         "'group_0': output_activations given is not read; null is, or give the full-precision"),
        (changed(*GROUP, "format", value="mxfp6-pack-quantized"), "'mxfp6-pack-quantized' is not"),
        (changed(*GROUP, "weights", "num_bits", value=3), "num_bits 3 is not read; 8 or 4 is"),
        (changed(*GROUP, "weights", "symmetric", value=0.5), "symmetric 0.5 is not read"),
        (changed(*GROUP, "weights", "strategy", value="token"), "strategy 'token' is not read"),
        (changed(*GROUP, "weights", "block_structure", value=[128]), "block_structure is [128]; "),
        (changed(*GROUP, "weights", "actorder", value="group"), "actorder 'group' is not read"),
        (changed(*GROUP, "weights", "dynamic", value=True), "dynamic True is not read"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_read_is_one_clear_line(tmp_path, config, message):
    folder, _ = saved("llama-3", tmp_path)
    edit_config(folder, quantization_config=config)
    line = refusal(CheckpointError, load_config, str(folder))
    assert f"{folder / 'config.json'}: quantization_config" in line and message in line
