"""Quantized files read as they are: against the packages that wrote them."""

import random

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantbench import models
from quantbench.errors import UsageError
from quantbench.models.formats import open_checkpoint, packed
from quantbench.models.formats.gguf import Gguf
from quantbench.models.formats.gguf_blocks import PACKED
from quantbench.models.formats.gguf_file import GgufFile
from quantbench.models.formats.saved import inner_tensors
from quantbench.models.loading import load_model
from quantbench.ops.cpu import linear
from quantbench.ops.formats import dequantize
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.spec import Stored, parse, parse_layer, refuse_format
from tests.models import hugging_face
from tests.models.small import SMALL
from tests.models.test_gguf import blocks, logits, written
from tests.run.test_loading import load

KINDS = sorted(PACKED)


def weight(kind, rows=5, columns=512):
    """Random blocks of a type as we read them, and as the gguf package does."""
    number = gguf.GGMLQuantizationType[kind]
    data = blocks(number, rows, columns // gguf.GGML_QUANT_SIZES[number][0]).reshape(rows, -1)
    with np.errstate(over="ignore"):
        expected = gguf.dequantize(data, number)
    return PACKED[kind].read(torch.from_numpy(data)), torch.from_numpy(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_holds_the_packages_numbers(kind):
    found, expected = weight(kind)
    assert torch.equal(dequantize(found), expected)
    assert torch.allclose(dequantize(found.plain), expected, rtol=1e-5, atol=1e-5)
    name = str(PACKED[kind].form)
    spec = parse_layer(name)
    assert isinstance(spec, Stored) and str(spec) == name
    with pytest.raises(UsageError, match="is no scheme"):
        parse(name)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_out_of_packed_bytes(kind):
    found, expected = weight(kind, rows=37)
    rows = torch.randint(37, (9,))
    assert torch.equal(
        dequantize(linear.rows_of(linear.pack(found, 512), found, 512, rows)), expected[rows]
    )


@pytest.mark.parametrize("kind", ("Q8_0", "Q6_K"))
def test_a_tied_output_is_in_memory_once(kind, tmp_path):
    path = mixed(tmp_path, kind, tie_word_embeddings=True)
    floats = load_model(str(path), precision=torch.float32)
    model = models.load(str(path), precision=torch.float32)
    table, tokens = model.tok_embeddings, torch.randint(96, (2, 5))
    assert torch.equal(table(tokens), floats.tok_embeddings(tokens))
    assert torch.equal(torch.compile(table, fullgraph=True)(tokens), table(tokens))
    assert model.to(torch.bfloat16).tok_embeddings(tokens).dtype == torch.bfloat16
    packed_bytes = model.output.weight.nbytes
    assert sum(storages(table).values()) < packed_bytes + 64
    assert sum((storages(table) | storages(model.output)).values()) < packed_bytes + 64


def storages(module):
    """Bytes by address of what a module's parameters store."""
    tensors = [tensor for p in module.parameters() for tensor in inner_tensors("", p.data).values()]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def test_types_are_stacked_without_a_change():
    """wqkv of a mixed file: the first two projections are of one type, the third of another."""
    for _ in range(40):
        one, other = (KINDS[number] for number in torch.randint(len(KINDS), (2,)))
        form = packed.common([PACKED[one].form, PACKED[one].form, PACKED[other].form])
        assert form is not None
        both = [weight(one), weight(one, 3), weight(other, 7)]
        parts = [
            found if PACKED[kind].form == form else packed.widened(found, form)
            for kind, (found, _) in zip((one, one, other), both, strict=True)
        ]
        expected = torch.cat([expected for _, expected in both])
        assert torch.equal(dequantize(packed.stacked(parts)), expected), (one, other, form)


def test_a_cut_weight_keeps_its_scales():
    found, expected = weight("Q4_K", columns=1024)
    whole = PackedWeight.of(found, 1024, torch.float32)
    assert torch.equal(whole.columns_between(256, 768).dequantize(), expected[:, 256:768])
    assert torch.equal(whole.rows_of([(1, 3)]).dequantize(), expected[1:3])
    with pytest.raises(ValueError, match="cannot be cut"):
        whole.columns_between(128, 768)


MIXES = {
    "Q4_K_M": {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "": "Q4_K"},
    "legacy": {"v_proj": "Q5_1", "gate_proj": "Q4_0", "lm_head": "Q8_0", "": "Q5_0"},
    "small": {"o_proj": "IQ4_XS", "up_proj": "Q3_K", "lm_head": "F16", "": "Q2_K"},
    "floats": {"v_proj": "MXFP4", "down_proj": "F32", "embed_tokens": "Q8_0", "": "NVFP4"},
}


def mixed(tmp_path, mix, **more):
    """A file of a small Llama whose matrices have several types."""
    config = AutoConfig.for_model(**SMALL | {"vocab_size": 96} | more)
    made = AutoModelForCausalLM.from_config(config).eval()
    types = MIXES.get(mix, {"": mix})

    def kind(name):
        return next(types[part] for part in types if part in name)

    return written(tmp_path / "model.gguf", made, "llama", kind)


@pytest.mark.parametrize("mix", MIXES)
def test_a_mixed_file_computes_as_its_floats(mix, tmp_path):
    path = mixed(tmp_path, mix)
    tokens = torch.randint(3, 96, (2, 9))
    expected = logits(path, tokens)
    model = models.load(str(path), precision=torch.float32)
    found = hugging_face.logits(model, tokens)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert isinstance(model.layers[0].attention.wqkv, torch.nn.Linear)
    assert model.tok_embeddings.weight.dtype == torch.float32


def test_a_file_is_saved_and_loaded_with_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(Gguf, "tokenizer_files", lambda _: {})  # this file has none
    path, folder = mixed(tmp_path, "Q4_K_M"), tmp_path / "saved"
    model, loading = load(checkpoint_path=str(path), save=str(folder), precision="float32")
    spec = loading.spec
    assert spec.name.startswith("gguf-") and str(spec) == "as-is"
    again = models.load(str(folder), precision=torch.float32)
    tokens = torch.randint(3, 96, (1, 7))
    assert torch.equal(*(hugging_face.logits(one, tokens) for one in (model, again)))
    saved = open_checkpoint(str(folder)).saved
    assert saved.label == spec.name
    files = saved, loading.checkpoint.saved
    schemes = [{name: how for name, (how, _) in one.layers.items()} for one in files]
    assert schemes[0] == schemes[1]


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_is_given_back_to_the_bit(mix, tmp_path, monkeypatch):
    tied = random.choice((False, True))
    path, folder = mixed(tmp_path, mix, tie_word_embeddings=tied), tmp_path / "given"
    how = {"save": str(folder), "format": "gguf", "precision": "float32"}
    _, loading = load(checkpoint_path=str(path), **how)
    refuse_format(loading.spec, "gguf")
    found, expected = (GgufFile(file).tensors for file in (folder / "given.gguf", path))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].type == tensor.type and found[name].shape == tensor.shape
        assert found[name].data.tobytes() == tensor.data.tobytes(), name
    tokens = torch.randint(3, 96, (1, 7))
    assert torch.equal(logits(folder / "given.gguf", tokens), logits(path, tokens))


def test_none_is_full_precision_and_not_given_is_as_the_file_is(tmp_path, recwarn):
    path = str(mixed(tmp_path, "Q8_0"))
    full = models.load(path, quantization="none")
    assert all(type(weight.data) is torch.Tensor for weight in full.parameters())
    expected = dict(load_model(path, precision=torch.float32).named_parameters())
    for name, weight in full.named_parameters():
        assert torch.equal(weight, expected[name]), name
    as_is = models.load(path)
    assert any(isinstance(weight.data, PackedWeight) for weight in as_is.parameters())
    assert not [str(one.message) for one in recwarn if "not writable" in str(one.message)]


def test_as_is_is_refused_where_nothing_is_quantized(tmp_path):
    with pytest.raises(UsageError, match="is in full precision; name a scheme"):
        models.load("tiny", quantization="as-is")
