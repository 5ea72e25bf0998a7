"""What messages and documents tell people to install can be installed."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [*PROJECT["dependencies"], *(name for names in EXTRAS.values() for name in names)]
DISTRIBUTIONS = {re.split(r"[\[<>=;]", text)[0].strip() for text in REQUIREMENTS}
COMMAND = re.compile(r"pip install\s+((?:-[-\w]+\s+)*)([\"']?)([^\s\"'`)]+)\2")


def to_install():
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."]
    files = [*ROOT.glob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    files += [path for folder in folders for path in folder.rglob("*.py")]
    for path in files:
        if path != Path(__file__):
            for match in COMMAND.finditer(path.read_text()):
                yield str(path.relative_to(ROOT)), match[3]


def test_the_project_does_not_depend_on_itself_by_name():
    """It is on no index: whoever took the name there would be installed."""
    assert PROJECT["name"] not in DISTRIBUTIONS


@pytest.mark.parametrize(("file", "target"), sorted(set(to_install())), ids=str)
def test_what_one_is_told_to_install_exists(file, target):
    """Packages of others that pyproject names, or this clone with extras that it has."""
    name, _, extras = target.rstrip(".,;]").partition("[")
    if target.startswith("."):
        assert set(filter(None, extras.split(","))) <= set(EXTRAS), f"{file}: {target}"
    else:
        assert re.split("[<>=]", name)[0] in DISTRIBUTIONS, f"{file}: {target}"
