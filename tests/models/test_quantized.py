"""Folders that other programs quantized: their numbers against those of the programs' packages, or
against codes that were drawn here and packed as AutoGPTQ and AutoAWQ publish it."""

import json
import random
import re

import numpy as np
import pytest
import torch
from bitsandbytes import functional as bnb
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torchao import quantization as ao
from torchao.core.config import config_to_dict
from torchao.prototype.gptq.api import _int4_row_dequantize_zp
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.quant_primitives import _dequantize_affine_tinygemm, dequantize_affine
from torchao.quantization.quantize_.workflows.int4.int4_packing_format import Int4PackingFormat
from torchao.quantization.utils import pack_tinygemm_scales_and_zeros

from quantbench import models
from quantbench.errors import CheckpointError
from quantbench.models.formats import hugging_face, open_checkpoint, quantized
from quantbench.models.formats.tensor_files import safetensors_file
from quantbench.models.loading import load_config, load_model
from quantbench.ops.formats import dequantize
from quantbench.ops.ranks import Ranks
from quantbench.parallel.split_loading import split_for
from quantbench.quantize.spec import AsIs, Stored, parse_layer
from tests.models.hugging_face import (
    TOKENS,
    assert_near,
    edit_config,
    logits,
    read_by_transformers,
    rewritten,
    saved,
)
from tests.models.refused import refusal
from tests.ops.packed_weights import in_tiles
from tests.run.test_loading import load


def in_bits(codes, bits):
    """int32 words (…, codes · bits / 32) of codes along the last dimension, lowest bit first."""
    each = codes[..., None] >> np.arange(bits) & 1
    stream = each.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.int32)


def drawn(w, bits, groups, symmetric):
    """Codes (N, K), scales and zeros (N, groups); the scales have the weight's size."""
    N, K = w.shape
    scale = (w.unflatten(1, (groups, -1)).abs().amax(2) / 2 ** (bits - 1)).half()
    zero = torch.randint(0 if symmetric else 1, 1 << bits, (N, groups))
    zero = torch.full_like(zero, 1 << (bits - 1)) if symmetric else zero
    return torch.randint(0, 1 << bits, (N, K)), scale, zero


