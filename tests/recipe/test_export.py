"""A recipe as llama.cpp reads it."""

import re

import pytest

from quantbench.errors import UsageError
from quantbench.models.formats.names import hugging_face
from quantbench.models.loading import load_config
from quantbench.quantize import recipe
from quantbench.recipe.export import tensor_types

SHAPES = load_config("tiny").linear_shapes()


def exported(schemes):
    return tensor_types(recipe.make("tiny", SHAPES, schemes), hugging_face)


def test_llama_cpps_lines_match_its_tensors():
    lines = exported({"layers.0.*": "none", "layers.*.wqkv": "int8wo", "*": "int4wo-64"})
    rules = [line.split("=") for line in lines.splitlines()]

    def type_of(tensor):  # as llama-quantize does
        return next(value for pattern, value in rules if re.search(pattern, tensor))

    assert len(rules) == 5 * 7 + 2
    assert type_of("blk.0.attn_output.weight") == "bf16" == type_of("token_embd.weight")
    assert type_of("blk.1.attn_v.weight") == "q8_0" and type_of("output.weight") == "q4_0"
    assert not any(re.search(pattern, "blk.1.attn_norm.weight") for pattern, _ in rules)


def test_a_scheme_without_a_type_is_refused_by_name():
    with pytest.raises(UsageError, match="no type for uintx-2-8, which .*wqkv has"):
        exported({"*": "int8wo", "layers.2.attention.wqkv": "uintx-2-8"})
