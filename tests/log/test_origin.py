"""Where code comes from: a checkout names its commit, a copy in another repository names none."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TELL = "from quantbench.log.origin import git_commit; print(git_commit())"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder, *arguments):
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def told(folder):
    done = subprocess.run(
        [sys.executable, "-c", TELL], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def copy(folder):
    ignored = shutil.ignore_patterns("__pycache__")
    (folder / "quantbench").mkdir(parents=True)
    shutil.copytree(ROOT / "quantbench/log", folder / "quantbench/log", ignore=ignored)
    (folder / "quantbench/__init__.py").touch()


def commit(folder):
    git(folder, "init", "-q")
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


def test_a_checkout_names_its_commit(tmp_path):
    copy(tmp_path)
    hash = commit(tmp_path)
    assert told(tmp_path) == hash and re.fullmatch("[0-9a-f]{40}", hash)
    (tmp_path / "quantbench/log/origin.py").open("a").write("\n")
    assert told(tmp_path) == f"{hash}-dirty"


def test_an_installed_copy_in_somebody_s_repository_names_none(tmp_path):
    """An installation into a folder of theirs, whether they commit it or not."""
    vendor = tmp_path / "vendor"
    copy(vendor)
    assert told(vendor) == "None"
    commit(tmp_path)
    assert told(vendor) == "None"


def test_a_copy_at_the_top_that_they_do_not_track_names_none(tmp_path):
    (tmp_path / ".gitignore").write_text("quantbench/\n")
    copy(tmp_path)
    commit(tmp_path)
    assert told(tmp_path) == "None"
