"""What code made a number: versions of packages, and this checkout's commit."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("quantbench", "torch", "torchao", "triton", "bitsandbytes")


def versions() -> dict[str, str | None]:
    """Of Python and of each package; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> str | None:
    """This checkout's commit, "-dirty" when it has changes; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
