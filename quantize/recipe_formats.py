"""A recipe as other programs write theirs, and theirs as a recipe's schemes.

    text = exported(recipe, "torchao", names.hugging_face)
    schemes = imported(text, "torchao", config.linear_shapes(), names.hugging_face)

    torchao     FqnToConfig as torchao's config_to_dict writes it; transformers reads it
    gptqmodel   the `dynamic` of a QuantizeConfig: {"+:regex": {"bits": 4, …}, "-:regex": {}}
    llama.cpp   llama-quantize's --tensor-type-file: a line regex=type for each tensor

For llama.cpp a scheme is the type that `quantbench schemes` compares it with. The others say bits,
groups and zero points, and choose codes in their own way. A layer may be several of their modules.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gguf
import torch
from torchao import quantization as ao
from torchao.core.config import config_to_dict

from quantbench.errors import UsageError
from quantbench.quantize import spec as s
from quantbench.quantize.recipe import EMBEDDING, Recipe
from quantbench.text import shown

Names = Callable[[str], Sequence[str]]  # a parameter's names in Hugging Face's checkpoints
Rule = tuple[Callable[[str], object], Any]  # whether a module is meant, and its value
_UINTS = [spec for spec in s.every_spec() if isinstance(spec, s.UintX) and not spec.hqq]
_TORCHAO: dict[s.Quantization, Any] = {
    s.FullPrecision(): None,
    s.Int8WeightOnly(): ao.Int8WeightOnlyConfig(),
    s.Int8DynamicActivation(): ao.Int8DynamicActivationInt8WeightConfig(),
    s.Int8Embedding(): ao.IntxWeightOnlyConfig(torch.int8, ao.PerAxis(0)),
    s.Float8WeightOnly(): ao.Float8WeightOnlyConfig(),
    **{s.Int4WeightOnly(n): ao.Int4WeightOnlyConfig(n) for n in s.GROUP_SIZES},
    **{
        s.Int8DynamicActivationInt4Weight(n): ao.Int8DynamicActivationIntxWeightConfig(
            torch.int4, ao.PerGroup(n)
        )
        for n in s.GROUP_SIZES
    },
    **{
        spec: ao.IntxWeightOnlyConfig(
            getattr(torch, f"int{spec.bits}"),
            ao.PerGroup(spec.group_size),
            ao.MappingType.ASYMMETRIC,
        )
        for spec in _UINTS
    },
}
_GPTQMODEL: dict[s.Quantization, dict[str, object]] = {
    s.FullPrecision(): {},
    s.Int8WeightOnly(): {"bits": 8, "group_size": -1, "sym": True},
    **{s.Int4WeightOnly(n): {"bits": 4, "group_size": n, "sym": False} for n in s.GROUP_SIZES},
    **{
        spec: {"bits": spec.bits, "group_size": spec.group_size, "sym": False}
        for spec in _UINTS
        if spec.bits in (2, 3, 4) and spec.group_size > 8
    },
}
FORMATS: dict[str, Mapping[s.Quantization, Any]] = {  # what each says of a scheme
    "torchao": {spec: value and config_to_dict(value) for spec, value in _TORCHAO.items()},
    "gptqmodel": _GPTQMODEL,
    "llama.cpp": {spec: spec.gguf.lower() for spec in s.every_spec() if spec.gguf != "-"},
}
# What a value says of the numbers; the rest says how they are stored and multiplied. GPTQ's `sym`
# is not read: asymmetric numbers hold symmetric ones.
_NUMBERS = (
    *("bits", "group_size", "granularity", "mapping_type", "weight_dtype", "weight_granularity"),
    "int4_choose_qparams_algorithm",
)
_PREFERRED = (s.FullPrecision, s.Int8WeightOnly, s.Int4WeightOnly, s.UintX)  # of equal types
_FLOATS = ("bf16", "f16", "f32")


def exported(recipe: Recipe, format: str, names: Names) -> str:
    """recipe: with its layers. Raises UsageError, with the layer's name, for a scheme that the
    format cannot say."""
    values = {}
    for layer, scheme in ({EMBEDDING: s.FullPrecision()} | dict(recipe.layers)).items():
        if layer != EMBEDDING and scheme == s.Int8Embedding():  # the same numbers
            scheme = s.Int8WeightOnly()
        try:
            value = FORMATS[format][scheme]
            values |= dict.fromkeys(_modules([layer], names, format)[layer], value)
        except LookupError:
            raise UsageError(f"--format {format} cannot say {scheme}, which {layer} has") from None
    exact = {re.escape(module): value for module, value in values.items()}
    if format == "llama.cpp":
        return "".join(rf"^{name}\.weight$={value}" + "\n" for name, value in exact.items())
    if format == "gptqmodel":
        exact = {f"{'+' if value else '-'}:^{name}$": value for name, value in exact.items()}
        return json.dumps(exact, indent=1)
    config = {"fqn_to_config": values, "module_fqn_to_config": values}
    return json.dumps({"_type": "FqnToConfig", "_version": 1, "_data": config}, indent=1)


def imported(text: str, format: str, layers: Iterable[str], names: Names) -> dict[str, str]:
    """The schemes' names by layer. Raises UsageError for a text that is not in the format, for what
    no scheme is, for a layer without a value, and for modules of one layer that differ."""
    known: dict[str, str] = {}
    said = FORMATS[format]
    for spec in sorted(said, key=lambda x: (not isinstance(x, _PREFERRED), str(x) not in s.SHOWN)):
        known.setdefault(_key(said[spec]), str(spec))
    try:
        rules = list(_RULES[format](text))
        schemes = {}
        for layer, modules in _modules(layers, names, format).items():
            keys = [next((_key(v) for test, v in rules if test(name)), "") for name in modules]
            if not all(keys):
                raise ValueError(f"it has nothing for {modules[keys.index('')]}")
            if len(set(keys)) > 1:
                raise ValueError(f"{', '.join(modules)} differ, and are one layer here, {layer}")
            if keys[0] not in known:
                raise ValueError(f"{modules[0]} has {shown(keys[0])}, which no scheme is")
            schemes[layer] = known[keys[0]]
    except (ValueError, TypeError, AttributeError, LookupError, re.error) as error:
        raise UsageError(f"no mixture of {format} that can be read: {error}") from None
    return schemes


def _modules(layers: Iterable[str], names: Names, format: str) -> dict[str, list[str]]:
    """The modules' names of each layer. Raises LookupError for a layer that has none."""
    modules = {x: [n.removesuffix(".weight") for n in names(f"{x}.weight")] for x in layers}
    if format != "llama.cpp":
        return modules
    blocks = 1 + max((int(x.split(".")[1]) for x in modules if x.startswith("layers.")), default=0)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks).mapping
    return {layer: [table[name][1] for name in own] for layer, own in modules.items()}


