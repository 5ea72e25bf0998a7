"""What crosses a file in run/, compare/ and log/ has a type of its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("run", "compare", "log")
    for path in (ROOT / "quantbench" / folder).rglob("*.py")
)


def public_hints(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Each hint of a parameter or result of a public function or method, with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            given = node.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            hints = [*(parameter.annotation for parameter in parameters), node.returns]
            yield from ((node.name, hint) for hint in hints if hint is not None)


def untyped(source: str) -> list[str]:
    return [
        f"{name}: {ast.unparse(hint)}"
        for name, hint in public_hints(ast.parse(source))
        if "dict[str, Any]" in ast.unparse(hint)
    ]


@pytest.mark.parametrize("file", FILES)
def test_no_public_function_takes_or_returns_dicts_of_anything(file):
    assert untyped((ROOT / file).read_text()) == []


def test_one_is_noticed_wherever_it_is():
    assert untyped("def f(x: list[dict[str, Any]] | None): ...") == [
        "f: list[dict[str, Any]] | None"
    ]
    assert untyped("class A:\n def g(self) -> dict[str, Any]: ...") == ["g: dict[str, Any]"]
    assert untyped("def _own(x: dict[str, Any]): ...\ndef f(**x: Any): ...") == []
