"""Recipes as torchao, GPTQModel and llama.cpp write them: as their own readers understand them."""

import fnmatch
import json
import re
from collections import OrderedDict

import pytest
import torch
from torchao import quantization as ao
from torchao.core.config import config_from_dict, config_to_dict

from quantbench.errors import UsageError
from quantbench.models.formats.names import hugging_face
from quantbench.models.loading import load_config
from quantbench.quantize import recipe
from quantbench.quantize.recipe_formats import FORMATS, exported, imported
from tests.models.refused import refusal

SHAPES = load_config("tiny").linear_shapes()
SCHEMES = {"layers.0.*": "none", "layers.*.wqkv": "int8wo", "*": "int4wo-64"}


def made(schemes):
    return recipe.make("tiny", SHAPES, schemes)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_exported_is_imported_again(format):
    again = imported(exported(made(SCHEMES), format, hugging_face), format, SHAPES, hugging_face)
    assert again == {layer: str(spec) for layer, spec in made(SCHEMES).layers}


def test_torchao_reads_its_config():
    config = config_from_dict(json.loads(exported(made(SCHEMES), "torchao", hugging_face)))
    assert isinstance(config, ao.FqnToConfig)
    said = config.fqn_to_config
    assert said["model.layers.0.self_attn.k_proj"] is None is said["model.embed_tokens"]
    assert said["model.layers.1.self_attn.k_proj"] == ao.Int8WeightOnlyConfig()
    assert said["model.layers.1.mlp.up_proj"] == ao.Int4WeightOnlyConfig(64)
    assert len(said) == 5 * 7 + 2


def test_gptqmodels_regexes_match_its_modules():
    rules = json.loads(exported(made(SCHEMES), "gptqmodel", hugging_face))

    def rule(module):  # as GPTQModel and vLLM look it up
        return next((k[0], v) for k, v in rules.items() if re.match(k[2:], module))

    assert rule("model.layers.0.mlp.up_proj") == ("-", {})
    said = {"bits": 8, "group_size": -1, "sym": True}
    assert rule("model.layers.1.self_attn.v_proj") == ("+", said)
    assert rule("lm_head") == ("+", {"bits": 4, "group_size": 64, "sym": False})


def test_llama_cpps_lines_match_its_tensors():
    lines = exported(made(SCHEMES), "llama.cpp", hugging_face).splitlines()
    rules = [line.split("=") for line in lines]

    def type_of(tensor):  # as llama-quantize does
        return next(value for pattern, value in rules if re.search(pattern, tensor))

    assert type_of("blk.0.attn_output.weight") == "bf16" == type_of("token_embd.weight")
    assert type_of("blk.1.attn_v.weight") == "q8_0" and type_of("output.weight") == "q4_0"
    assert not any(re.search(pattern, "blk.1.attn_norm.weight") for pattern, _ in rules)


@pytest.mark.parametrize(
    ("format", "scheme", "layer"),
    [
        *(("torchao", name, "wqkv") for name in ("fp6", "mxfp4", "bnb-nf4", "uintx-2-64-hqq")),
        *(("gptqmodel", name, "wqkv") for name in ("int8dq", "fp6", "uintx-5-64", "int4wo-64-hqq")),
        *(("gptqmodel", "embed-int8", "tok_embeddings"), ("llama.cpp", "uintx-2-8", "wqkv")),
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name(format, scheme, layer):
    schemes = {"*": "int8wo"} | {
        layer if layer[0] == "t" else f"layers.2.attention.{layer}": scheme
    }
    with pytest.raises(UsageError, match=f"{format} cannot say {scheme}, which .*{layer} has"):
        exported(made(schemes), format, hugging_face)


Q8, Q4 = {"bits": 8, "group_size": -1}, {"bits": 4, "group_size": 128}
INT4 = ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32))
UINT4 = ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(64), ao.MappingType.ASYMMETRIC)
FQNS = {"_default": None, r"re:model\..*mlp\..*": INT4, "lm_head.weight": UINT4}
TORCHAO = config_to_dict(ao.FqnToConfig(OrderedDict(FQNS)))
DYNAMIC = {r"-:.*\.0\..*": {}, r".*mlp.*": {"group_size": 32}}


@pytest.mark.parametrize(
    ("format", "text", "layer", "scheme"),
    [
        ("torchao", json.dumps(TORCHAO), "*.w13", "int8dq-int4wo-32"),
        ("torchao", json.dumps(TORCHAO), "*.wqkv", "none"),
        ("torchao", json.dumps(TORCHAO), "output", "uintx-4-64"),
        ("gptqmodel", json.dumps(Q4 | {"sym": True, "dynamic": DYNAMIC}), "layers.0.*", "none"),
        ("gptqmodel", json.dumps(Q4 | {"dynamic": DYNAMIC}), "layers.3.feed*", "int4wo-32"),
        ("gptqmodel", json.dumps(Q4 | {"dynamic": DYNAMIC}), "layers.3.att*", "int4wo-128"),
        ("gptqmodel", json.dumps(Q4 | {"dynamic": DYNAMIC}), "output", "none"),
        ("gptqmodel", json.dumps({".*": Q8}), "output", "int8wo"),
        ("llama.cpp", "ffn_down=q6_K\n.*=Q4_K", "*.w2", "uintx-6-64"),
        ("llama.cpp", "ffn_down=q6_K\n.*=Q4_K", "*.wo", "uintx-4-64"),
        ("llama.cpp", ".*=f16", "output", "none"),
    ],
)
def test_what_others_write(format, text, layer, scheme):
    schemes = imported(text, format, SHAPES, hugging_face)
    assert {schemes[name] for name in fnmatch.filter(schemes, layer)} == {scheme}


@pytest.mark.parametrize(
    ("format", "text", "why"),
    [
        ("torchao", "{", "Expecting property name"),
        ("torchao", "{}", "_data"),
        ("torchao", '{"_data": {"fqn_to_config": {"re:lm_.*": null}}}', "nothing for model.layers"),
        ("gptqmodel", '{"(": {}}', "missing"),
        ("gptqmodel", '{".*": {}}', "which no scheme is"),
        ("gptqmodel", '{".*": {"bits": 5, "group_size": 64}}', "which no scheme is"),
        ("llama.cpp", "attn_v=q6_k .*=q4_0", "differ, and are one layer here, layers.0.attention"),
        ("llama.cpp", ".*=iq1_s", "which no scheme is"),
        ("llama.cpp", "q8_0", "is no regex=type"),
    ],
)
def test_what_cannot_be_read_is_one_line(format, text, why):
    assert why in refusal(UsageError, imported, text, format, SHAPES, hugging_face)
