"""--save --format: models that transformers, compressed-tensors and gguf load with our numbers."""

import random

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantbench.log.config import RunConfig
from quantbench.models.loading import load_model
from quantbench.quantize.mixed import quantizer_of
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.spec import parse
from quantbench.run.loading import Loading
from tests.models.hugging_face import saved

TOKENS = torch.arange(5, 35)[None]


def save(path, folder, scheme, format, **options):
    """Save a model; the logits of its weights, activations not rounded."""
    config = RunConfig(
        checkpoint_path=str(path), quantization=scheme, save=str(folder), format=format,
        device="cpu", kernel="reference", **{"precision": "float32"} | options,
    )  # fmt: skip
    spec, device = parse(scheme), torch.device("cpu")
    Loading(config, spec, device).load(lambda done, total: None, lambda line: None)
    quantizer = quantizer_of(spec, device, getattr(torch, config.precision), "reference")

    def dequantized(name, module):
        layer = quantizer.quantized(name, module)
        if isinstance(getattr(layer, "weight", None), PackedWeight):
            layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        return layer

    precision = getattr(torch, config.precision)
    return load_model(str(path), precision=precision, transform=dequantized)(TOKENS)


def assert_alike(logits, expected):
    # The same weights; products are summed in another order.
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("scheme", ["int8wo", "float8wo", "int8dq-int4wo-32"])
def test_compressed_tensors(tmp_path, scheme):
    path, _ = saved(random.choice(["llama-3", "llama-3.2", "qwen-2", "llama-biased"]), tmp_path)
    expected = save(path, tmp_path / "given", scheme, "compressed-tensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "given",
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        attn_implementation="eager",
    )
    assert_alike(theirs(TOKENS).logits, expected)
    assert_alike(load_model(str(tmp_path / "given"))(TOKENS), expected)
