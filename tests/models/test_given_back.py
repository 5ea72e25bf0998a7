"""--save --format: models that transformers, compressed-tensors and gguf load with our numbers."""

import random
import shutil

import gguf
import pytest
import torch
from torch import nn

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.models.formats import EMBEDDED, open_checkpoint, saver
from quantbench.models.formats.base import NotSaved
from quantbench.models.formats.gguf_file import GgufFile
from quantbench.models.loading import load_model
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.registry import quantizer_of
from quantbench.quantize.spec import parse
from quantbench.run import loading
from quantbench.run.plan import make_plan
from tests.models.hugging_face import TOKENS, assert_near, read_by_transformers, saved
from tests.models.tiny_tokenizers import llama_3_json, write_folder
from tests.run.test_loading import load


def save(path, folder, scheme, format, precision="float32"):
    """Save a model; the logits of its weights, activations not rounded."""
    how = {"save": str(folder), "format": format, "precision": precision}
    load(checkpoint_path=str(path), quantization=scheme, **how)
    dtype = getattr(torch, precision)
    quantizer = quantizer_of(parse(scheme), torch.device("cpu"), dtype, "auto")

    def dequantized(name, module):
        layer = quantizer.quantized(name, module)
        if isinstance(getattr(layer, "weight", None), PackedWeight):
            layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        return layer

    return load_model(str(path), precision=dtype, transform=dequantized)(TOKENS)


def save_as_is(path, folder, format, precision="float16"):
    config = RunConfig(checkpoint_path=str(path), save=str(folder), format=format, device="cpu",
                       precision=precision, num_samples=1, max_new_tokens=1,
                       prefill_size=2)  # fmt: skip
    loading.load(make_plan(config), lambda done, total: None, lambda line: None)


def assert_gives(folder, expected, precision=torch.float32):
    assert_near(load_model(str(folder), precision=precision)(TOKENS), expected)


@pytest.mark.parametrize("scheme", ["int8wo", "float8wo", "int8dq-int4wo-32"])
def test_compressed_tensors(tmp_path, scheme):
    families = ["llama-3", "llama-3.2", "qwen-2", "llama-biased", "mixtral", "qwen-3-moe"]
    path, _ = saved(random.choice(families), tmp_path)
    expected = save(path, tmp_path / "given", scheme, "compressed-tensors")
    theirs = read_by_transformers(tmp_path / "given", compressed=True)
    assert_near(theirs(TOKENS).logits, expected)
    assert_gives(tmp_path / "given", expected)


def test_torchao(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "SHARD_BYTES", random.choice((1 << 15, 1 << 29)))
    family = random.choice(["llama-3", "llama-3.2", "qwen-2", "llama-biased"])
    path, _ = saved(family, tmp_path)
    expected = save(path, tmp_path / "given", "int8wo", "torchao")
    theirs = read_by_transformers(tmp_path / "given")
    assert type(theirs.model.layers[1].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert type(theirs.lm_head.weight).__name__ == "Int8Tensor"
    assert_near(theirs(TOKENS).logits, expected)
    assert_gives(tmp_path / "given", expected)


@pytest.mark.parametrize("scheme", ["none", "int8dq-int4wo-32"])
def test_gguf(tmp_path, scheme):
    """gguf's own reader gives each tensor as ours does; a Llama's logits are the same."""
    family = random.choice(["llama-3", "llama-2", "mixtral", "qwen-3-moe"])
    path, _ = saved(family, tmp_path)
    precision = random.choice(["bfloat16", "float16", "float32"])
    expected = save(path, tmp_path / "given", scheme, "gguf", precision=precision)
    file = tmp_path / "given" / "given.gguf"
    assert_gives(file, expected, getattr(torch, precision))
    for tensor in gguf.GGUFReader(file).tensors:
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
        ours = GgufFile(file).tensors[tensor.name].read().float()
        assert torch.equal(ours, torch.from_numpy(theirs).reshape(ours.shape)), tensor.name


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece by class", "byte-level BPE"])
def test_gguf_keeps_the_tokenizer(tmp_path, kind):
    path = tmp_path / "source"
    shutil.copytree(EMBEDDED, path)
    if kind == "sentencepiece by class":  # neither BOS nor a space in front
        notes = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}
        write_folder(path, {"tokenizer_config.json": notes})
    if kind == "byte-level BPE":
        (path / "tokenizer.model").unlink()
        notes = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
        files = {"tokenizer.json": llama_3_json(), "tokenizer_config.json": notes}
        write_folder(path, files)
    save(path, tmp_path / "given", "int8dq-int4wo-32", "gguf")
    mine = open_checkpoint(str(path)).tokenizer(4096)
    theirs = open_checkpoint(str(tmp_path / "given")).tokenizer(4096)
    text = "def f(x):\n    return 'é \u4e2d' + hello 12345  "
    assert theirs.encode(text) == mine.encode(text) and theirs.eos_ids <= mine.eos_ids
    assert theirs.decode(mine.encode(text)) == mine.decode(mine.encode(text))


def test_what_is_kept_as_it_is(tmp_path):
    """Q4_0 and Q8_0 go back as they came; a folder in groups of 32 with float16 scales, too."""
    scheme = "int8dq-int4wo-32"
    expected = save("tiny", tmp_path / "q4", scheme, "gguf", precision="float16")
    save("tiny", tmp_path / "folder", scheme, "compressed-tensors", precision="float16")
    for source, copy in (("q4/q4.gguf", "again"), ("folder", "other")):
        save_as_is(tmp_path / source, tmp_path / copy, "gguf")
        assert_gives(tmp_path / copy, expected, torch.float16)
    save("tiny", tmp_path / "rows", "int8wo", "compressed-tensors")
    expected = load_model(str(tmp_path / "rows"))(TOKENS)
    for format in ("compressed-tensors", "torchao"):
        save_as_is(tmp_path / "rows", tmp_path / format, format, precision="float32")
        assert_gives(tmp_path / format, expected)
    with pytest.raises(UsageError, match="does not hold the numbers of w4a16"):
        save_as_is(tmp_path / "folder", tmp_path / "no", "torchao")
    with pytest.raises(UsageError, match="does not hold the numbers of w8a16"):
        save_as_is(tmp_path / "rows", tmp_path / "no", "gguf")
    assert not (tmp_path / "no").exists()


def test_scales_that_float16_does_not_hold(tmp_path):
    path, theirs = saved("llama-2", tmp_path)
    with torch.no_grad():
        theirs.model.layers[1].mlp.down_proj.weight.mul_(2.0**-20)
    theirs.save_pretrained(path)
    with pytest.raises(NotSaved, match="blk.1.ffn_down.weight: float16 does not hold its scales"):
        save(path, tmp_path / "given", "int8dq-int4wo-32", "gguf")
    assert not (tmp_path / "given").exists()
