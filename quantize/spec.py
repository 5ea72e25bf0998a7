"""The names of quantization schemes: "int4wo-64-hqq" ⇄ a frozen dataclass.

A spec says what the numbers are, never how they are multiplied: that is a kernel, and
quantize/registry.py finds one. `str(parse(name)) == name` for every valid name.

A scheme's `pattern` is its spelling: {field} stands for one of the field's `choices`, and [-word]
for a switch of that name.
"""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from errors import UsageError

GROUP_SIZES = (32, 64, 128, 256)
_LETTERS = {"group_size": "G", "bits": "N"}


@dataclass(frozen=True)
class Spec:
    """One scheme; `numerics` says what it does to the linear layers.

    Raises UsageError for a field outside its choices.
    """

    pattern: ClassVar[str]
    numerics: ClassVar[str]
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--quantization {self}: {_takes(type(self), name)}")

    def __str__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        name = re.sub(r"\[-(\w+)\]", lambda m: f"-{m[1]}" if fields[m[1]] else "", self.pattern)
        return name.format(**fields)


@dataclass(frozen=True)
class FullPrecision(Spec):
    pattern = "none"
    numerics = "weights as --precision has them"


@dataclass(frozen=True)
class Int8WeightOnly(Spec):
    pattern = "int8wo"
    numerics = "int8 weights, symmetric, one scale per output row"


@dataclass(frozen=True)
class Int8DynamicActivation(Spec):
    pattern = "int8dq"
    numerics = "int8wo's weights, and activations rounded to int8 per token as they come"


@dataclass(frozen=True)
class Int4WeightOnly(Spec):
    pattern = "int4wo-{group_size}[-hqq]"
    numerics = "4-bit weights, a 16-bit scale and zero point for every G columns"
    choices = {"group_size": GROUP_SIZES}
    group_size: int = 64
    hqq: bool = False


@dataclass(frozen=True)
class Int8DynamicActivationInt4Weight(Spec):
    pattern = "int8dq-int4wo-{group_size}"
    numerics = "4-bit symmetric weights, a 16-bit scale for every G columns; int8 activations"
    choices = {"group_size": GROUP_SIZES}
    group_size: int = 32


@dataclass(frozen=True)
class Float8WeightOnly(Spec):
    pattern = "float8wo"
    numerics = "float8 (E4M3) weights, one scale per output row"


@dataclass(frozen=True)
class Float8DynamicActivation(Spec):
    pattern = "float8dq-{granularity}"
    numerics = "float8 weights and activations, one scale per row or per tensor"
    choices = {"granularity": ("tensor", "row")}
    granularity: str = "row"


@dataclass(frozen=True)
class Float6(Spec):
    pattern = "fp6"
    numerics = "6-bit floating point (E3M2) weights, one scale per output row"


@dataclass(frozen=True)
class UintX(Spec):
    pattern = "uintx-{bits}-{group_size}[-hqq]"
    numerics = "N-bit weights, a 16-bit scale and zero point for every G columns"
    choices = {"bits": (1, 2, 3, 4, 5, 6, 7), "group_size": (8, 16, *GROUP_SIZES)}
    bits: int = 4
    group_size: int = 64
    hqq: bool = False


@dataclass(frozen=True)
class SparseMarlin(Spec):
    pattern = "sparse-marlin[-wanda]"
    numerics = "2:4 sparse 4-bit symmetric weights, a 16-bit scale for every 64 columns"
    wanda: bool = False


@dataclass(frozen=True)
class MxFloat4(Spec):
    pattern = "mxfp4"
    numerics = "4-bit floating point (E2M1) weights, a power of two for every 32 columns"


@dataclass(frozen=True)
class NvFloat4(Spec):
    pattern = "nvfp4"
    numerics = "4-bit floating point (E2M1) weights, a float8 scale for every 16 columns"


@dataclass(frozen=True)
class Int8Embedding(Spec):
    pattern = "embed-int8"
    numerics = "int8wo, and the embedding's table in int8 too, one scale per token"


