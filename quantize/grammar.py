"""What a spec is: the numbers that --quantization names, and how their name is spelled.

    class MX(Spec):
        pattern = "mxfp4[-{way}]"       # form(MX) == "mxfp4[-{gptq,gptq-inorder,awq}]"

A class gives its pattern and the choices of its fields; reading, writing and listing names follow.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from quantbench.errors import UsageError

if TYPE_CHECKING:
    from quantbench.quantize.spec import Spec

Q = TypeVar("Q", bound="Quantization")
_LETTERS = {"group_size": "G", "bits": "N"}
_OPTIONAL = r"\[-(\{?)(\w+)\}?\]"


@dataclass(frozen=True)
class Quantization:
    """What --quantization names: a `Spec` or a `Selection`.

    Raises UsageError for a field outside its choices.
    """

    # The spelling: {field} is one of the field's `choices`, [-{field}] one that may be "", [-word]
    # a switch.
    pattern: ClassVar[str]
    numerics: ClassVar[str]  # what it does to the linear layers, in words
    phrase: ClassVar[str]  # what a person who chooses has to know, in words
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    shown: ClassVar[tuple[str, ...]] = ()  # the names that tables list
    formats: ClassVar[tuple[str, ...]] = ()  # other programs' that may hold its weights: `fits`

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--quantization {self}: {takes(type(self), name)}")

    def __str__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

        def written(optional: re.Match[str]) -> str:
            value = fields[optional[2]]
            return f"-{value if optional[1] else optional[2]}" if value else ""

        return re.sub(_OPTIONAL, written, self.pattern).format(**fields)

    @property
    def name(self) -> str:
        """What the log calls it."""
        return str(self)

    @property
    def scheme(self) -> "Spec | None":
        """The scheme of every layer; None where it is known only after measuring."""
        raise NotImplementedError

    @property
    def candidates(self) -> "tuple[Spec, ...]":
        """The schemes that a layer may get; measuring chooses where there are several."""
        raise NotImplementedError

    @property
    def plain(self) -> str:
        """What a person who chooses has to know, in words."""
        return self.phrase

    @property
    def gguf(self) -> str:
        """llama.cpp's type with a similar number of bits, made in a similar way; "-": none."""
        return "-"

    def fits(self, format: str) -> bool:
        """Whether another program's format (--format) holds its weights exactly."""
        return format in self.formats

    @property
    def rounds_activations(self) -> bool:
        """Whether activations are rounded to 8 bits before they are multiplied."""
        return any(spec.rounds_activations for spec in self.candidates)

    @property
    def calibrated(self) -> bool:
        """Whether a calibration text decides which numbers the weights become."""
        return False


def form(spec: type[Quantization]) -> str:
    """The spelling, as help texts have it."""

    def shown(field: re.Match[str]) -> str:
        choices = [str(choice) for choice in spec.choices[field[1]] if choice != ""]
        several = "{" + ",".join(choices) + "}" if len(choices) > 1 else choices[0]
        return _LETTERS.get(field[1]) or several

    return re.sub(r"\{(\w+)\}", shown, spec.pattern)


def every(spec: type[Q]) -> Iterator[Q]:
    """The spec with each combination of its choices."""
    fields = _spelt(spec)
    for each in itertools.product(*(spec.choices.get(f, (False, True)) for f in fields)):
        yield spec(**dict(zip(fields, each, strict=True)))


def takes(spec: type[Quantization], name: str) -> str:
    """What the field of that name may be, in words."""
    *others, last = map(str, spec.choices[name])
    meaning = f"{_LETTERS[name]} in {form(spec)}" if name in _LETTERS else form(spec)
    return f"{meaning} is {', '.join(others)} or {last}"


def regex(spec: type[Quantization], strict: bool = True) -> re.Pattern[str]:
    """What the scheme's names look like; not `strict`, any number is accepted as a choice."""

    def alternatives(field: re.Match[str]) -> str:
        choices = spec.choices[field[1]]
        allowed = "|".join(str(choice) for choice in choices if choice != "")
        return f"(?P<{field[1]}>{allowed if strict or '' in choices else r'[0-9]+'})"

    switches = re.sub(r"\[-(\w+)\]", r"(?P<\1>-\1)?", spec.pattern)
    optional = re.sub(r"\[(-\{\w+\})\]", r"(?:\1)?", switches)
    return re.compile(re.sub(r"\{(\w+)\}", alternatives, optional))


def parsed(spec: type[Q], name: str) -> Q | None:
    """What the name spells; None where it is none of the spec's."""
    match = regex(spec).fullmatch(name)
    if match is None:
        return None
    fields = {
        field: next(v for v in spec.choices[field] if str(v) == (match[field] or ""))
        if field in spec.choices
        else match[field] is not None
        for field in _spelt(spec)
    }
    return spec(**fields)


def _spelt(spec: type[Quantization]) -> list[str]:
    """The fields that are part of a name."""
    words = re.findall(r"\w+", spec.pattern)
    return [field.name for field in dataclasses.fields(spec) if field.name in words]
