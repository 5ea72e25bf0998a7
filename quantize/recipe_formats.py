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
from collections import OrderedDict
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

FORMATS = ("torchao", "gptqmodel", "llama.cpp")
Names = Callable[[str], Sequence[str]]  # a parameter's names in Hugging Face's checkpoints
Rule = tuple[Callable[[str], object], Any]  # whether a module is meant, and what it gets
# What a config says of the numbers; the rest says how they are stored and multiplied. GPTQ's `sym`
# is not read: asymmetric numbers hold symmetric ones.
_NUMBERS = (
    *("bits", "group_size", "granularity", "mapping_type", "weight_dtype", "weight_granularity"),
    "int4_choose_qparams_algorithm",
)
_PREFERRED = (s.FullPrecision, s.Int8WeightOnly, s.Int4WeightOnly, s.UintX)
_FLOATS = ("bf16", "f16", "f32")


def exported(recipe: Recipe, format: str, names: Names) -> str:
    """recipe: with its layers. Raises UsageError, with the layer's name, for a scheme that the
    format cannot say."""
    values = {}
    for layer, scheme in ({EMBEDDING: s.FullPrecision()} | dict(recipe.layers)).items():
        if layer != EMBEDDING and scheme == s.Int8Embedding():  # the same numbers
            scheme = s.Int8WeightOnly()
        try:
            values |= dict.fromkeys(_modules([layer], names, format)[layer], _said(scheme, format))
        except LookupError:
            raise UsageError(f"--format {format} cannot say {scheme}, which {layer} has") from None
    exact = {re.escape(module): value for module, value in values.items()}
    if format == "llama.cpp":
        return "".join(rf"^{name}\.weight$={value}" + "\n" for name, value in exact.items())
    if format == "gptqmodel":
        exact = {f"{'+' if value else '-'}:^{name}$": value for name, value in exact.items()}
        return json.dumps(exact, indent=1)
    return json.dumps(config_to_dict(ao.FqnToConfig(OrderedDict(values))), indent=1)


def imported(text: str, format: str, layers: Iterable[str], names: Names) -> dict[str, str]:
    """The schemes' names by layer. Raises UsageError for a text that is not in the format, for what
    no scheme is, for a layer without a value, and for modules of one layer that differ."""
    known: dict[str, str] = {}
    every = [s.named(name) for name in s.SHOWN] + list(s.every_spec())
    for spec in sorted(every, key=lambda spec: not isinstance(spec, _PREFERRED)):
        try:
            known.setdefault(_key(_said(spec, format)), str(spec))
        except LookupError:
            continue
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


def _said(spec: s.Quantization, format: str) -> Any:
    """A scheme in the format's words. Raises LookupError where it has none."""
    if format == "llama.cpp":
        if spec.gguf == "-":
            raise LookupError
        return spec.gguf.lower()
    torchao = format == "torchao"
    match spec:
        case s.FullPrecision():
            return None if torchao else {}
        case s.Int8WeightOnly():
            said = ao.Int8WeightOnlyConfig() if torchao else (8, -1, True)
        case s.Int4WeightOnly(group_size, False):
            said = ao.Int4WeightOnlyConfig(group_size) if torchao else (4, group_size, False)
        case s.Int4WeightOnly(group_size, True) if torchao:
            said = ao.Int4WeightOnlyConfig(group_size, int4_choose_qparams_algorithm="hqq")
        case s.UintX(bits, group_size, False) if torchao:
            said = ao.IntxWeightOnlyConfig(
                getattr(torch, f"int{bits}"), ao.PerGroup(group_size), ao.MappingType.ASYMMETRIC
            )
        case s.UintX(2 | 3 | 4 as bits, group_size, False) if group_size > 8:
            said = (bits, group_size, False)
        case s.Int8DynamicActivation() if torchao:
            said = ao.Int8DynamicActivationInt8WeightConfig()
        case s.Int8Embedding() if torchao:
            said = ao.IntxWeightOnlyConfig(torch.int8, ao.PerAxis(0))
        case s.Int8DynamicActivationInt4Weight(group_size) if torchao:
            said = ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(group_size))
        case s.Float8WeightOnly() if torchao:
            said = ao.Float8WeightOnlyConfig()
        case s.Float8DynamicActivation(granularity) if torchao:
            by = ao.PerRow() if granularity == "row" else ao.PerTensor()
            said = ao.Float8DynamicActivationFloat8WeightConfig(granularity=by)
        case _:
            raise LookupError
    return (
        config_to_dict(said)
        if torchao
        else dict(zip(("bits", "group_size", "sym"), said, strict=True))
    )


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
        pattern, _, value = line.rpartition("=")
        test = re.compile(pattern).search
        yield (lambda name, test=test: test(f"{name}.weight")), value.lower()


_RULES = {
    "torchao": _torchao_rules, "gptqmodel": _gptqmodel_rules, "llama.cpp": _llama_cpp_rules,
}  # fmt: skip
