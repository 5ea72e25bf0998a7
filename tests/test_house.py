"""The house's one rule of construction: a file imports only from floors below its own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    {"errors"},
    {"devices", "ops"},
    {"kv_cache"},
    {"quantize", "models", "benchlog"},
    {"cli"},
    {"run"},
    {"generate"},
    {"compare"},
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
FILES = sorted(
    path for room in FLOOR for path in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")]
)


def imports(path: Path) -> set[str]:
    """The rooms and packages a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    if path.name == "__main__.py":
        return  # a command stands on top of the house, wherever its file lies: nobody imports it
    room = room_of(path)
    upward = {name for name in imports(path) if FLOOR.get(name, -1) > FLOOR[room]}
    beside = {name for name in imports(path) if FLOOR.get(name) == FLOOR[room]} - {room}
    assert not upward and not beside


def test_every_room_is_on_a_floor():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert rooms <= set(FLOOR)


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "benchlog"], ids=str)
def test_the_log_needs_no_torch(path):
    assert not imports(path) & {"torch", "torchao", "numpy", "transformers"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_file_edits_the_module_search_path(path):
    attributes = {n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    assert not any(ast.unparse(node) == "sys.path" for node in attributes)
