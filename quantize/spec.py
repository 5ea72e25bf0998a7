"""The grammar of --quantization: "int4wo-64-hqq" ⇄ a frozen dataclass. No torch here.

    parse("int4wo-64")      # Int4WeightOnly(group_size=64), a Spec: a scheme
    parse("autoquant")      # AutoQuant(), a Selection: schemes chosen per layer by measuring

A spec says what the numbers are, never how they are multiplied: that is a kernel, and
quantize/registry.py finds one. `str(parse(name)) == name` for every valid name.

A new scheme is a class here, which is its spelling, and a file in quantize/schemes/, which carries
it out. Nothing else lists the schemes.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quantbench.errors import UsageError
from quantbench.quantize import grammar
from quantbench.quantize.grammar import Quantization, form

GROUP_SIZES = (32, 64, 128, 256)
RECIPE = re.compile(r"(.+\.json)(?:@([0-9a-f]{8}))?", re.DOTALL)  # a file, and its digest
# How scales and codes are chosen, if not from the range of a group: the word that ends a name, and
# what a person who chooses has to know.
WAYS = {
    "": "",
    "hqq": ", less with fitted zero points",
    "gptq": ", much less by calibration",
    "gptq-inorder": ", much less by calibration",  # without act-order, for a comparison
    "awq": ", less by calibration",
    "wanda": ", less if calibrated",
}
ACTIVATIONS = ("int8", "int8-static", "float8-row", "float8-tensor", "float8-static", "float8-128")
# By what a text activates (run/calibration.py).
CALIBRATED = ("gptq", "gptq-inorder", "awq", "wanda")


@dataclass(frozen=True)
class Spec(Quantization):
    """One scheme: the same numbers in every linear layer."""

    file: ClassVar[str]  # of quantize/schemes/
    way: str = dataclasses.field(default="", kw_only=True)  # of WAYS, if `choices` has any

    @property
    def plain(self) -> str:
        return self.phrase + WAYS[self.way]

    @property
    def calibrated(self) -> bool:
        return self.way in CALIBRATED

    @property
    def multiplied(self) -> str | None:
        """The dtype of both factors of a product, where activations are rounded to it; None where
        weights become --precision's numbers first."""
        return None

    @property
    def rounds_activations(self) -> bool:
        return self.multiplied is not None

    @property
    def scheme(self) -> "Spec":
        return self

    @property
    def candidates(self) -> "tuple[Spec, ...]":
        return (self,)


@dataclass(frozen=True)
class Selection(Quantization):
    """A rule that chooses for each layer among `candidates` and full precision, by measuring."""

    scheme = None
    calibrated = True


@dataclass(frozen=True)
class FullPrecision(Spec):
    file = "full_precision"
    pattern = "none"
    numerics = "weights as --precision has them"
    phrase = "not quantized: what the others are compared with"
    gguf = "BF16"
    shown = ("none",)
    formats = ("gguf",)


@dataclass(frozen=True)
class Int8WeightOnly(Spec):
    file = "int8"
    pattern = "int8wo"
    numerics = "int8 weights, symmetric, one scale per output row"
    phrase = "half the memory; the loss in quality can hardly be measured"
    gguf = "Q8_0"
    shown = ("int8wo",)
    formats = ("compressed-tensors", "torchao")


@dataclass(frozen=True)
class Int8DynamicActivation(Spec):
    file = "int8"
    pattern = "int8dq"
    numerics = "int8wo's weights, and activations rounded to int8 per token as they come"
    phrase = "int8wo, and arithmetic in 8 bits: for long prompts and large batches"
    gguf = "Q8_0"
    shown = ("int8dq",)
    multiplied = "int8"


@dataclass(frozen=True)
class Int8Embedding(Spec):
    file = "int8"
    pattern = "embed-int8"
    numerics = "int8wo, and the embedding's table in int8 too, one scale per token"
    phrase = "int8wo, and the embedding too: for small models with large vocabularies"
    gguf = "Q8_0"
    shown = ("embed-int8",)


@dataclass(frozen=True)
class Float8WeightOnly(Spec):
    file = "float8"
    pattern = "float8wo"
    numerics = "float8 (E4M3) weights, one scale per output row"
    phrase = "as large as int8wo, and a little less exact"
    gguf = "Q8_0"
    shown = ("float8wo",)
    formats = ("compressed-tensors",)