def _key(value: Any) -> str:
    """What two values of equal numbers have in common."""
    if not isinstance(value, dict):
        return json.dumps("bf16" if value in _FLOATS else value)
    data = value.get("_data", value)
    numbers = {name: data[name] for name in _NUMBERS if name in data}
    return json.dumps([value.get("_type"), numbers], sort_keys=True)


def _torchao_rules(text: str) -> Iterator[Rule]:
    rules = json.loads(text)["_data"]["fqn_to_config"]
    exact = {key.removesuffix(".weight"): value for key, value in rules.items()}
    yield from ((name.__eq__, value) for name, value in exact.items())
    for key, value in rules.items():
        if key.startswith("re:"):
            yield re.compile(rf"{key[3:]}(\.weight)?").fullmatch, value
    if "_default" in rules:
        yield (lambda name: True), rules["_default"]


def _gptqmodel_rules(text: str) -> Iterator[Rule]:
    whole = json.loads(text)
    base = {name: whole[name] for name in ("bits", "group_size") if name in whole}
    for pattern, value in whole.get("dynamic", {} if base else whole).items():
        test = re.compile(pattern.removeprefix("+:").removeprefix("-:")).match
        yield test, {} if pattern.startswith("-:") else base | value
    if base:
        yield (lambda name: name != "lm_head"), base
        yield "lm_head".__eq__, base if whole.get("lm_head") else {}


def _llama_cpp_rules(text: str) -> Iterator[Rule]:
    for line in text.split():
        pattern, equals, value = line.rpartition("=")
        if not equals:
            raise ValueError(f"{shown(line)} is no regex=type")
        test = re.compile(pattern).search
        yield (lambda name, test=test: test(f"{name}.weight")), value.lower()


_RULES = {
    "torchao": _torchao_rules, "gptqmodel": _gptqmodel_rules, "llama.cpp": _llama_cpp_rules,
}  # fmt: skip
