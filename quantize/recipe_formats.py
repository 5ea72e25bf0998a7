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
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def _of_groups(spec: Any) -> Any:
    by = ao.PerGroup(spec.group_size)
    match spec:
        case s.Int4WeightOnly():
            return ao.Int4WeightOnlyConfig(spec.group_size)
        case s.UintX():
            dtype = getattr(torch, f"int{spec.bits}")
            return ao.IntxWeightOnlyConfig(dtype, by, ao.MappingType.ASYMMETRIC)
    return ao.Int8DynamicActivationIntxWeightConfig(torch.int4, by)


# Named by bits and columns alone: none says how codes are chosen.
_GROUPED: list[Any] = [
    spec for spec in s.every_spec() if hasattr(spec, "group_size") and str(spec)[-1].isdigit()
]
_TORCHAO: dict[s.Quantization, Any] = {
    s.Int8WeightOnly(): ao.Int8WeightOnlyConfig(),
    s.Int8DynamicActivation(): ao.Int8DynamicActivationInt8WeightConfig(),
    s.Int8Embedding(): ao.IntxWeightOnlyConfig(torch.int8, ao.PerAxis(0)),
    s.Float8WeightOnly(): ao.Float8WeightOnlyConfig(),
    **{spec: _of_groups(spec) for spec in _GROUPED},
}
FORMATS: dict[str, dict[s.Quantization, Any]] = {  # what each says of a scheme
    "torchao": {x: config_to_dict(config) for x, config in _TORCHAO.items()},
    "gptqmodel": {
        s.Int8WeightOnly(): {"bits": 8, "group_size": -1, "sym": True},
        **{
            x: {"bits": x.bits, "group_size": x.group_size, "sym": False}
            for x in _GROUPED
            if x.bits in (2, 3, 4) and x.group_size > 8 and not x.rounds_activations
        },
    },
    "llama.cpp": {x: x.gguf.lower() for x in s.every_spec() if x.gguf != "-"},
}
FORMATS["torchao"][s.FullPrecision()] = FORMATS["gptqmodel"][s.FullPrecision()] = None
_PREFERRED = (s.FullPrecision, s.Int8WeightOnly, s.Int4WeightOnly, s.UintX)  # of equal values
# What a value says of the numbers; the rest says how they are stored and multiplied. GPTQ's `sym`
# is not read: asymmetric numbers hold symmetric ones.
_NUMBERS = (
    *("bits", "group_size", "granularity", "weight_granularity", "mapping_type", "weight_dtype"),
    "int4_choose_qparams_algorithm",
)


def exported(recipe: Recipe, format: str, names: Names) -> str:
    """recipe: with its layers. Raises UsageError, with the layer's name, for a scheme that the
    format cannot say."""
    schemes = {EMBEDDING: s.FullPrecision()} | dict(recipe.layers)
    values = {}
    for layer, modules in _modules(schemes, names, format).items():
        scheme = schemes[layer]
        if layer != EMBEDDING and scheme == s.Int8Embedding():  # the same numbers
            scheme = s.Int8WeightOnly()
        if scheme not in FORMATS[format]:
            raise UsageError(f"--format {format} cannot say {scheme}, which {layer} has")
        values |= dict.fromkeys(modules, FORMATS[format][scheme])
    if format == "torchao":
        config = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": values}}
        return json.dumps(config, indent=1)
    exact = {re.escape(module): value for module, value in values.items()}
    if format == "llama.cpp":
        return "".join(rf"^{name}\.weight$={value}" + "\n" for name, value in exact.items())
    signed = {f"{'+' if value else '-'}:^{name}$": value or {} for name, value in exact.items()}
    return json.dumps(signed, indent=1)


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
    """The modules' names by layer. Raises UsageError for one that the format has no name for."""
    modules = {x: [n.removesuffix(".weight") for n in names(f"{x}.weight")] for x in layers}
    if format != "llama.cpp":
        return modules
    blocks = 1 + max(int(x.split(".")[1]) for x in modules if x.startswith("layers."))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks).mapping
    if unknown := [name for own in modules.values() for name in own if name not in table]:
        raise UsageError(f"--format {format}: it has no name for {unknown[0]}")
    return {layer: [table[name][1] for name in own] for layer, own in modules.items()}


def _key(value: Any) -> str:
    """What two values of equal numbers have in common."""
    if not isinstance(value, dict):
        return json.dumps("bf16" if value in ("f16", "f32") else value)
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
        yield test, None if pattern.startswith("-:") else base | value
    if base:
        yield (lambda name: name != "lm_head"), base
        yield "lm_head".__eq__, base if whole.get("lm_head") else None


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
