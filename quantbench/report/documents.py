"""Blocks inside Markdown, between two markers, each written by a function of its name.

    <!-- readme: speeds docs/data/speeds.json -->
    | scheme | …
    <!-- end -->

    rewritten("README.md", text, BLOCKS)

A block is rewritten whole; what stands outside of blocks is never touched. Those here are what the
program itself answers: options, schemes, cache sizes, functions, and keys of JSON, from the
dataclasses that write it; report/doc_tables.py has those of measured figures.
"""

import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig, option_table
from quantbench.quality.thresholds import CLASSES
from quantbench.quantize import spec
from quantbench.report.columns import size, table
from quantbench.text import shown
from quantbench.typed_json import OMITTED

Block = Callable[[Sequence[str]], str]  # from the words behind the block's name to Markdown
BEGIN = re.compile(r"^<!-- readme: (?P<words>[^\n]*?) -->$", re.M)
END = "<!-- end -->"
FENCE = re.compile(r"^```+", re.M)
TAG = re.compile(r"<(?!/?sub>)")
MODULES = (  # whose documentation is written
    *("quantbench.answer.recommend", "quantbench.answer.row", "quantbench.estimate.predict"),
    *("quantbench.generate", "quantbench.log.about", "quantbench.models", "quantbench.quantize"),
    *("quantbench.run.facts", "quantbench.run.machine"),
)


def rewritten(name: str, text: str, blocks: Mapping[str, Block]) -> str:
    """The text, every block as its function writes it today.

    Raises UsageError, with the document's name and line, for a block of an unknown name, one that
    has no end, and one inside another.
    """
    written: list[str] = []
    place = 0
    for begin in BEGIN.finditer(text):
        line = text.count("\n", 0, begin.start()) + 1
        where = f"{name}, line {line}"
        end = text.find(f"\n{END}", begin.end())
        following = BEGIN.search(text, begin.end())
        if end < 0 or (following and following.start() < end):
            raise UsageError(f"{where}: {begin[0]} needs a line {END} after it")
        kind, *words = begin["words"].split() or [""]
        _check_inside(where, Path(name), words)
        if kind not in blocks:
            raise UsageError(f"{where}: no table {kind!r}; there are {', '.join(blocks)}")
        try:
            block = blocks[kind](words)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            why = f"its data do not fit this table: {error}"
            raise UsageError(f"{where}: {begin[0]}: {why}") from error
        written += [text[place : begin.end()], "\n\n", _harmless(block), "\n"]
        place = end
    return "".join([*written, text[place:]])


def _check_inside(where: str, document: Path, words: Sequence[str]) -> None:
    """Raise UsageError for a file that does not lie below the document's folder."""
    for word in words:
        path = Path(os.path.realpath(word))
        if os.path.lexists(word) and not path.is_relative_to(document.resolve().parent):
            raise UsageError(f"{where}: {shown(word)} does not lie in the document's folder")


def _harmless(block: str) -> str:
    """The block without what would end it, and without HTML but for our captions'."""
    lines, fence = [], ""
    for line in block.split("\n"):
        opened = FENCE.match(line)
        if fence or opened:
            lines.append(f" {line}" if line.startswith("<!--") else line)
            fence = "" if line == fence else fence or (opened[0] if opened else "")
        else:
            lines.append(TAG.sub("&lt;", line))
    return "\n".join(lines)


def fenced(text: str) -> str:
    """Text as a block of code, by a fence that it does not hold."""
    longest = max(map(len, FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text}\n{fence}"


# ------------------------------------------------------------------------------------- the program

# The model that the last column of `cache_bytes` is about.
LLAMA_3_1 = {"heads": 8, "head_dim": 128, "layers": 32, "positions": 131072}
# For each cache the layout of keys and values, and the bytes of one head's key by head_dim.
CACHE_BYTES: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "dense": ("as `--precision` has them", lambda width: 2 * width),
    "int8": ("a scale for each token and head", lambda width: width + 2),
    "fp8": ("a scale for each token and head", lambda width: width + 2),
    "int4": ("a scale for every 32 of head_dim", lambda width: width / 2 + width / 16),
}


