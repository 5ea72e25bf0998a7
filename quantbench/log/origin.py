"""What code made a number: versions of packages, and this checkout's commit."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quantbench", "torch", "torchao", "triton", "bitsandbytes")


def versions() -> dict[str, str | None]:
    """The version of Python and of each package; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def git_commit() -> str | None:
    """This checkout's commit, "-dirty" when it has changes; None for an installed copy.

    A copy inside another project's repository is no checkout: git would name that project's commit.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None or not os.path.samefile(top, ROOT):
        return None
    if _git("ls-files", "--error-unmatch", str(Path(__file__).relative_to(ROOT))) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def knows(commit: str) -> bool:
    """Whether the history of this checkout has the commit, given by its digits; True where there
    is no whole history to ask."""
    whole = _git("rev-parse", "--is-shallow-repository") == "false"
    return not whole or _git("cat-file", "-e", f"{commit}^{{commit}}") is not None


def _git(*arguments: str) -> str | None:
    """What git says, in our folder; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
