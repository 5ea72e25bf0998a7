"""The README's two commands, run as a newcomer would; and what the README says of the options."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchlog import log
from benchlog.config import option_table, parse, split

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv" / "installed-dev").exists(), reason="needs the Makefile's .venv"
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The working tree without what git ignores, the installed .venv linked into it."""
    folder = tmp_path_factory.mktemp("clone") / "quantbench"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", "*.info")
    shutil.copytree(ROOT, folder, ignore=ignored)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    return folder


def make(folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_make_demo(clone):
    before = len(log.read(str(clone / "benchmarks.txt")).records)
    done = make(clone, "demo")
    assert done.returncode == 0, done.stderr
    schemes = ["none", "int8wo", "int4wo-64", "uintx-2-64"]
    for scheme in schemes:
        assert re.search(rf"^{scheme} +[\d.]+", done.stdout, re.M)
    assert "benchmarks.txt" in done.stdout and (clone / "demo" / "report.md").exists()
    added = [record for _, record in log.read(str(clone / "benchmarks.txt")).records[before:]]
    assert [r.quant for r in added] == ["None", *schemes[1:]] and all(r.compile for r in added)
    assert "Warning" not in done.stdout + done.stderr
    assert not re.search(r"Traceback|WARNING|W\d{4} ", done.stdout + done.stderr)


def test_make_test_runs_pytest(clone):
    done = make(clone, "test", "ARGS=-q tests/test_house.py")
    assert done.returncode == 0 and " passed" in done.stdout


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_a_second_call_installs_nothing(clone, target):
    assert "pip install" not in make(clone, "--dry-run", target).stdout


def test_every_option_is_in_the_readme():
    for name in option_table():
        assert f"`--{name}" in README, name


def test_commands_in_the_readme_parse():
    text = README.replace("\\\n", "")
    commands = re.findall(r"^(?:    )?(python generate\.py .*?)(?:  +#.*)?$", text, re.M)
    assert len(commands) >= 5
    for command in commands:
        parse(split(command)[2:])
