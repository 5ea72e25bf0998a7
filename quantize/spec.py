"""The names of quantization schemes: "int8wo" ⇄ a frozen dataclass.

A spec says what the numbers are, never how they are multiplied: that is a kernel, and
quantize/registry.py finds one. `str(parse(name)) == name` for every valid name.
"""

import difflib
from dataclasses import dataclass
from typing import ClassVar

from errors import UsageError


@dataclass(frozen=True)
class Spec:
    """One scheme. `form` is its spelling, `numerics` what it does to the linear layers."""

    form: ClassVar[str]
    numerics: ClassVar[str]

    def __str__(self) -> str:
        return self.form


@dataclass(frozen=True)
class FullPrecision(Spec):
    form = "none"
    numerics = "weights as --precision has them"


@dataclass(frozen=True)
class Int8WeightOnly(Spec):
    form = "int8wo"
    numerics = "int8 weights, symmetric, one scale per output row"


@dataclass(frozen=True)
class Int8DynamicActivation(Spec):
    form = "int8dq"
    numerics = "int8wo's weights, and activations rounded to int8 per token as they come"


SPECS: tuple[type[Spec], ...] = (FullPrecision, Int8WeightOnly, Int8DynamicActivation)


def parse(name: str) -> Spec:
    """The spec that `name` spells; UsageError, with every valid form and the nearest, if none."""
    for spec in SPECS:
        if name == spec.form:
            return spec()
    forms = [spec.form for spec in SPECS]
    near = difflib.get_close_matches(name.lower(), forms, n=1)
    hint = f"; nearest: {near[0]}" if near else ""
    raise UsageError(f"--quantization {name!r} is no scheme{hint}. Schemes: {', '.join(forms)}")
