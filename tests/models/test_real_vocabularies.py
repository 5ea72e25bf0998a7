"""Vocabularies as Mistral published them: by their own libraries, from a folder, and from the GGUF
file that llama.cpp's converter makes of it.

The vocabularies are in the package mistral-common.
"""

import json
import shutil
from pathlib import Path

import pytest

from quantbench.models.formats import open_checkpoint
from quantbench.models.tokenizer import load_tokenizer
from tests.models.converter import NEEDED, convert
from tests.models.test_tokenizer import HARD_TEXTS

TEXTS = (
    *HARD_TEXTS[:-1],  # without special tokens
    "  def f(x):\n\treturn x**2  # ½ ≠ 0.5\r\n\r\n",
    "Donaudampfschifffahrtsgesellschaft!!!???… 2026-11-29T09:06:00Z",
    "ﬁ Å ǆ ﷺ 𝔘𝔫𝔦 \u0e01\u0e33 नमस्ते ١٢٣٤ \ufeff\u200d",
    "\u2581\u2581x \u00a0 " + "a" * 99 + " " * 33 + "\n" * 9,
)


def sentencepiece(data: Path, folder: Path):
    """The folder's vocabulary, its size, and the ids of a text."""
    from sentencepiece import SentencePieceProcessor

    file = data / "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(file, folder / "tokenizer.model")
    model = SentencePieceProcessor(model_file=str(file))
    return 32768, lambda text: [model.bos_id(), *model.encode(text)], model.decode


def byte_level(data: Path, folder: Path):
    """As `sentencepiece`, by mistral-common itself; tokenizer.json is transformers' conversion."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.mistral.tokenizer import MistralConverter

    file = data / "tekken_240911.json"
    made = MistralConverter(str(file)).converted()
    # As in published folders; with a tokenizer.json, transformers ignores add_bos_token.
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = Tekkenizer.from_file(str(file))
    return 131072, lambda text: model.encode(text, bos=True, eos=False), model.decode


def test_tekken_alone_gives_its_librarys_ids(tmp_path):
    common = pytest.importorskip("mistral_common", reason="needs the package mistral-common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    file = Path(common.__file__).parent / "data" / "tekken_240911.json"
    shutil.copy(file, tmp_path / "tekken.json")
    theirs, ours = Tekkenizer.from_file(str(file)), load_tokenizer(tmp_path, 131072)
    assert (ours.bos_id, ours.eos_ids) == (1, {2})
    for text in TEXTS:
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text
    assert ours.encode_marked("[INST]a")[0] == theirs.get_special_token("[INST]")


@NEEDED
@pytest.mark.parametrize("kind", [sentencepiece, pytest.param(byte_level, marks=pytest.mark.slow)])
def test_ids_of_published_vocabularies_are_their_own_librarys(kind, tmp_path):
    common = pytest.importorskip("mistral_common", reason="needs the package mistral-common")
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    folder.mkdir()
    size, encode, decode = kind(Path(common.__file__).parent / "data", folder)
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=size, num_hidden_layers=1, num_key_value_heads=1, **tiny)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    convert(folder, file, "--outtype", "f16")
    for path in (folder, file):
        tokenizer = open_checkpoint(str(path)).tokenizer(size)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, {2})
        for text in TEXTS:
            ids = encode(text)
            assert tokenizer.encode(text) == ids, (path.name, text)
            assert tokenizer.decode(ids) == decode(ids), (path.name, text)