def options(words: Sequence[str]) -> str:
    """options: those of generate.py."""
    rows = []
    for name, option in option_table().items():
        takes = option.kind.metavar or ""
        default = getattr(RunConfig(), name)
        given = f"`--{name}{' ' * bool(takes)}{takes}`"
        shown = "off" if default is False else "" if default is None else str(default)
        rows.append((given, shown, option.help))
    return table(("option", "default", "meaning"), rows)


def schemes(words: Sequence[str]) -> str:
    """schemes: the forms of --quantization."""
    rows = [(f"`{form}`", said) for form, said in spec.numerics().items()]
    return table(("name", "what it does to the linear layers"), rows)


def cache_bytes(words: Sequence[str]) -> str:
    """cache_bytes: what each KV cache takes, from shapes."""
    layers, positions = LLAMA_3_1["layers"], LLAMA_3_1["positions"]
    rows = []
    for name, (how, of_head) in CACHE_BYTES.items():
        each = 2 * LLAMA_3_1["heads"] * of_head(LLAMA_3_1["head_dim"])  # keys and values
        rows.append((f"`{name}`", how, f"{each:.0f}", size(each * layers * positions)))
    of_all = f"all {layers} layers, {positions} positions"
    return table(("`--kv_cache`", "keys and values", "bytes per position and layer", of_all), rows)


def kl_classes(words: Sequence[str]) -> str:
    """kl_classes: what a KL divergence means, and what published models have."""
    rows = [(f"{most:g}", word, source) for most, word, source in CLASSES]
    return table(("KL, nats a token, up to", "class", "a published model"), rows)


# quant_method and format of Hugging Face folders: label in logs, bits per weight in the file, and
# the form that kernels read.
METHODS = (
    ("`gptq`, 4 bits, groups of 128, symmetric", "gptq-4-128", 4 + 20 / 128,
     "int-4-128-float16-none"),
    ("the same with zero points", "gptq-4-128", 4 + 20 / 128, "uint-4-128-float16-uint8"),
    ("`awq`, 4 bits, version GEMM", "awq-4-128", 4 + 20 / 128, "uint-4-128-float16-uint8"),
    ("`compressed-tensors`, `pack-quantized`", "w4a16-128", 4 + 16 / 128,
     "int-4-128-bfloat16-none"),
    ("`int-quantized`, `naive-quantized`", "w8a16", 8, "int-8-0-bfloat16-none"),
    ("`float-quantized`, and `fp8` without blocks", "fp8", 8, "fp8-8-0-bfloat16-none"),
    ("the same in blocks of 128 by 128", "fp8", 8, "fp8-8-128-float32-none"),
    ("`nvfp4-pack-quantized`", "nvfp4", 4.5, "fp4-4-16-e4m3-none"),
    ("`mxfp4-pack-quantized`", "mxfp4", 4.25, "fp4-4-32-e8m0-none"),
    ("`mxfp4` (gpt-oss)", "mxfp4", 4.25, "fp4-4-32-e8m0-none"),
    ("`bitsandbytes` nf4, nested scales", "bnb-nf4", 4 + 8 / 64, "nf4-4-64-float32-none"),
    ("`bitsandbytes` int8", "bnb-int8", 8, "int-8-0-float32-none"),
    ("`torchao` in safetensors, float8", "fp8", 8, "fp8-8-0-float32-none"),
    ("`torchao` in safetensors, int4", "w4a16-128", 4.25, "int-4-128-bfloat16-bfloat16"),
)  # fmt: skip


def bits_here(form: str) -> float:
    """Bits per weight of a large matrix in the order in which the C++ kernels read it."""
    import torch

    from quantbench.ops.cpu import linear
    from quantbench.quantize.registry import SCHEMES

    asked = spec.parse_layer(f"stored-{form}")
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    packed = SCHEMES[type(asked)].quantize(weight, asked)
    return 8 * linear.pack(packed.parts, 4096).numel() / weight.numel()