@dataclass(frozen=True)
class Float8DynamicActivation(Spec):
    file = "float8"
    pattern = "float8dq-{granularity}"
    numerics = "float8 weights and activations, one scale per row or per tensor"
    phrase = "arithmetic in 8-bit floats: for GPUs that have it"
    gguf = "Q8_0"
    shown = ("float8dq-row", "float8dq-tensor")
    choices = {"granularity": ("tensor", "row")}
    multiplied = "float8"
    granularity: str = "row"


@dataclass(frozen=True)
class Float6(Spec):
    file = "fp6"
    pattern = "fp6"
    numerics = "6-bit floating point (E3M2) weights, one scale per output row"
    phrase = "three eighths of the memory; a small loss"
    gguf = "Q6_K"
    shown = ("fp6",)


@dataclass(frozen=True)
class Int4WeightOnly(Spec):
    file = "int4"
    pattern = "int4wo-{group_size}[-{way}]"
    numerics = "4-bit weights, a 16-bit scale and zero point for every G columns"
    phrase = "about a quarter of the memory; a loss that grows with G"
    shown = (
        *("int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256"),
        *("int4wo-64-hqq", "int4wo-64-gptq", "int4wo-256-hqq"),
    )
    choices = {"group_size": GROUP_SIZES, "way": ("", "hqq", "gptq", "gptq-inorder", "awq")}
    bits = 4
    group_size: int = 64

    @property
    def gguf(self) -> str:
        return "Q4_1" if self.group_size == 32 else "Q4_0"


@dataclass(frozen=True)
class Int8DynamicActivationInt4Weight(Spec):
    file = "int4"
    pattern = "int8dq-int4wo-{group_size}[-{way}]"
    numerics = "4-bit symmetric weights, a 16-bit scale for every G columns; int8 activations"
    phrase = "4-bit weights and 8-bit arithmetic, as llama.cpp computes"
    gguf = "Q4_0"
    shown = ("int8dq-int4wo-32",)
    formats = ("compressed-tensors", "gguf")
    choices = {"group_size": GROUP_SIZES, "way": ("", "gptq", "gptq-inorder", "awq")}
    rounds_activations = True
    bits = 4
    group_size: int = 32

    def fits(self, format: str) -> bool:
        return format in self.formats and (format != "gguf" or self.group_size == 32)  # Q4_0


@dataclass(frozen=True)
class MxFloat4(Spec):
    file = "fp4"
    pattern = "mxfp4[-{way}]"
    numerics = "4-bit floating point (E2M1) weights, a power of two for every 32 columns"
    phrase = "4-bit floats as the MX standard has them"
    gguf = "MXFP4"
    shown = ("mxfp4",)
    choices = {"way": ("", "gptq", "gptq-inorder", "awq")}


@dataclass(frozen=True)
class NvFloat4(Spec):
    file = "fp4"
    pattern = "nvfp4"
    numerics = "4-bit floating point (E2M1) weights, a float8 scale for every 16 columns"
    phrase = "4-bit floats as NVIDIA's newest GPUs have them"
    gguf = "NVFP4"
    shown = ("nvfp4",)


@dataclass(frozen=True)
class BitsAndBytes(Spec):
    file = "bitsandbytes"
    pattern = "bnb-{form}"
    numerics = "bitsandbytes' int8 (activations too), or 4-bit nf4 or fp4 in blocks of 64"
    phrase = "bitsandbytes' own kernels, as transformers and QLoRA use them"
    shown = ("bnb-int8", "bnb-nf4", "bnb-fp4")
    choices = {"form": ("int8", "nf4", "fp4")}
    form: str = "nf4"

    @property
    def multiplied(self) -> str | None:
        return "int8" if self.form == "int8" else None

    @property
    def gguf(self) -> str:
        return "Q8_0" if self.form == "int8" else "IQ4_NL"


