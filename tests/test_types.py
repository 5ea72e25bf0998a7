"""Public functions of run/ and log/ take and return types, no dicts of anything."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "quantbench"
FILES = sorted(path for name in ("run", "log") for path in (PACKAGE / name).rglob("*.py"))


def untyped(path):
    """The parameters and results of public functions and methods that are dicts of anything."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for hint in filter(None, (*(argument.annotation for argument in given), node.returns)):
                if "dict[str, Any]" in ast.unparse(hint):
                    yield f"{path.name}: {node.name}: {ast.unparse(hint)}"


def test_no_public_function_takes_or_returns_dicts_of_anything():
    assert len(FILES) > 30
    assert [line for path in FILES for line in untyped(path)] == []
