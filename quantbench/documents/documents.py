"""Blocks inside Markdown, between two markers, each written by a function of its name.

    <!-- readme: speeds docs/data/speeds.json -->
    | scheme | …
    <!-- end -->

    rewritten("README.md", text, BLOCKS)

A block is rewritten whole; what stands outside of blocks is never touched. Those here are what the
program itself answers: options, schemes, functions, and keys of JSON, from the dataclasses that
write it; documents/tables.py has those of measured figures.
"""

import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig, option_table
from quantbench.quality.thresholds import CLASSES
from quantbench.quantize import spec
from quantbench.report.block import Block
from quantbench.report.columns import table
from quantbench.text import shown
from quantbench.typed_json import OMITTED

BEGIN = re.compile(r"^<!-- readme: (?P<words>[^\n]*?) -->$", re.M)
END = "<!-- end -->"
FENCE = re.compile(r"^```+", re.M)
TAG = re.compile(r"<(?!/?sub>)")
MODULES = (  # whose documentation is written
    *("quantbench.compare.recommend", "quantbench.compare.row", "quantbench.estimate.predict"),
    *("quantbench.generate", "quantbench.log.origin", "quantbench.models", "quantbench.quantize"),
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
    """Raise UsageError for a file that is not below the document's folder."""
    for word in words:
        path = Path(os.path.realpath(word))
        if os.path.lexists(word) and not path.is_relative_to(document.resolve().parent):
            raise UsageError(f"{where}: {shown(word)} is not in the document's folder")


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


def kl_classes(words: Sequence[str]) -> str:
    """kl_classes: what a KL divergence means, and what published models have."""
    rows = [(f"{most:g}", word, source) for most, word, source in CLASSES]
    return table(("KL, nats a token, up to", "class", "a published model"), rows)


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
    block.__name__: block for block in (api, fields, options, schemes, kl_classes)
}
