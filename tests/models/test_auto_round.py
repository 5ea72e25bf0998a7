"""Folders that AutoRound itself writes, against the floats that it writes of the same numbers."""

import importlib.util
import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_model
from tests.models.hugging_face import TOKENS, saved
from tests.programs import finished

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("auto_round") is None, reason="could not import 'auto_round'"
    ),
]
# Rounding to nearest, which needs no text.
PROGRAM = """
import gc, json, sys
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
folder, exports = sys.argv[1], json.loads(sys.argv[2])
gc.freeze()  # it collects after every layer, and walks half a million objects of its imports
for name, scheme, form, options in exports:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options |= {"iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    made = AutoRound(model, tokenizer, scheme=scheme, **options)
    made.quantize_and_save(f"{folder}/{name}", format=form)
"""
GROUPS, ASYMMETRIC = {"group_size": 32}, {"group_size": 32, "sym": False}
EXPORTS = {  # scheme, format and options, the export of the same numbers in floats, and our label
    "4 bits": ("W4A16", "auto_round", GROUPS, "4 bits, floats", "gptq-4-32"),
    "4 bits, gptq": ("W4A16", "auto_gptq", GROUPS, "4 bits, floats", "gptq-4-32"),
    "4 bits, awq": ("W4A16", "auto_awq", GROUPS, "4 bits, floats", "awq-4-32"),
    "4 bits, llm_compressor": ("W4A16", "llm_compressor", GROUPS, "4 bits, floats", "w4a16-32"),
    "4 bits, floats": ("W4A16", "fake", GROUPS, None, None),
    "zeros": ("W4A16", "auto_round", ASYMMETRIC, "zeros, floats", "awq-4-32"),
    "zeros, floats": ("W4A16", "fake", ASYMMETRIC, None, None),
    "3 bits": ("W3A16", "auto_round", GROUPS, "3 bits, floats", "gptq-3-32"),
    "3 bits, floats": ("W3A16", "fake", GROUPS, None, None),
    "mxfp4": ("MXFP4", "llm_compressor", {}, None, "mxfp4"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """By its name the folder of each export."""
    folder, _ = saved("llama-2", tmp_path_factory.mktemp("auto_round"))
    tokenizer = Tokenizer(models.BPE())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    words = [(name, *described[:3]) for name, described in EXPORTS.items()]
    finished("-c", PROGRAM, folder, json.dumps(words))
    return {name: next((folder / name).rglob("config.json")).parent for name in EXPORTS}


@pytest.mark.parametrize("name", [name for name in EXPORTS if "floats" not in name])
def test_its_exports_have_its_numbers(name, exported):
    *_, floats, label = EXPORTS[name]
    logits = load_model(str(exported[name]))(TOKENS)
    assert open_checkpoint(str(exported[name])).saved.label == label
    if floats:
        assert torch.equal(logits, load_model(str(exported[floats]))(TOKENS))
    else:
        assert bool(logits.isfinite().all())