@dataclass(frozen=True)
class AutoQuant(Spec):
    pattern = "autoquant[-int4]"
    numerics = "per layer shape the fastest scheme measured here that keeps --min_sqnr"
    int4: bool = False


@dataclass(frozen=True)
class BitsAndBytes(Spec):
    pattern = "bnb-{form}"
    numerics = "bitsandbytes' int8 (activations too), or 4-bit nf4 or fp4 in blocks of 64"
    choices = {"form": ("int8", "nf4", "fp4")}
    form: str = "nf4"


SPECS: tuple[type[Spec], ...] = (
    FullPrecision,
    Int8WeightOnly,
    Int8DynamicActivation,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Float8WeightOnly,
    Float8DynamicActivation,
    Float6,
    UintX,
    SparseMarlin,
    MxFloat4,
    NvFloat4,
    Int8Embedding,
    AutoQuant,
    BitsAndBytes,
)


def parse(name: str) -> Spec:
    """The spec that `name` spells; UsageError, with every valid form and the nearest, if none."""
    for spec in SPECS:
        if found := _regex(spec).fullmatch(name):
            return spec(**_values(spec, found))
    # A right form with a wrong number deserves to hear which numbers are right.
    for spec in SPECS:
        if found := _regex(spec, strict=False).fullmatch(name):
            wrong = (n for n in spec.choices if found[n] not in map(str, spec.choices[n]))
            raise UsageError(f"--quantization {name}: {_takes(spec, next(wrong))}")
    # What stands before the first field counts too: "int4wo" is nearer to int4wo-G than to int8wo.
    known = {str(spec): str(spec) for spec in every_spec()}
    known |= {spec.pattern.partition("-{")[0]: form(spec) for spec in SPECS}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; nearest: {known[near[0]]}" if near else ""
    raise UsageError(f"--quantization {name!r} is no scheme{hint}. Schemes: {', '.join(forms())}")


def forms() -> list[str]:
    """Every scheme's spelling, as help texts have it: "int4wo-G[-hqq]"."""
    return [form(spec) for spec in SPECS]


def form(spec: type[Spec]) -> str:
    def shown(field: re.Match[str]) -> str:
        return _LETTERS.get(field[1]) or "{" + ",".join(map(str, spec.choices[field[1]])) + "}"

    return re.sub(r"\{(\w+)\}", shown, spec.pattern)


def every_spec() -> Iterator[Spec]:
    """Every spec there is, scheme by scheme."""
    for spec in SPECS:
        fields = [field.name for field in dataclasses.fields(spec)]
        for values in itertools.product(*(spec.choices.get(f, (False, True)) for f in fields)):
            yield spec(**dict(zip(fields, values, strict=True)))


def _takes(spec: type[Spec], name: str) -> str:
    *others, last = map(str, spec.choices[name])
    meaning = f"{_LETTERS[name]} in {form(spec)}" if name in _LETTERS else form(spec)
    return f"{meaning} is {', '.join(others)} or {last}"


def _regex(spec: type[Spec], strict: bool = True) -> re.Pattern[str]:
    """What the scheme's names look like; not `strict`, any number may stand for a choice."""

    def alternatives(field: re.Match[str]) -> str:
        allowed = "|".join(map(str, spec.choices[field[1]])) if strict else r"\d+"
        return f"(?P<{field[1]}>{allowed})"

    optional = re.sub(r"\[-(\w+)\]", r"(?P<\1>-\1)?", spec.pattern)
    return re.compile(re.sub(r"\{(\w+)\}", alternatives, optional))


def _values(spec: type[Spec], found: re.Match[str]) -> dict[str, Any]:
    return {
        field.name: next(v for v in spec.choices[field.name] if str(v) == found[field.name])
        if field.name in spec.choices
        else found[field.name] is not None
        for field in dataclasses.fields(spec)
    }
