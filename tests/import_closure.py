"""What one has to read to read generate.py: its static import closure, files and lines.

python tests/import_closure.py [--list]
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def closure(first: Path) -> list[Path]:
    """The project's files that `first` imports, directly or not, at their top; itself included.
    Imports for type checkers and those inside functions are left out."""
    found, new = {first.resolve()}, [first]
    while new:
        for name in imported(ast.parse(new.pop().read_text())):
            if (path := file_of(name)) and path.resolve() not in found:
                found.add(path.resolve())
                new.append(path)
    return sorted(found)


def imported(module: ast.Module) -> list[str]:
    """Names that a module imports at its top: modules, and what may be modules of packages."""
    names = []
    for node in module.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def file_of(name: str) -> Path | None:
    if not name.startswith("quantbench"):
        return None
    path = ROOT / Path(*name.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


if __name__ == "__main__":
    files = closure(ROOT / "generate.py")
    counts = {file: len(file.read_text().splitlines()) for file in files}
    if "--list" in sys.argv:
        for file, lines in sorted(counts.items(), key=lambda item: item[1]):
            print(f"{lines:5} {file.relative_to(ROOT)}")
    print(f"generate.py reaches {len(files)} files, {sum(counts.values()):,} lines")
