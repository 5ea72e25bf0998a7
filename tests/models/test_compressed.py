"""Checkpoints in compressed-tensors' formats: the package writes them, transformers reads them."""

import random
import re

import pytest
import torch
from compressed_tensors import quantization as ct
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantbench.models.loading import load_model
from tests.models.hugging_face import TOKENS, assert_near, edit_config, model, rewritten, saved

WEIGHTS = {
    "int8 per row": {"num_bits": 8, "strategy": "channel"},
    "int8 per tensor": {"num_bits": 8, "strategy": "tensor"},
    "int8 in groups": {"num_bits": 8, "strategy": "group", "group_size": 16},
    "int4 in groups": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "float8 per row": {"num_bits": 8, "type": "float", "strategy": "channel"},
}


def scales(weight, weights):
    """What covers the weight's largest values, in the shape of the strategy; of blocks, any."""
    if weights.strategy == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        return torch.empty(rows, columns).uniform_(0.002, 0.004)
    largest = 448.0 if weights.type == "float" else 2 ** (weights.num_bits - 1) - 1
    if weights.strategy == "tensor":
        return weight.abs().amax().view(1) / largest
    return weight.unflatten(1, (-1, weights.group_size or weight.shape[1])).abs().amax(2) / largest


def rounded(theirs, **config):
    """The model, whose layers the package's hooks round from now on."""
    ct.apply_quantization_config(theirs, ct.QuantizationConfig(**config), show_progress=False)
    for module in theirs.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = scales(module.weight, module.quantization_scheme.weights)
    return theirs


def written(theirs, folder):
    """Write a model that is rounded, which holds codes then; what is returned undoes that."""
    compressor = ModelCompressor.from_pretrained_model(theirs)
    compressor.compress_model(theirs)
    theirs.save_pretrained(folder)
    compressor.update_config(folder)
    return compressor


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
    assert_near(load_model(str(folder))(TOKENS), expected)


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
    kinds = {"Linear": "int8 per row", "Embedding": "int4 in groups"}
    groups = {
        kind: ct.QuantizationScheme(targets=[kind], weights=ct.QuantizationArgs(**WEIGHTS[how]))
        for kind, how in kinds.items()
    }
    theirs = rounded(model("qwen-2"), config_groups=groups)
    expected = theirs(TOKENS).logits
    written(theirs, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight_packed"].dtype == torch.int32
    assert_gives(tmp_path, expected)