@dataclass(frozen=True)
class UintX(Spec):
    file = "uintx"
    pattern = "uintx-{bits}-{group_size}[-{way}]"
    numerics = "N-bit weights, a 16-bit scale and zero point for every G columns"
    phrase = "{} bits: the loss is {}"
    shown = (
        *("uintx-7-64", "uintx-6-64", "uintx-5-64", "uintx-4-64", "uintx-3-64"),
        *("uintx-3-64-hqq", "uintx-2-8", "uintx-2-64", "uintx-2-64-hqq"),
    )  # not uintx-1: two codes at the ends of the range are no useful quantization (docs/LOG.md)
    choices = {
        "bits": (1, 2, 3, 4, 5, 6, 7),
        "group_size": (8, 16, *GROUP_SIZES),
        "way": ("", "hqq", "gptq", "gptq-inorder", "awq"),
    }
    bits: int = 4
    group_size: int = 64

    @property
    def plain(self) -> str:
        losses = {1: "very large", 2: "very large", 3: "large", 4: "moderate"}
        loss = losses.get(self.bits, "small")
        return super().plain.format(self.bits, loss)

    @property
    def gguf(self) -> str:
        if self.group_size < 32:  # no type of theirs has more scales
            return "-"
        return {1: "IQ1_M", 7: "Q8_0"}.get(self.bits, f"Q{self.bits}_K")


@dataclass(frozen=True)
class SparseMarlin(Spec):
    file = "sparse_marlin"
    pattern = "sparse-marlin[-{way}]"
    numerics = "2:4 sparse 4-bit symmetric weights, a 16-bit scale for every 64 columns"
    phrase = "half of the weights dropped, the rest 4-bit: a very large loss"
    gguf = "Q3_K"
    shown = ("sparse-marlin", "sparse-marlin-wanda")
    choices = {"way": ("", "wanda")}


@dataclass(frozen=True)
class AutoQuant(Selection):
    pattern = "autoquant[-int4]"
    numerics = "per layer shape the fastest scheme measured here that keeps --min_sqnr"
    phrase = "measures, and takes the fastest for each layer shape: slow to load"
    shown = ("autoquant", "autoquant-int4")
    int4: bool = False

    @property
    def candidates(self) -> tuple[Spec, ...]:
        eight_bits = (
            *(Int8WeightOnly(), Int8DynamicActivation(), Float8WeightOnly()),
            Float8DynamicActivation("row"),
        )
        four_bits = Int4WeightOnly(64), Int8DynamicActivationInt4Weight(32)
        return (*eight_bits, *four_bits) if self.int4 else eight_bits


@dataclass(frozen=True)
class AsIs(Spec):
    """Each layer as the checkpoint's file has it: what `layers` says, once it was opened."""

    file = "stored"
    pattern = "as-is"
    numerics = "the numbers that the checkpoint's file holds, on kernels that read them"
    phrase = "as the file has it"
    layers: tuple[tuple[str, Spec], ...] = ()  # by the layer's name
    label: str = "as-is"  # in logs

    @property
    def name(self) -> str:
        return self.label

    @property
    def candidates(self) -> tuple[Spec, ...]:
        return tuple(dict.fromkeys(spec for _, spec in self.layers))

    rounds_activations = Quantization.rounds_activations

    def fits(self, format: str) -> bool:
        if format == "gguf" and self.label.startswith("gguf-"):  # its blocks are copied
            return True
        return all(spec.fits(format) for spec in self.candidates if spec != FullPrecision())


@dataclass(frozen=True)
class Stored(Spec):
    """How a checkpoint's file holds one layer's weight, in terms of ops/formats.py; as-is keeps it.
    Nobody asks for it by name."""

    file = "stored"
    pattern = "stored-{format}-{bits}-{group_size}-{scale}-{zero}[-outer][-whole][-{activation}]"
    numerics = "as a checkpoint's file has them"
    phrase = "as the file has it"
    choices = {
        "format": ("int", "uint", "fp8", "fp4", "nf4", "bnb-fp4", "iq4nl"),
        "bits": (1, 2, 3, 4, 5, 6, 7, 8),
        "group_size": (0, 8, 16, *GROUP_SIZES, 512, 1024),  # 0: the whole row
        "scale": ("float32", "float16", "bfloat16", "int8", "e8m0", "e4m3"),
        "zero": ("none", "float32", "float16", "bfloat16", "int8", "uint8"),
        "activation": ("", *ACTIVATIONS),
    }
    format: str = "int"
    bits: int = 4
    group_size: int = 32
    scale: str = "float16"
    zero: str = "none"
    outer: bool = False  # scales are multiplied by one for 256 columns
    whole: bool = False  # everything is multiplied by one number
    activation: str = ""  # how activations are rounded (quantize/activation.py)

    @property
    def rounds_activations(self) -> bool:
        return self.activation != ""

    def fits(self, format: str) -> bool:
        if self.rounds_activations:
            return False
        if format == "gguf":  # as Q4_0 and Q8_0
            return str(self) in (f"stored-int-{bits}-32-float16-none" for bits in (4, 8))
        symmetric = self.zero == "none" and not (self.outer or self.whole)
        if format == "torchao":
            return symmetric and (self.format, self.bits, self.group_size) == ("int", 8, 0)
        integers = self.format == "int" and self.bits in (4, 8)
        return symmetric and (integers or (self.format, self.group_size) == ("fp8", 0))


