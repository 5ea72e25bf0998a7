"""What is installed: one name, `quantbench`, with everything else inside it.

In the checkout each folder has a name of its own (`from models import llama`), as the command
`python generate.py` needs. Installed, these names would be top-level modules of everybody's
environment, where `models`, `errors` or `text` are what others call their own files. So the wheel
holds models/llama.py as quantbench/models/llama.py, and `under_one_name` writes `quantbench.`
before the names in its imports. An editable installation leaves the checkout as it is.

Everything else about the project is said in pyproject.toml.
"""

import ast
import re
from collections.abc import Collection
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

NAME = "quantbench"
ROOT = Path(__file__).resolve().parent
ROOMS = sorted({p.parent.name for p in ROOT.glob("*/__init__.py")} - {NAME, "tests"})
MODULES = sorted({path.stem for path in ROOT.glob("*.py")} - {"setup"})
PACKAGES = find_packages(str(ROOT), include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])
DOTTED = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for room in ROOMS
    for path in ROOT.glob(f"{room}/**/*.py")
}
# Files of these kinds in the rooms are installed, too.
DATA = ("cpp", "h", "json", "safetensors", "model", "txt", "html", "css", "js", "svg", "woff2")


def under_one_name(text: str, inside: Collection[str], modules: Collection[str]) -> str:
    """Python source in which every import of a name that is `inside` begins with NAME.

    Strings that are the dotted name of one of `modules`, such as "run.loading:load_quantized",
    get the prefix, too: they name what is imported later. Lines keep their numbers.
    Raises ValueError for `import a.b`, which would bind another name.
    """
    lines = [line.encode() for line in text.splitlines(keepends=True)]

    def replace(node: ast.AST, old: str, new: str) -> None:
        index, column = node.lineno - 1, node.col_offset
        line = lines[index]
        changed = line[column:].replace(old.encode(), new.encode(), 1)
        if changed == line[column:]:
            raise ValueError(f"line {node.lineno}: {old} is not at the beginning of its statement")
        lines[index] = line[:column] + changed

    def is_inside(name: str) -> bool:
        return name.partition(".")[0] in inside

    found = sorted(
        (node for node in ast.walk(ast.parse(text)) if hasattr(node, "lineno")),
        key=lambda node: (node.lineno, node.col_offset),
        reverse=True,  # so that the columns before a change stay right
    )
    for node in found:
        match node:
            case ast.ImportFrom(module=str(module), level=0) if is_inside(module):
                replace(node, f"from {module}", f"from {NAME}.{module}")
            case ast.Import(names=[ast.alias(name=name, asname=asname)]) if is_inside(name):
                package, _, last = name.rpartition(".")
                if package and asname is None:
                    raise ValueError(f"line {node.lineno}: write from {package} import {last}")
                package = f"{NAME}.{package}".rstrip(".")
                replace(node, f"import {name}", f"from {package} import {last}")
            case ast.Import(names=names) if any(is_inside(alias.name) for alias in names):
                raise ValueError(f"line {node.lineno}: one import a line")
            case ast.Constant(value=str(value)) if "." in value and re.fullmatch(
                r"[\w.]+(:\w+)?", value
            ):
                if value.partition(":")[0] in modules:
                    replace(node, value, f"{NAME}.{value}")
    return b"".join(lines).decode()


class BuildPy(build_py):
    """Copies modules into the wheel; the checkout's own modules of the top level, too."""

    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        if package == NAME:
            found += [
                (NAME, name, str(Path(package_dir).parent / f"{name}.py")) for name in MODULES
            ]
        return found

    def build_module(self, module, module_file, package):
        outfile, copied = super().build_module(module, module_file, package)
        text = Path(module_file).read_text("utf-8")
        Path(outfile).write_text(under_one_name(text, {*ROOMS, *MODULES}, DOTTED), "utf-8")
        return outfile, copied


class EditableWheel(editable_wheel):
    """Installs the folders of the checkout under the names that they have there."""

    def finalize_options(self):
        self.distribution.packages = [NAME, *PACKAGES]
        self.distribution.py_modules = MODULES
        self.distribution.package_dir = {"": "."}  # puts the checkout on the path, as one folder
        super().finalize_options()


if __name__ == "__main__":
    setup(
        packages=[NAME, *(f"{NAME}.{package}" for package in PACKAGES)],
        package_dir={f"{NAME}.{room}": room for room in ROOMS},
        package_data={"": [f"**/*.{kind}" for kind in DATA]},
        cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
    )
