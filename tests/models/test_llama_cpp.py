"""GGUF files as llama.cpp reads them: ids of every cut, and logits of every type that its quantizer
writes."""

import unicodedata

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from quantbench.models.formats import open_checkpoint
from quantbench.models.formats.gguf_tokenizer import _CUTS, _SAME
from quantbench.models.loading import load_model
from tests.models import hugging_face, llama_cpp
from tests.models.test_gguf import tokenizer_of_tiny, written
from tests.models.test_tokenizer import HARD_TEXTS
from tests.programs import ROOT

pytestmark = [pytest.mark.slow, llama_cpp.NEEDED]
TEXTS = [text for text in HARD_TEXTS if unicodedata.is_normalized("NFC", text) and "\0" not in text]
TEXTS += [
    "I'LL don't 'S 12345678 x1 1,234.5",
    "\n\n  \n a\t\t b  \r\n",
    "ſ'ſ ½² ١٢٣ Ⅷ",
    "don’t…!?!",
]


@pytest.fixture(scope="module")
def vocabulary():
    """A small vocabulary of byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, max_token_length=12)
    lines = (ROOT / "quantbench" / "quality" / "prose.txt").read_text().split("\n\n")
    tokenizer.train_from_iterator([*lines, *TEXTS * 20], trainer)
    import json

    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return [*model["vocab"], "<s>"], merges


# Mistral's own library cuts the vocabularies that are called pixtral as tekken, and llama.cpp as
# Llama's (tests/models/test_real_vocabularies.py); both programs call default a guess; 'ſ is an
# ending to OpenAI's pattern, and not to llama.cpp (tests/models/test_converter.py).
OTHERWISE = {"pixtral", "default", "gpt-4o", "llama4", "kanana2"}


@pytest.mark.parametrize("pre", sorted({*_CUTS, *_SAME} - OTHERWISE))
def test_ids_are_llama_cpps(pre, vocabulary, tmp_path):
    tokens, merges = vocabulary
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    made = hugging_face.model("llama-2", vocab_size=len(tokens))
    file = written(tmp_path / "m.gguf", made, "llama", metadata=metadata)
    tokenizer = open_checkpoint(str(file)).tokenizer(len(tokens))
    for text, ids in zip(TEXTS, llama_cpp.ids(file, TEXTS), strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


# The program's own types, and those that need statistics, are left out.
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
         "IQ4_XS", "IQ3_S", "MXFP4", "F16", "BF16")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model whose rows are as wide as a block of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    made = hugging_face.model("llama-2", vocab_size=4096, **sizes, **heads)
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            parameter.mul_(0.3)
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    return written(path, made, "llama", metadata=tokenizer_of_tiny())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_llama_cpps(kind, whole, tmp_path):
    """The other program rounds activations to 8 bits where weights are quantized."""
    file = llama_cpp.quantized(whole, kind, tmp_path / "m.gguf", "--pure")
    tokens = torch.randint(3, 4096, (40,)).tolist()
    theirs = torch.from_numpy(llama_cpp.logits(file, tokens))
    ours = load_model(str(file))(torch.tensor([tokens]))[0].float()
    error = (ours - theirs).norm() / theirs.norm()
    assert error < (0.005 if kind in ("F16", "BF16") else 0.07), error
    assert {tensor.type for tensor in open_checkpoint(str(file)).blocks.values()} >= {kind}