# In the order of their definitions.
SPECS: tuple[type[Spec], ...] = tuple(spec for spec in Spec.__subclasses__() if spec is not Stored)
SELECTIONS: tuple[type[Selection], ...] = tuple(Selection.__subclasses__())
_ALL: tuple[type[Spec] | type[Selection], ...] = (*SPECS, *SELECTIONS)

# One of each kind, for tables: what a person chooses from.
SHOWN = tuple(name for spec in SPECS for name in spec.shown)
MEASURED = tuple(name for selection in SELECTIONS for name in selection.shown)

START_WITH = tuple(map(str, (Int8WeightOnly(), Float6(), Int4WeightOnly(64))))

# What compare's commands measure unless told: 16, 8 and 4 bits a weight, and one more of each kind.
COMPARED = ("none", "int8wo", "int4wo-128", "fp6", "sparse-marlin", "uintx-2-64")


def parse(name: str, option: str = "--quantization") -> Spec | Selection:
    """What `name`, given to `option`, says: the recipe in a file NAME.json, also with a digest as
    NAME.json@2fcf02fa; or as `named`."""
    if match := RECIPE.fullmatch(name):
        from quantbench.quantize import recipe  # which imports this module

        path, digest = match.groups()
        return recipe.read(path, digest, option)
    return named(name, option)


def named(name: str, option: str = "--quantization") -> Spec | Selection:
    """What `name`, given to `option`, spells; UsageError, with every valid form and the nearest, if
    nothing."""
    for spec in _ALL:
        if parsed := grammar.parsed(spec, name):
            return parsed
    # For a right form with a wrong number the error lists the right numbers.
    for spec in _ALL:
        if match := grammar.regex(spec, strict=False).fullmatch(name):
            wrong = (n for n in spec.choices if (match[n] or "") not in map(str, spec.choices[n]))
            raise UsageError(f"{option} {name}: {grammar.takes(spec, next(wrong))}")
    from quantbench.quantize.nearest import nearest

    if near := nearest(name):
        all_of_them = "quantbench schemes --list has all"
        raise UsageError(f"{option} {name!r} is no scheme; nearest: {near}. {all_of_them}")
    raise UsageError(f"{option} {name!r} is no scheme. Schemes: {', '.join(forms())}")


def parse_scheme(name: str) -> Spec:
    """The scheme that `name` spells; UsageError for anything else, selections and recipes
    included."""
    if RECIPE.fullmatch(name):
        raise UsageError(f"--quantization {name}: a recipe has a scheme per layer; here name one")
    if spec := named(name).scheme:
        return spec
    raise UsageError(
        f"--quantization {name} is known only after measuring; here a scheme has to be named: "
        + ", ".join(map(form, SPECS))
    )


def parse_layer(name: str) -> Spec:
    """The scheme of one layer of a file: as `parse_scheme`, or how the file stores it."""
    return grammar.parsed(Stored, name) or parse_scheme(name)


def refuse_format(spec: Quantization, format: str) -> None:
    """Raise UsageError where a format (--format) does not hold the weights of a scheme exactly."""
    if not spec.fits(format):
        plain = (scheme for scheme in every_spec() if scheme != AsIs() and not scheme.calibrated)
        fitting = (str(scheme) for scheme in plain if scheme.fits(format))
        raise UsageError(
            f"--format {format} does not hold the numbers of {spec.name}; schemes that fit: "
            + ", ".join(fitting)
        )


def forms() -> list[str]:
    """Every scheme's spelling, as help texts have it: "int4wo-G[-{hqq,gptq,gptq-inorder,awq}]"."""
    return [form(spec) for spec in _ALL]


def numerics() -> dict[str, str]:
    """What each form of a scheme's name does to the linear layers, in words."""
    return {form(spec): spec.numerics for spec in _ALL}


def every_spec() -> Iterator[Quantization]:
    """Every spec there is, scheme by scheme."""
    return itertools.chain.from_iterable(map(grammar.every, _ALL))
