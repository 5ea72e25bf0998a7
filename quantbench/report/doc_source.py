"""Reference pages from the source: keys of JSON, from the dataclasses that write it; functions.

fields(["quantbench.answer.row:Row"])   # a table: key, type, comment
api(["quantbench.models:load"])         # its signature and docstring
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from quantbench.errors import UsageError
from quantbench.report.documents import table
from quantbench.typed_json import OMITTED

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
    yield f"## {name}\n\n```\n{_signature(what)}\n\n{inspect.getdoc(what)}\n```"
    for method, function in vars(what).items() if isinstance(what, type) else ():
        if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
            yield f"**{method}**\n\n```\n{_signature(function)}\n\n{inspect.getdoc(function)}\n```"


def _signature(what: Any) -> str:
    """name(argument: type = default, …) -> type"""
    signature = inspect.signature(what)
    shown: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        default = parameter.default
        given = "…" if inspect.isfunction(default) else repr(default)
        text = f"{parameter.name}: {_plain(parameter.annotation)}"
        shown.append(text if default is parameter.empty else f"{text} = {given}")
    arguments = ", ".join(text for text in shown if not text.startswith("self:"))
    returned = signature.return_annotation
    ends = "" if isinstance(what, type) else f" -> {_plain(returned)}"
    return f"{what.__name__}({arguments}){ends}"


def _named(word: str) -> Any:
    module, _, name = word.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"nothing is called {word}: {error}") from None


def _fields_of(word: str) -> str:
    kind = _named(word)
    comments = _comments(kind)
    rows = [
        (f"`{field.name}`", f"`{_type(field)}`".replace("|", "\\|"), comments.get(field.name, ""))
        for field in dataclasses.fields(kind)
    ]
    said = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return f"**{kind.__name__}.** {said}\n\n{table(('key', 'type', 'meaning'), rows)}"


def _type(field: "dataclasses.Field[object]") -> str:
    """float, list[str], …; "or no key" where the key is left out of the JSON."""
    text = _plain(field.type)
    if field.metadata.get(OMITTED):
        return f"{text.replace(' | None', '')} or no key"
    return text.replace("None", "null")


def _plain(annotation: Any) -> str:
    """A type as one writes it, without its modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return MODULE.sub("", text)


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
    return {name: text.replace("|", "\\|") for name, text in comments.items()}
