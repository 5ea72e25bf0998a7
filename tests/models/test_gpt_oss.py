"""gpt-oss' experts in mxfp4: OpenAI's layout, against the floats that transformers makes of it."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantbench import models
from quantbench.errors import CheckpointError
from quantbench.generate import Generator
from quantbench.models.formats import open_checkpoint
from quantbench.models.formats.given_back import CompressedTensorsSaver
from quantbench.models.formats.hugging_face import read_config
from quantbench.models.loading import load_model
from tests.models.hugging_face import assert_near, edit_config, rewritten
from tests.models.refused import refusal
from tests.models.test_families import LENGTH, made

CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@pytest.fixture
def folder(tmp_path):
    """A folder in mxfp4, and transformers' model of the same numbers."""
    theirs = made("gpt_oss")
    theirs.save_pretrained(tmp_path)
    with rewritten(tmp_path) as tensors:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            theirs.get_parameter(name).data = weight.contiguous()
    edit_config(tmp_path, quantization_config=CONFIG)
    return tmp_path, theirs


def test_the_logits_are_hugging_faces(folder, tmp_path):
    path, theirs = folder
    tokens = torch.randint(96, (2, LENGTH))
    expected = theirs(tokens).logits
    saved = open_checkpoint(str(path)).saved
    quantized = {name: scheme for name, (scheme, _) in saved.layers.items() if scheme != "none"}
    assert saved.label == "mxfp4" and len(quantized) == 3 * 6 * 2
    of_one_group = "stored-fp4-4-0-e8m0-none"  # where experts are 32 wide
    assert set(quantized.values()) <= {"stored-fp4-4-32-e8m0-none", of_one_group}
    for ours in (load_model(str(path)), models.load(str(path), precision=torch.float32)):
        logits = Generator(ours, 2, LENGTH).forward(tokens, 0)
        assert_near(logits, expected)


def test_other_programs_folders_are_not_written(folder):
    reason = CompressedTensorsSaver.refuses(open_checkpoint(str(folder[0])))
    assert "are separated or renamed here, and not put back" in reason


DOWN = "model.layers.1.mlp.experts.down_proj"
SINKS = "model.layers.0.self_attn.sinks"
DAMAGED = [  # a tensor, what becomes of it, and what the message says
    (f"{DOWN}_scales", None, "experts.0.down_proj.blocks, but not"),
    (f"{DOWN}_blocks", lambda b: b[:-1], "lacks tensor model.layers.1.mlp.experts.5.down"),
    (f"{DOWN}_blocks", lambda b: b[..., :8], "any, any, 16"),
    (f"{DOWN}_scales", lambda s: s[0], "scales is torch.ui"),
    (f"{DOWN}_bias", lambda b: b[0], "down_proj.bias"),
    (f"{DOWN}_bias", lambda _: torch.ones(7, 64), "6.down_proj.bias, which the mod"),
    (SINKS, None, f"lacks tensor {SINKS}"),
]


@pytest.mark.parametrize("name, change, message", DAMAGED)
def test_what_is_damaged_is_refused(name, change, message, folder):
    path, _ = folder
    with rewritten(path) as tensors:
        tensor = tensors.pop(name)
        if change:
            tensors[name] = change(tensor).contiguous()
    assert message in refusal(CheckpointError, load_model, str(path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"quantization_config": CONFIG | {"group_size": 16}}, "key 'group_size' is not underst"),
        ({"quantization_config": 3}, "quantization_config: its value is 3; accepted is an object"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0; accepted is a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; only 'silu' is"),
        ({"model_type": "llama"}, "quant_method 'mxfp4' is read with model_type 'gpt_oss' alone"),
    ],
)
def test_configurations_that_are_refused(changes, message, folder):
    edit_config(folder[0], **changes)
    assert message in refusal(CheckpointError, read_config, folder[0] / "config.json", "name")
