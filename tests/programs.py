"""Programs that tests start: those that end by themselves, and those that are watched and ended;
and commands of quantbench that run inside this process."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from quantbench.__main__ import commands

ROOT = Path(__file__).parents[1]
OLD_LOG = ROOT / "tests" / "data" / "torchao_llama_log.txt"


def command(*words: object, **settings: Any) -> Result:
    """How a command ends, here: its exit code, and what it prints."""
    return CliRunner().invoke(commands, [*map(str, words)], prog_name="quantbench", **settings)


def worked(*words: object, **settings: Any) -> Result:
    """A command that has ended with 0."""
    result = command(*words, **settings)
    assert result.exit_code == 0, result.output
    return result


def json_of(path: Path, *words: object) -> tuple[Any, Result]:
    """What a command writes to this path as --json, and the command, which has ended with 0."""
    result = worked(*words, "--json", path)
    return json.loads(path.read_text()), result


def ran(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended; it ran in the repository's root, if `cwd` says nothing else."""
    given = {"cwd": ROOT, "capture_output": True, "text": True, **settings}
    return subprocess.run(list(map(str, words)), **given)


def python(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    return ran(sys.executable, *words, **settings)


def finished(*words: object, **settings: Any) -> subprocess.CompletedProcess[str]:
    """A Python program that has ended with 0."""
    done = python(*words, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def git(folder: Path, *words: str) -> str:
    """What git prints in that folder, as somebody whose commits it takes."""
    settings = ("user.name=somebody", "user.email=somebody@example.org", "commit.gpgsign=false")
    given = [word for setting in settings for word in ("-c", setting)]
    return ran("git", *given, *words, cwd=folder, check=True).stdout.strip()


def copy_of_tree(folder: Path) -> Path:
    """A copy of the project in a folder, without documents, tests and what git ignores."""
    hidden = (".*", "__pycache__", "build", "demo", "docs", "tests", "*.egg-info")
    ignored = shutil.ignore_patterns(*hidden)
    return Path(shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignored))


def started(*words: object, **settings: Any) -> subprocess.Popen[str]:
    """A Python program that runs on, and that Ctrl-C ends: what a shell starts in the background is
    deaf to it, and so is what the tests start then."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    given["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, *map(str, words)], **given | settings)


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Whether it runs or waits; a process whose parent has not read its end does neither."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
