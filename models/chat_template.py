"""A chat template, rendered as transformers does, in a process of its own: a template is a program
of somebody else's, which may loop for ever, or ask for all memory there is.

    python models/chat_template.py < request    # {"template": …, "values": …, "now": …}

Prints {"text": …}, or {"invalid": …}, {"refused": …} or {"failed": …} with the reason. Values are
what the template sees by name; now is what strftime_now formats, in ISO form. The caller
(models/chat.py) limits the time. jinja2 is the only import from outside the standard library.
"""

import contextlib
import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30  # bytes of address space
LONGEST = 10_000_000  # characters of a rendered conversation


class Refused(Exception):
    """What a template raises itself, by raise_exception."""


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant says, for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call, as in transformers: what the body assigns is unknown behind it.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def rendered(template: str, values: dict[str, Any], now: str) -> str:
    """The text. Raises what the template raises."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = datetime.datetime.fromisoformat(now).strftime
    text = environment.from_string(template).render(values)
    if len(text) > LONGEST:
        raise ValueError(f"it made a text of {len(text):,} characters; {LONGEST:,} are accepted")
    return text


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, and has no such options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip


def _refuse(message: str) -> None:
    raise Refused(message)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": rendered(**request)}
    except Refused as error:
        return {"refused": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"invalid": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"failed": f"it takes more than {MEMORY >> 30} GB of memory"}
    except Exception as error:  # whatever a template raises is the template's fault
        return {"failed": f"{type(error).__name__}: {error}"}


def _limit_memory() -> None:
    with contextlib.suppress(
        ImportError, ValueError, OSError
    ):  # Windows and macOS have no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


if __name__ == "__main__":
    request = json.loads(sys.stdin.buffer.read())
    _limit_memory()
    sys.stdout.write(json.dumps(answer(request)))
