"""What a file of measurements says of itself: the command, the day, the code and the machine.

    write_json("rows.json", rows)          # {"about": …, "rows": …}

A table in the documentation takes its caption from it.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quantbench import files, host
from quantbench.log import shell
from quantbench.text import counted
from quantbench.typed_json import to_json

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quantbench", "torch", "torchao", "triton", "bitsandbytes")
# Flags of the kernel, and what people call these instructions; the widest first.
VECTORS = {"avx512_vnni": "AVX-512 VNNI", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}


@dataclass(frozen=True)
class Origin:
    """What a file of measurements says of their origin."""

    command: str  # that measured them
    date: str  # 2026-11-22, local time
    commit: str | None
    machine: str
    versions: dict[str, str | None]  # None: not installed

    def caption(self, elsewhere: str = "") -> str:
        """One line of Markdown. elsewhere: the document that has the command, if it is not to
        stand here."""
        packages = [f"{name} {self.versions[name]}" for name in ("torch", "torchao")
                    if self.versions.get(name)]  # fmt: skip
        digits, dirty, _ = (self.commit or "").partition("-dirty")
        commit = f"commit {digits[:7]}{dirty}" if digits else "commit not recorded"
        where = ", ".join([self.machine, *packages])
        how = f"[command]({elsewhere})" if elsewhere else f"`{self.command}`"
        return f"<sub>{where}; {self.date}, {commit}: {how}</sub>"


def about() -> Origin:
    """What this process was started with, its machine, commit and versions, and today's date."""
    spec = sys.modules["__main__"].__spec__  # None where Python runs a file instead of a module
    return Origin(
        command=command(sys.argv, spec.name if spec else None),
        date=datetime.date.today().isoformat(),
        commit=git_commit(),
        machine=machine(),
        versions=versions(),
    )


def command(argv: list[str], module: str | None = None) -> str:
    """argv as a person types it: without the folder that this checkout or environment lies in.

    module: what Python was told to run with -m, if it was: tests.compare.trust, compare.__main__.
    """
    program = Path(argv[0])
    if module and module != "__main__":
        words = ["python", "-m", module.removesuffix(".__main__")]
    elif program.name == "__main__.py":
        words = ["python", "-m", program.parent.name]
    elif program.suffix == ".py":
        words = ["python", program.name]
    else:
        words = [program.name]
    return shell.join([*words, *argv[1:]])


def machine() -> str:
    """The card, if there is one, and the processor with the cores that this process may use."""
    return ", ".join([*cards(), processor()])


def cards() -> list[str]:
    """Names of the NVIDIA cards, as the driver's files tell."""
    texts = map(host.read, sorted(host.ROOT.glob("proc/driver/nvidia/gpus/*/information")))
    return [name.strip() for text in texts for name in re.findall(r"^Model:\s*(.+)$", text, re.M)]


def processor() -> str:
    """2 cores of an AMD EPYC (AVX-512 VNNI)."""
    flags = host.cpu_features()
    vectors = [name for flag, name in VECTORS.items() if flag in flags][:1]
    known = ", ".join(["AMX"] * ("amx_int8" in flags) + vectors)
    cores = len(host.affinity() or range(os.cpu_count() or 1))
    called = host.cpuinfo("model name") or platform.machine()
    return f"{counted(cores, 'core')} of {called}" + (f" ({known})" if known else "")


def report_output(path: str | None) -> files.Output:
    """What `write_json` will write, for files.check_outputs."""
    return files.Output("--json", path, files.json_with("about"), "JSON of such a command")


def write_json(path: str | None, value: object) -> None:
    """What --json asks for, if it was given: the value's keys, or "rows" where it is a list, and
    what it says of itself, "about". Raises LogError where that cannot be written."""
    if path is None:
        return
    fields = to_json(value)
    fields = {"rows": fields} if isinstance(fields, list) else fields
    fields = {"about": to_json(about()), **fields}
    files.write_text("--json", path, json.dumps(fields, indent=1) + "\n")


# ------------------------------------------------------------------------------------- the code


def versions() -> dict[str, str | None]:
    """The version of Python and of each package; None for a package that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


@functools.cache
def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache
def git_commit() -> str | None:
    """This checkout's commit, "-dirty" when it has changes but to benchmarks.txt, to which runs
    append; None for an installed copy.

    A copy inside another project's repository is no checkout: git would name that project's commit.
    """
    top = _git("rev-parse", "--show-toplevel")
    if top is None or not os.path.samefile(top, ROOT):
        return None
    if _git("ls-files", "--error-unmatch", str(Path(__file__).relative_to(ROOT))) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks.txt")
    return commit and commit + ("-dirty" if changed else "")


def knows(commit: str) -> bool:
    """Whether the history of this checkout has the commit, given by its digits; True where there
    is no whole history to ask."""
    is_complete = _git("rev-parse", "--is-shallow-repository") == "false"
    return not is_complete or _git("cat-file", "-e", f"{commit}^{{commit}}") is not None


def _git(*arguments: str) -> str | None:
    """What git says, in our folder; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