def gptq(w, order="static"):
    bits, symmetric, second = random.choice([2, 3, 4, 8]), *random.choices([True, False], k=2)
    size = random.choice([32, 64, w.shape[1]])
    size = size if w.shape[1] % size == 0 else w.shape[1]
    codes, scale, zero = drawn(w, bits, w.shape[1] // size, symmetric)
    g_idx = torch.arange(w.shape[1]) // size
    if order == "act":
        g_idx = g_idx[torch.randperm(len(g_idx))]
    stored = zero.T if second else zero.T - 1
    tensors = {
        "qweight": torch.from_numpy(in_bits(codes.numpy(), bits)).T.contiguous(),
        "qzeros": torch.from_numpy(in_bits(stored.numpy() & (1 << bits) - 1, bits)),
        "scales": scale.T.contiguous(),
        "g_idx": g_idx.int(),
    }
    expected = (codes - zero[:, g_idx]) * scale.float()[:, g_idx]
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if second else {}
    return tensors, config | {"desc_act": order == "act"}, expected


def awq(w, version="gemm", size=32):
    """gemm: columns out of order. gemv: groups padded, as WQLinear_GEMV's calculate_zeros_width
    has it."""
    codes, scale, zero = drawn(w, 4, w.shape[1] // size, False)
    group = torch.arange(w.shape[1]) // size
    expected = (codes - zero[:, group]) * scale.float()[:, group]
    if version == "gemm":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        codes, zero = (x.T.unflatten(1, (-1, 8))[..., order].flatten(1) for x in (codes, zero))
        scale = scale.T
    else:
        padding = -scale.shape[1] % (8 * 128 // size)
        scale, zero = (torch.nn.functional.pad(part, (0, padding)) for part in (scale, zero))
    qweight, qzeros = (torch.from_numpy(in_bits(x.contiguous().numpy(), 4)) for x in (codes, zero))
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": version}
    return {"qweight": qweight, "qzeros": qzeros, "scales": scale.contiguous()}, config, expected


def fp8(w):
    block = random.choice([[128, 128], [32, 64], None])
    if block is None:
        scale = w.abs().amax(random.choice([(0, 1), (1,)]), keepdim=True) / 448
        tensors = {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        return tensors, {"quant_method": "fp8"}, tensors["weight"].float() * scale
    sizes = [-(-size // each) for size, each in zip(w.shape, block, strict=True)]
    scale = torch.exp2(torch.randint(-12, -8, sizes).float())
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[: w.shape[0], : w.shape[1]]
    tensors = {"weight": (w / spread).clamp(-448, 448).to(torch.float8_e4m3fn)}
    config = {"quant_method": "fp8", "weight_block_size": block}
    powers = random.random() < 0.5  # DeepSeek's ue8m0
    tensors["weight_scale_inv"] = scale.to(torch.float8_e8m0fnu) if powers else scale
    return tensors, config, tensors["weight"].float() * spread


def modelopt_fp8(w):
    """By hand, as its export has it: a scale for all, or for each row."""
    scale = w.abs().amax(random.choice([(0, 1), (1,)])) / 448
    values = (w / scale.reshape(-1, 1)).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    return tensors, config, values.float() * scale.reshape(-1, 1)


def modelopt_nvfp4(w):
    """compressed-tensors' codes and scales, whose scale of all multiplies here."""
    tensors, _, _ = compressed(w, "nvfp4-pack-quantized", **FLOAT_4, **TENSOR_GROUPS)
    whole = 1 / tensors["weight_global_scale"].reshape(())
    scale = tensors["weight_scale"].float() * whole
    codes = torch.stack((tensors["weight_packed"] & 15, tensors["weight_packed"] >> 4), -1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))[codes.flatten(1).long()]
    found = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
    found["weight_scale_2"] = whole
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return found, config, values * scale.repeat_interleave(16, 1)


def bnb_4bit(w, kind, nested):
    block = random.choice([32, 64, 128])  # of a row or of several
    codes, state = bnb.quantize_4bit(
        w.reshape(-1, block), blocksize=block, quant_type=kind, compress_statistics=nested
    )
    expected = bnb.dequantize_4bit(codes, state).view(w.shape)
    state.shape = w.shape
    tensors = {f"weight.{end}": part for end, part in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return tensors | {"weight": codes}, config, expected


def bnb_int8(w):
    codes, largest, _ = bnb.int8_vectorwise_quant(w.half())
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    expected = bnb.int8_vectorwise_dequant(codes, largest)
    return tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True}, expected


def torchao(w, config):
    linear = torch.nn.Linear(*w.T.shape, bias=False).requires_grad_(False)
    linear.weight.copy_(w)
    ao.quantize_(linear, config)
    return *of_torchao(linear.weight, config), linear.weight.dequantize()


def of_torchao(weight, config):
    """The tensors that torchao writes for a weight, and what config.json has."""
    tensors, _ = flatten_tensor_state_dict({"X.weight": weight})
    described = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(config)}}
    return {name.removeprefix("X."): part.cpu() for name, part in tensors.items()}, described


def intx(w):
    """Of 2 to 7 bits, with zeros or without, in groups or rows."""
    groups = random.choice([ao.PerGroup(32), ao.PerAxis(0)])
    given = {"weight_dtype": getattr(torch, f"int{random.randint(2, 7)}")}
    mapping = random.choice([ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC])
    if random.random() < 0.5:
        config = ao.IntxWeightOnlyConfig(granularity=groups, mapping_type=mapping, **given)
    else:
        given |= {"weight_granularity": groups, "weight_mapping_type": mapping}
        config = ao.Int8DynamicActivationIntxWeightConfig(**given)
    return torchao(w, config)


def int4(w, packing, size=None):
    """torchao's packed int4. A GPU packs it, so codes are packed here as its kernels take them, and
    torchao's functions bring them to floats: these classes have no dequantize()."""
    K = w.shape[1]
    size = size or random.choice([size for size in (32, 64, 128) if K % size == 0])
    codes, scale, zero = drawn(w, 4, K // size, False)
    scale = scale.to(random.choice([torch.float16, torch.bfloat16]))
    offset = (torch.randn(scale.shape) * scale).to(scale.dtype)
    shapes = {"block_size": [1, size], "shape": list(w.shape)}
    written = random.choice([packing, Int4PackingFormat(packing)])
    config = ao.Int4WeightOnlyConfig(size, int4_packing_format=written)
    if packing == "plain":
        low, high = (codes - 8).to(torch.int8).unflatten(1, (-1, 2)).unbind(2)
        parts = scale.T.contiguous(), offset.T.contiguous()
        weight = ao.Int4Tensor(low & 15 | high << 4, *parts, **shapes)
        # In float64, since it adds 8 to codes, and takes 8 scales from zeros.
        expected = _int4_row_dequantize_zp(codes - 8, *(part.double() for part in parts), size)
        if size == 128 and random.random() < 0.5:
            config = ao.Float8DynamicActivationInt4WeightConfig(int4_packing_format=packing)
    elif packing == "plain_int32":
        words = torch.from_numpy(in_bits(codes.numpy(), 4))
        weight = ao.Int4PlainInt32Tensor(words, scale.T, zero.T.to(torch.int8), **shapes)
        expected = dequantize_affine(
            codes.int(), (1, size), scale, zero, torch.int32, 0, 15, output_dtype=torch.float32
        )
    else:
        scale, offset = scale.bfloat16(), offset.bfloat16()
        more = -K % 1024
        parts = [torch.nn.functional.pad(part, (0, more // size)) for part in (scale, offset)]
        words = in_tiles(torch.nn.functional.pad(codes, (0, more)).numpy())
        weight = ao.Int4TilePackedTo4dTensor(
            words, pack_tinygemm_scales_and_zeros(*parts), **shapes
        )
        expected = _dequantize_affine_tinygemm(
            codes.int(), (1, size), scale, offset, torch.int32, 0, 15
        )
    return *of_torchao(weight, config), expected.float()


def about(name, weight):
    """What torchao's metadata says of a weight."""
    return {f"{name}.weight": json.dumps({"_data": {"shape": list(weight.shape)}})}


def compressed(w, layout, **weights):
    weights = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=layout)
    size = weights.group_size or w.shape[1]
    scale = w.unflatten(1, (-1, size)).abs().amax(2) / (7 if weights.num_bits == 4 else 127)
    scale = scale if weights.symmetric and random.random() < 0.5 else scale.bfloat16()
    parts = {"weight": w.to(scale.dtype), "weight_scale": scale}
    if weights.strategy == "tensor":
        parts["weight_scale"] = scale.amax().view(1)
    if weights.strategy == "block":
        rows = -(-w.shape[0] // 128)
        parts["weight_scale"] = torch.rand(rows, -(-w.shape[1] // 128)) / 1000
    if layout == "nvfp4-pack-quantized":
        parts["weight_global_scale"] = torch.rand(1) * 100 + 50
        parts["weight_scale"] = (scale * 100).to(torch.float8_e4m3fn).float()
    if layout == "mxfp4-pack-quantized":
        parts["weight_scale"] = torch.exp2(scale.log2().round())
    if not weights.symmetric:
        most = 1 << (weights.num_bits - 1)
        parts["weight_zero_point"] = torch.randint(-most, most, scale.shape, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(parts, scheme)
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    return tensors, config, compressor.decompress(dict(tensors), scheme)["weight"]


def of(layout, **weights):
    return lambda w: compressed(w, layout, **weights)


BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
GROUPS = {"strategy": "group", "group_size": 32}
SMALL_GROUPS = GROUPS | {"group_size": 16}
ROWS = {"strategy": "channel"}
TENSOR_GROUPS = {"strategy": "tensor_group", "group_size": 16}
FLOAT, FLOAT_4 = ({"type": "float", "num_bits": bits} for bits in (8, 4))
FORMATS = {  # the label in logs, if it does not depend on the draw, and what writes a layer
    "gptq": (None, gptq),
    "gptq, act-order": (None, lambda w: gptq(w, "act")),
    "awq": ("awq-4-32", awq),
    "awq, by rows": ("awq-4-32", lambda w: awq(w, "gemv")),
    "fp8": ("fp8", fp8),
    "modelopt fp8": ("fp8", modelopt_fp8),
    "modelopt nvfp4": ("nvfp4", modelopt_nvfp4),
    "bnb-nf4": ("bnb-nf4", lambda w: bnb_4bit(w, "nf4", False)),
    "bnb-nf4, nested": ("bnb-nf4", lambda w: bnb_4bit(w, "nf4", True)),
    "bnb-fp4": ("bnb-fp4", lambda w: bnb_4bit(w, "fp4", random.choice([True, False]))),
    "bnb-int8": ("bnb-int8", bnb_int8),
    "torchao int8": ("w8a16", lambda w: torchao(w, ao.Int8WeightOnlyConfig(version=2))),
    "torchao float8": ("fp8", lambda w: torchao(w, ao.Float8WeightOnlyConfig())),
    "torchao intx": (None, intx),
    "torchao int4": (None, lambda w: int4(w, "plain")),
    "torchao int4, words": (None, lambda w: int4(w, "plain_int32")),
    "torchao int4, tiles": (None, lambda w: int4(w, "tile_packed_to_4d")),
    "w4a16": ("w4a16-32", of("pack-quantized", num_bits=4, **GROUPS)),
    "w4a16, zeros": ("w4a16-32", of("pack-quantized", num_bits=4, symmetric=False, **GROUPS)),
    "w8a16": ("w8a16-16", of("pack-quantized", num_bits=8, **SMALL_GROUPS)),
    "w8a16, zeros": ("w8a16", of("pack-quantized", num_bits=8, symmetric=False, **ROWS)),
    "w8a16, one scale": ("w8a16", of("naive-quantized", num_bits=8, strategy="tensor")),
    "w8a8": ("w8a16", of("int-quantized", num_bits=8, **ROWS)),
    "w8a8, zeros": ("w8a16", of("int-quantized", num_bits=8, symmetric=False, **ROWS)),
    "float8 rows": ("fp8", of("float-quantized", **FLOAT, **ROWS)),
    "float8 blocks": ("fp8", of("float-quantized", **FLOAT, **BLOCKS)),
    "nvfp4": ("nvfp4", of("nvfp4-pack-quantized", **FLOAT_4, **TENSOR_GROUPS)),
    "mxfp4": ("mxfp4", of("mxfp4-pack-quantized", **FLOAT_4, **GROUPS)),
}
NO_FORM = "gptq, act-order"


def layer(tensors, config, expected, folder):
    """A layer of the name X as it is read from a file."""
    file = folder / "model.safetensors"
    tensors = {f"X.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    save_file(tensors, file, about("X", expected))
    method = hugging_face.method(config["quant_method"])
    method.check(config, "config.json")
    found = quantized.weights(safetensors_file(file), method.layouts(config))
    assert found.keys() == {"X.weight"}
    return found["X.weight"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_has_the_numbers_of_its_format(name, tmp_path):
    for _ in range(6):
        sizes = 32 * random.randint(1, 5), 64 * random.randint(1, 6)
        tensors, config, expected = FORMATS[name][1](torch.randn(sizes) * 0.3)
        stored = layer(tensors, config, expected, tmp_path)
        assert torch.equal(stored.read().to(expected.dtype), expected)
        if name == NO_FORM and stored.form is None:
            continue
        weight = stored.packed()
        exact = dict(rtol=0, atol=0) if weight.zero is None else dict(rtol=1e-6, atol=1e-6)
        exact = (
            exact
            if name not in ("nvfp4", "modelopt nvfp4", "bnb-int8")
            else dict(rtol=1e-6, atol=0)
        )
        torch.testing.assert_close(dequantize(weight), stored.read(), **exact)
        assert str(parse_layer(str(stored.form))) == str(stored.form)
        assert isinstance(parse_layer(str(stored.form)), Stored)


def folder_of(name, folder, change=lambda tensors, config: None, family="llama-3"):
    """A small model whose projections are in a format, all with the same options.

    change(tensors, quantization_config) is called before they are written.
    """
    path, _ = saved(family, folder)
    options, tensors, said = random.getstate(), {}, {}
    for key, tensor in load_file(path / "model.safetensors").items():
        tensors[key] = tensor
        if re.search(r"(_proj|\.w\d)\.weight$", key):
            random.setstate(options)
            parts, config, weight = FORMATS[name][1](tensors.pop(key))
            stem = key.removesuffix("weight")
            said |= about(stem[:-1], weight)
            tensors |= {stem + end: part.contiguous() for end, part in parts.items()}
    change(tensors, config)
    save_file(tensors, path / "model.safetensors", {"format": "pt"} | said)
    edit_config(path, quantization_config=config)
    return path


def assert_as_its_floats(path):
    model, exact = models.load(str(path)), load_model(str(path))
    assert_near(logits(model), logits(exact), 1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_computes_as_its_floats(name, tmp_path):
    path = folder_of(name, tmp_path)
    saved = open_checkpoint(str(path)).saved
    assert FORMATS[name][0] in (None, saved and saved.label)
    if name == NO_FORM and saved is None:
        return
    assert all(scheme != "none" for layer, (scheme, _) in saved.layers.items() if "layers" in layer)
    assert_as_its_floats(path)


READ_BY_TRANSFORMERS = [
    *(("w4a16", "llama-3"), ("w8a16", "qwen-2-moe"), ("w8a16", "mixtral")),
    *((name, "llama-3") for name in ("w8a16, one scale", "w8a8", "float8 rows")),
]


@pytest.mark.parametrize(("name", "family"), READ_BY_TRANSFORMERS)
def test_its_floats_are_those_of_transformers(name, family, tmp_path):
    def in_float32(tensors, _):  # transformers multiplies by scales in the dtype that they have
        scales = {key: tensors[key].float() for key in tensors if key.endswith("_scale")}
        tensors |= scales

    path = folder_of(name, tmp_path, in_float32, family)
    expected = read_by_transformers(path, compressed=True)(TOKENS).logits
    assert_near(load_model(str(path))(TOKENS), expected)


def test_a_folder_is_saved_with_its_numbers(tmp_path):
    path, folder = folder_of(random.choice(sorted(FORMATS)), tmp_path), tmp_path / "saved"
    model, _ = load(checkpoint_path=str(path), save=str(folder), precision="float32")
    assert torch.equal(logits(model), logits(models.load(str(folder), precision=torch.float32)))


def test_schemes_apply_on_top(tmp_path):
    stored, (plain, _) = folder_of("w8a8", tmp_path / "stored"), saved("llama-3", tmp_path)
    codes = load_file(stored / "model.safetensors")
    with rewritten(plain) as tensors:
        for name in tensors:
            if f"{name}_scale" in codes:
                tensors[name] = codes[name].float() * codes[f"{name}_scale"].float()
    found, expected = (models.load(str(path), quantization="int8wo") for path in (stored, plain))
    assert torch.equal(found(TOKENS), expected(TOKENS))


UP = "model.layers.1.mlp.up_proj"  # 96 rows, 64 columns


def test_a_weight_worked_by_hand(tmp_path):
    folder = folder_of("w8a8", tmp_path)
    with rewritten(folder) as tensors:
        tensors[f"{UP}.weight"][0, :3] = torch.tensor([3, -128, 0])
        tensors[f"{UP}.weight_scale"][0] = 0.5
    weight = load_model(str(folder)).layers[1].feed_forward.w13.weight[96]  # behind the gate's rows
    assert weight[:3].tolist() == [1.5, -64.0, 0.0] and weight.dtype == torch.float32


def lost(end):
    return lambda tensors, _: tensors.pop(f"{UP}.{end}")


def put(end, tensor):
    return lambda tensors, _: tensors.update({f"{UP}.{end}": tensor})


def changed(end, change):
    return lambda tensors, _: tensors.update({f"{UP}.{end}": change(tensors[f"{UP}.{end}"])})


def cut(end, size, dimension=0):
    """The first `size` rows or columns of a tensor; none if it has fewer."""

    def shorter(tensor):
        length = size if size < tensor.shape[dimension] else 0
        return tensor.narrow(dimension, 0, length).contiguous()

    return changed(end, shorter)


def state(content):
    return put("weight.quant_state.bitsandbytes__nf4", torch.tensor(list(content)).byte())


def options(**changes):
    return lambda _, config: config.update(changes)


def torchaos(**changes):
    return lambda _, config: config["quant_type"]["default"]["_data"].update(changes)


def group(**changes):
    return lambda _, config: config["config_groups"]["group_0"].update(changes)


def weights(**changes):
    return lambda _, config: config["config_groups"]["group_0"]["weights"].update(changes)


def method(name):
    return lambda _, config: config.clear() or config.update(quant_method=name, bits=4)


def second_layer(tensors, _):
    """One of that name in bitsandbytes' format."""
    parts, _, _ = bnb_4bit(torch.randn(96, 64), "nf4", False)
    tensors.update({f"{UP}.{end}": part for end, part in parts.items() if end != "weight"})


DAMAGE = [  # what is changed, and what the one line says
    ("gptq, act-order", lost("g_idx"), f"has no tensor {UP}.g_idx, the groups of"),
    ("gptq", lost("qzeros"), f"qweight, but not {UP}.qzeros"),
    ("gptq", lost("scales"), f"qweight, but not {UP}.scales"),
    ("gptq", put("weight", torch.ones(96, 64)), "keep one"),
    ("gptq", cut("qweight", 1), "these are no codes of 2, 3, 4 or 8 bits"),
    ("gptq", cut("qzeros", 0), f"{UP}.qzeros is torch.int32 of shape (0, "),
    ("gptq", put("scales", torch.ones(2, 95)), "of shape (any, 96)"),
    ("gptq", changed("g_idx", lambda g: g + 9), "g_idx is torch.int32 of shape (64,); there"),
    ("gptq", lambda _, c: c.pop("bits"), "bits 'missing' is not read; 2 or 3 or 4 or 8 is, or"),
    ("gptq", options(bits=5), "bits 5 is not read; 2 or 3 or 4 or 8 is, or give"),
    ("gptq", options(checkpoint_format="marlin"), "format 'marlin' is not read"),
    ("gptq", options(activation="w4afp8"), "'activation' is not understood"),
    ("gptq", options(act_bits=8), "act_bits 8 is not read"),
    ("gptq", options(quant_method="auto-round", packing_format="auto_round:mlx"), ":mlx' is n"),
    ("nvfp4",
     options(quant_method="auto-round", packing_format="auto_round:llm_compressor", act_bits=4),
     "act_bits 4 is not read; null or 16 or 32 is"),
    ("awq", options(rotation="hadamard"), "rotation 'hadamard' is not read"),
    ("modelopt fp8", options(quant_algo="INT4_AWQ"), "quant_algo 'INT4_AWQ' is not read; FP8 or"),
    ("modelopt nvfp4", changed("weight_scale_2", torch.neg), "expected is one number above 0"),
    ("gptq", method("awq"), "scales is torch.float16 of shape ("),
    ("awq", method("gptq"), "these are no codes of 2, 3, 4 or 8 bits"),
    ("awq", options(version="exl"), "version 'exl' is not read; null or gemm or"),
    ("awq", options(version="gemv"), "is float32 or float16 or bfloat16 of shape (96, 32)"),
    ("awq", options(bits=8), "bits 8 is not read; 4 is, or give the full-precision"),
    ("awq", put("scales", torch.ones(5, 96)), "the weight has 64 col"),
    ("awq", second_layer, "which the model would not read"),
    ("fp8", options(weight_block_size=[128]), "weight_block_size is [128]; accepted"),
    ("fp8", put("weight", torch.ones(96, 64)), "expected is float8_e4m3"),
    ("bnb-nf4", state(b"[]"), "expected is JSON with a shape and a blocksize"),
    ("bnb-nf4", state(b'{"shape": [8, 8], "blocksize": 64}'), "(32, 1)"),
    ("bnb-nf4", state(b'{"shape": [96, 64], "blocksize": 0}'), "its shape or its"),
    ("bnb-nf4", changed("weight.quant_map", torch.neg), "these are not the values of nf4"),
    ("bnb-nf4, nested", lost("weight.nested_absmax"), "is not whole"),
    ("bnb-int8", changed("weight_format", lambda w: w + 1), "rows alone are read, which is 0"),
    ("torchao int8", changed("_weight_zero_point", lambda z: z + 1), "whose zeros are 0"),
    ("torchao intx", changed("_weight_qdata", lambda q: q.fill_(100)), "bits, from -"),
    ("torchao intx",
     lambda _, c: c["quant_type"]["default"]["_data"]["weight_dtype"].update(_data="int1"),
     "weight_dtype 'int1' is not read; int2, int3,"),
    ("torchao int8", options(quant_type="int4"), "quant_type 'int4' is not read; Int8"),
    ("torchao int4", torchaos(int4_packing_format="preshuffled"), "'preshuffled' is not read; p"),
    ("torchao int4", cut("_weight_scale", 1, 1), "of shape (any, 96)"),
    ("torchao int4", cut("_weight_scale", 0), "; the weight has 96 rows and 64 columns"),
    ("torchao int4", put("_weight_act_pre_scale", torch.ones(64)), "_scale, which the model woul"),
    ("torchao int4, words", changed("_weight_zero_point", torch.Tensor.half),
     "plain_int32 is read as Intel GPUs pack it, with int8 from 0 to 15, or give the"),
    ("torchao int4, words", changed("_weight_zero_point", torch.neg), "with int8 from 0"),
    ("torchao int4, tiles", torchaos(int4_tile_packed_ntile=16),
     "int4_tile_packed_ntile 16 is not read; 8 is, or give the full-precision"),
    ("torchao int4, tiles", cut("_weight_qdata", 8), "in the file's metadata is [96, 64]"),
    ("torchao int4, tiles", cut("_weight_scale_and_zero", 5), "64 columns, in the file 1024"),
    ("nvfp4", changed("weight_global_scale", torch.neg), "expected is one number above 0"),
    ("mxfp4", cut("weight_scale", 5, 1), "of shape (96, 0); the weight has 64 col"),
    ("w8a8", lost("weight_scale"), f"tensor {UP}.weight is torch.int8"),
    ("w8a8", put("weight_scale", torch.ones(95, 1)),
     f"{UP}.weight_scale is torch.float32 of shape (95, 1); the weight has 96 rows and"),
    ("w8a8", put("weight_scale", torch.ones(96, 5)), "(96, 5); the weight has"),
    ("w8a8", put("weight_scale", torch.ones(96, 0)), "(96, 0); the weight has"),
    ("w8a8", put("weight_scale", torch.ones(96, 1).int()), "int32 of shape (96, 1)"),
    ("w8a8", put("weight", torch.ones(96, 64)), "float32 of shape (96, 64); expected"),
    ("w8a8", changed("weight", lambda w: w[0].clone()), "torch.int8 of shape (64,); expected"),
    ("w8a8", lambda *both: cut("weight", 95)(*both) or put("weight_scale", torch.ones(1))(*both),
     "has shape (95, 64); the config says (96, 64)"),
    ("w8a8", put("weight_zero_point", torch.ones(96, 1)),
     "zero_point is torch.float32 of shape (96, 1); expected is int8 of shape (96, 1)"),
    ("w4a16", lost("weight_shape"), f"tensor {UP}.weight_packed, but not {UP}.weight_shape"),
    ("w4a16", put("weight", torch.ones(96, 64)), f"both {UP}.weight and {UP}.weight_packed; keep"),
    ("w4a16", cut("weight_packed", 7, 1),
     f"{UP}.weight_packed is torch.int32 of shape (96, 7); its weight_shape is [96, 64], and 4"),
    ("w4a16", put("weight_shape", torch.tensor(96)), "weight_shape is 96, and 4 or 8 bits a value"),
    ("w8a8", lambda _, c: c.clear(), "quant_method None is not read; compressed-tensors, gptq, a"),
    ("w8a8", options(quant_method="aqlm"), "config.json: quantization_config: quant_method 'aqlm'"),
    ("w8a8", options(quant_method=["gptq"]), "quant_method ['gptq'] is not read"),
    ("w8a8", options(format="marlin-24"), "format 'marlin-24' is not"),
    ("w8a8", options(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config given is"),
    ("w8a8", options(transform_config={"a": 1}), "transform_config given is not read"),
    ("w8a8", options(moe_sparsity_config={"a": 1}), "'moe_sparsity_config' is not understood"),
    ("w8a8", options(config_groups=None), "config_groups is None; accepted is an object"),
    ("w8a8", options(config_groups={"W8A16": [1]}), "config_groups.W8A16 is [1]; accepted is an o"),
    ("w8a8", group(weights=None), "'group_0': weights is None; accepted is an object"),
    ("w8a8", group(output_activations={"num_bits": 8}),
     "'group_0': output_activations given is not read; null is, or give the full-precision"),
    ("w8a8", group(format="mxfp6-pack-quantized"), "'mxfp6-pack-quantized' is not"),
    ("w8a8", weights(num_bits=3), "num_bits 3 is not read; 8 or 4 is"),
    ("w8a8", weights(symmetric=0.5), "symmetric 0.5 is not read"),
    ("w8a8", weights(strategy="token"), "strategy 'token' is not read"),
    ("w8a8", weights(block_structure=[128]), "block_structure is [128]; "),
    ("w8a8", weights(actorder="group"), "actorder 'group' is not read"),
    ("w8a8", weights(dynamic=True), "dynamic True is not read"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["awq", "plain", "plain_int32", "tile_packed_to_4d"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_an_odd_number_of_groups(kind, size, tmp_path):
    """AWQ by rows pads them."""
    weight = torch.randn(24, size * random.randrange(1, 20, 2))
    written = awq(weight, "gemv", size) if kind == "awq" else int4(weight, kind, size)
    assert torch.equal(layer(*written, tmp_path).read(), written[2])
    label = hugging_face.method(written[1]["quant_method"]).label(written[1])
    assert label == f"{'awq-4' if kind == 'awq' else 'w4a16'}-{size}"


@pytest.mark.parametrize("shape", [None, [32], [32, 0], [32, 2.0], [32, 1025], {}])
def test_int4_in_tiles_has_its_shape_in_the_metadata(shape, tmp_path):
    tensors, config, _ = int4(torch.randn(32, 64), "tile_packed_to_4d")
    said = {"X.weight": json.dumps(shape and {"_data": {"shape": shape}})}
    file = tmp_path / "model.safetensors"
    save_file({f"X.{end}": part for end, part in tensors.items()}, file, said)
    with pytest.raises(CheckpointError, match="its shape in the file's metadata is [N[]"):
        quantized.weights(safetensors_file(file), hugging_face.method("torchao").layouts(config))


@pytest.mark.gpu  # torchao packs it there alone, and multiplies with it
def test_int4_in_tiles_as_a_gpu_packs_it(tmp_path):
    config = ao.Int4WeightOnlyConfig(64, int4_packing_format="tile_packed_to_4d")
    linear = torch.nn.Linear(192, 40, bias=False, device="cuda", dtype=torch.bfloat16)
    ao.quantize_(linear, config)
    expected = linear(torch.eye(192, dtype=torch.bfloat16, device="cuda")).T.cpu()
    stored = layer(*of_torchao(linear.weight, config), expected, tmp_path)
    assert torch.equal(stored.read().bfloat16(), expected)


@pytest.mark.parametrize("name, change, message", DAMAGE)
def test_damage_is_one_clear_line(tmp_path, name, change, message):
    path = folder_of(name, tmp_path, change)
    assert message in refusal(CheckpointError, load_model, str(path))
    with pytest.raises(CheckpointError):
        models.load(str(path))


AUTO_ROUND = {
    "provider": "auto-round", "autoround_version": "0.16.1", "data_type": "int", "iters": 200,
    "nsamples": 512, "seqlen": 2048, "lr": 0.005, "low_gpu_mem_usage": True, "act_bits": 16,
    "enable_quanted_input": False, "block_name_to_quantize": "model.layers",
}  # fmt: skip
GPTQMODEL = {"method": "awq", "checkpoint_format": "gemm", "pack_dtype": "int32", "lm_head": False,
             "meta": {"quantizer": ["gptqmodel:5.0"]}, "zero_point": False}  # fmt: skip


def in_storage(name):
    """bitsandbytes' codes as bytes of another dtype."""

    def change(tensors, config):
        for key in [key for key in tensors if f"{key}.absmax" in tensors]:
            tensors[key] = tensors[key].flatten().view(getattr(torch, name))[:, None]
        config["bnb_4bit_quant_storage"] = name

    return change


def without_order(tensors, _):
    for key in [key for key in tensors if key.endswith("g_idx")]:
        del tensors[key]


def by_auto_round(layout, **described):
    def change(_, config):
        config.clear()
        config.update(AUTO_ROUND, **described)
        config.update(quant_method="auto-round", packing_format=f"auto_round:{layout}")

    return change


def cache_scales(tensors, config):
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.1)
    config["kv_cache_quant_algo"] = "FP8"


def twice(name, folder, change):
    """The same model without the change and with it."""
    drawn = random.getstate(), torch.get_rng_state()
    plain = folder_of(name, folder / "plain")
    random.setstate(drawn[0])
    torch.set_rng_state(drawn[1])
    return plain, folder_of(name, folder / "other", change)


SAME = [  # what other programs write around the same numbers
    ("gptq", without_order),
    ("gptq", options(**AUTO_ROUND)),
    ("awq", options(**AUTO_ROUND)),
    ("awq", options(**GPTQMODEL)),
    ("awq", by_auto_round("auto_awq", bits=4, group_size=32)),
    ("w4a16", by_auto_round("llm_compressor", bits=4, group_size=32)),
    ("nvfp4", by_auto_round("llm_compressor", bits=4, group_size=16, data_type="nv_fp")),
    ("w4a16", options(sparsity_config={"format": "dense", "ignore": []})),
    ("w8a8", options(quantization_status="frozen")),
    ("w8a8", lambda _, config: config.pop("quantization_status")),
    ("w8a8", options(kv_cache_scheme={"num_bits": 8, "type": "float"})),
    ("bnb-nf4", in_storage("bfloat16")),
    ("bnb-nf4, nested", in_storage("float32")),
    ("bnb-fp4", in_storage("float16")),
    ("modelopt fp8", cache_scales),
]


@pytest.mark.parametrize(("name", "change"), SAME)
def test_words_that_change_no_number(name, change, tmp_path):
    plain, other = twice(name, tmp_path, change)
    assert torch.equal(load_model(str(other))(TOKENS), load_model(str(plain))(TOKENS))
    assert open_checkpoint(str(other)).saved is not None


@pytest.mark.parametrize("second", [True, False])
def test_auto_rounds_layers_in_gptqs_layout(second, tmp_path):
    """Without g_idx; zeros are less 1 in the layouts that it calls gptq."""
    while ("checkpoint_format" in (made := gptq(torch.randn(64, 128)))[1]) is not second:
        pass
    tensors, config, expected = made
    packing = random.choice(["exllamav2", "tritonv2"] if second else ["auto_gptq", "gptq:exllama"])
    del tensors["g_idx"]
    config = {key: config[key] for key in ("bits", "group_size", "sym")}
    config |= {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}"}
    assert torch.equal(layer(tensors, config | AUTO_ROUND, expected, tmp_path).read(), expected)


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("modelopt fp8", "hf_quant_config.json",
         lambda config: {"producer": {"name": "modelopt"}, "quantization": config}),
        ("modelopt nvfp4", "hf_quant_config.json",
         lambda config: {"quantization": config | {"quant_algo": "MIXED_PRECISION"}}),
        ("gptq", "quantize_config.json", lambda config: config),
        ("awq", "quant_config.json",
         lambda config: {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)  # fmt: skip
def test_a_file_beside_says_how_it_is_quantized(name, file, words, tmp_path):
    plain, other = twice(name, tmp_path, lambda *_: None)
    described = json.loads((other / "config.json").read_text())["quantization_config"]
    edit_config(other, quantization_config=None)
    described.pop("quant_method")
    (other / file).write_text(json.dumps(words(described)))
    assert torch.equal(load_model(str(other))(TOKENS), load_model(str(plain))(TOKENS))
    (other / file).unlink()  # then they are never read as floats
    refusal(CheckpointError, load_model, str(other))


def test_a_float_weight_in_a_quantized_folder_is_used_as_it_is(tmp_path):
    """quantization_status "frozen" is also said of folders whose weights are still floats."""
    plain, theirs = saved("llama-3", tmp_path)
    _, config, _ = of("pack-quantized", num_bits=4, **GROUPS)(torch.randn(64, 64))
    edit_config(plain, quantization_config=config | {"quantization_status": "frozen"})
    checkpoint = open_checkpoint(str(plain))
    assert_near(load_model(str(plain))(TOKENS), theirs(TOKENS).logits)
    assert checkpoint.saved is None
    assert checkpoint.notes == ("config.json says that weights are quantized, and they are floats",)


@pytest.mark.parametrize("value", [1, 0])
def test_a_bias_of_zeros_changes_nothing(tmp_path, value):
    """AutoGPTQ gives one to every layer."""
    bias = torch.full((96,), value).half()
    path = folder_of("gptq", tmp_path, put("bias", bias))
    if not value:
        assert load_model(str(path)).layers[1].feed_forward.w13.bias is None
        return
    with pytest.raises(CheckpointError, match="up_proj.bias, which the model would not read"):
        load_model(str(path))


def test_layers_with_options_of_their_own(tmp_path):
    """As GPTQModel's `dynamic` has them: another number of bits, act-order, and zeros."""
    path = folder_of("gptq", tmp_path, lambda tensors, config: config.update(dynamic={"+:.*": {}}))
    assert models.load(str(path)) is not None


def test_ranks_share_a_folder(tmp_path):
    saved = open_checkpoint(str(folder_of("w4a16", tmp_path))).saved
    layers = {name: parse_layer(scheme) for name, (scheme, _) in saved.layers.items()}
    config = load_config(str(tmp_path / "llama-3"))
    split = split_for(config, Ranks(1, 2), AsIs(tuple(layers.items())), saved.layers)
    assert split.cut("layers.0.attention.wo.weight").ranges == ((32, 64),)


def test_a_matrix_of_two_formats_keeps_the_numbers_of_both(tmp_path):
    """gate in 4 bits and up in 8 are one matrix of 8 bits here."""

    def change(tensors, config):
        eight, other, _ = of("int-quantized", num_bits=8, **GROUPS)(torch.randn(96, 64))
        for end in ("weight_packed", "weight_shape", "weight_zero_point"):
            del tensors[f"{UP}.{end}"]
        tensors |= {f"{UP}.{end}": part.contiguous() for end, part in eight.items()}
        config["config_groups"]["group_1"] = other["config_groups"]["group_0"]
        config["format"] = "mixed-precision"

    path = folder_of("w4a16, zeros", tmp_path, change)
    saved = open_checkpoint(str(path)).saved
    assert saved.label == "mixed"
    assert saved.layers["layers.1.feed_forward.w13"][0] == "stored-int-8-32-float32-float32"
    assert_as_its_floats(path)