def file_methods(words: Sequence[str]) -> str:
    """file_methods: quantized Hugging Face folders, and their bits per weight."""
    rows = [
        (method, f"`{label}`", f"{bits:.3g}", f"{bits_here(form):.3g}")
        for method, label, bits, form in METHODS
    ]
    return table(("`quant_method`, format", "label in logs", "in the file", "here"), rows)


def gguf_types(words: Sequence[str]) -> str:
    """gguf_types: GGUF's types that kernels read, and their bits per weight."""
    import gguf

    from quantbench.models.formats.gguf_blocks import PACKED

    rows = []
    for name, kind in PACKED.items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        here = bits_here(str(kind.form).removeprefix("stored-"))
        rows.append((name, f"{8 * size / values:.4g}", f"{here:.4g}"))
    return table(("type", "in the file", "here, on the CPU"), rows)


# ---------------------------------------------------------------------------------------- source

FIELD = re.compile(r"    (?P<name>[a-z]\w*): [^#]*(?:# (?P<comment>.*))?$")
MODULE = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")  # what stands before a type's own name


def fields(words: Sequence[str]) -> str:
    """fields MODULE:CLASS …: a table for each of these dataclasses."""
    if not words:
        raise UsageError("fields needs dataclasses, as MODULE:CLASS")
    return "\n\n".join(map(_fields_of, words))


def api(words: Sequence[str]) -> str:
    """api MODULE:NAME …: signature and docstring of functions, and of a class's public methods."""
    return "\n\n".join(part for word in words for part in _described(word, _named(word)))


def _described(word: str, what: Any) -> Iterator[str]:
    name = word.replace(":", ".")
    described = fenced(f"{_signature(what)}\n\n{inspect.getdoc(what)}")
    yield f"## {name}\n\n{described}"
    for method, function in vars(what).items() if isinstance(what, type) else ():
        if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
            described = fenced(f"{_signature(function)}\n\n{inspect.getdoc(function)}")
            yield f"**{method}**\n\n{described}"


def _signature(what: Any) -> str:
    """name(argument: type = default, …) -> type"""
    text = re.sub(r"<function .*? at \w+>", "…", str(inspect.signature(what)))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations that are strings
    text = MODULE.sub("", text).replace("(self, ", "(").replace("(self)", "()")
    return f"{what.__name__}{text.removesuffix(' -> None') if isinstance(what, type) else text}"


def _named(word: str) -> Any:
    module, _, name = word.partition(":")
    if module not in MODULES:  # importing runs a module's code
        raise UsageError(f"{shown(word)} is of no module of {', '.join(MODULES)}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"nothing is called {word}: {error}") from None


def _fields_of(word: str) -> str:
    kind = _named(word)
    comments = _comments(kind)
    rows = [
        (f"`{field.name}`", f"`{_type(field)}`", comments.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]
    said = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return f"**{kind.__name__}.** {said}\n\n{table(('key', 'type', 'meaning'), rows)}"


def _type(field: "dataclasses.Field[object]") -> str:
    """float, list[str], …; "or no key" where the key is left out of the JSON."""
    kind: Any = field.type
    text = MODULE.sub("", kind if isinstance(kind, str) else inspect.formatannotation(kind))
    if field.metadata.get(OMITTED):
        return f"{text.replace(' | None', '')} or no key"
    return text.replace("None", "null")


def _comments(kind: type) -> dict[str, str]:
    """The comment of each field: above it, behind it, or both."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if line.startswith("    # "):
            above.append(line[6:])
            continue
        if match := FIELD.match(line):
            behind = [match["comment"]] if match["comment"] else []
            comments[match["name"]] = "; ".join([" ".join(above)] * bool(above) + behind)
        above = []
    return comments


TABLES: Mapping[str, Block] = {
    block.__name__: block
    for block in (api, fields, file_methods, gguf_types, options, schemes, cache_bytes, kl_classes)
}
