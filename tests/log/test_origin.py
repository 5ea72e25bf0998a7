"""Where code comes from: a checkout names its commit, a copy in another repository names none."""

import re
import shutil

import pytest

from tests.programs import ROOT, git, python

TELL = "from quantbench.log.origin import git_commit; print(git_commit())"

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def told(folder):
    return python("-c", TELL, cwd=folder, check=True).stdout.strip()


def copy(folder):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "quantbench/log", folder / "quantbench/log", ignore=ignored)
    for path in (ROOT / "quantbench").glob("*.py"):
        shutil.copy(path, folder / "quantbench")


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
