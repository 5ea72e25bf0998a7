"""Workers of another commit of this repository, to measure it beside the present one.

    with old_commit("HEAD~20") as old:
        Session(store, rule, old.command_of, has_turns=old.has_turns)       # arm 0 is the commit's

The commit is checked out into a temporary git worktree. Its workers run on the same interpreter and
packages, import only the commit's own files, and build its C++ kernels into the usual cache, where
they are told apart by a hash of their source.
"""

import contextlib
import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.bench import process
from quantbench.errors import QuantbenchError, UsageError
from quantbench.text import shown

# Modules of the worker and of the builder of the kernels, of present commits and of older ones.
WORKERS = (
    *("quantbench.bench.worker", "quantbench.compare.sampling.worker"),
    *("compare.sampling.worker", "compare.worker"),
)
BUILDERS = ("quantbench.ops.cpu.build", "ops.cpu.build")
TURNS = "quantbench.run.turns"  # before it was written, workers took whole samples only
# Run with -c: replaces the present folder by the commit's in the search path for modules, also for
# processes that the worker starts.
FROM_FOLDER = (
    "import os, runpy, sys; old, new = sys.argv[1:3]; "
    "sys.path[:] = [old] + [p for p in sys.path[1:] if os.path.realpath(p or '.') != new]; "
    "os.environ['PYTHONPATH'] = old; "
)
LAUNCH = FROM_FOLDER + "runpy.run_module(sys.argv[3], run_name='__main__', alter_sys=True)"
# Prints why the commit's C++ kernels cannot be used; commits that cannot say so print nothing.
REFUSAL = FROM_FOLDER + (
    "import importlib; build = importlib.import_module(sys.argv[3]); print(build.refusal() or '')"
)


@dataclass(frozen=True)
class OldCommit:
    """A commit that is checked out."""

    name: str  # abbreviated hash
    folder: Path
    worker: str  # the module of its worker

    def not_built(self) -> str | None:
        """Why its C++ kernels do not build where the present ones do. Builds both, if need be.

        Without its kernels the commit would run on torch's, and be compared by these.
        """
        reason = _refusal(self.folder)
        return reason if reason and not _refusal(process.ROOT) else None

    @property
    def has_ranks(self) -> bool:
        """Whether its worker can be several ranks."""
        package = self.worker.rpartition(".")[0]
        return _first(self.folder, [f"{package}.ranks"]) is not None

    @property
    def has_turns(self) -> bool:
        """Whether its worker takes turns."""
        return _first(self.folder, [TURNS]) is not None

    def command_of(self, number: int) -> Sequence[str]:
        """The commands of workers where the baseline, arm 0, is the old commit."""
        if number:
            return process.COMMAND
        folders = (str(self.folder), str(process.ROOT.resolve()))
        return (sys.executable, "-c", LAUNCH, *folders, self.worker)


@contextlib.contextmanager
def old_commit(commit: str) -> Iterator[OldCommit]:
    """Check out `commit`, and remove the checkout at the end.

    Raises UsageError for a commit that does not exist or has no worker, QuantbenchError where git
    cannot check it out.
    """
    if commit.startswith("-"):
        raise UsageError(f"--against takes a commit; given: {shown(commit)}")
    if process.INSTALLED:  # inside somebody's repository git would look for the commit there
        raise UsageError(
            f"--against {shown(commit)}: this is an installed copy; run it in a checkout of "
            "quantbench, which has the old commits"
        )
    resolved = _git("rev-parse", "--verify", "--quiet", "--short", f"{commit}^{{commit}}")
    if resolved.returncode:
        why = "there is no such commit here"
        if _git("rev-parse", "--git-dir").returncode:
            why = f"{process.ROOT} is no git repository, which has the old commits"
        raise UsageError(f"--against {shown(commit)}: {why}; git log lists commits")
    name = resolved.stdout.strip()
    with tempfile.TemporaryDirectory(prefix="quantbench-against-") as scratch:
        folder = Path(scratch, name)
        added = _git("worktree", "add", "--detach", str(folder), name)
        try:
            if added.returncode:
                last = (added.stderr.strip().splitlines() or ["git says nothing"])[-1]
                raise QuantbenchError(f"--against {commit}: cannot be checked out: {last}")
            worker = _first(folder, WORKERS)
            if worker is None:
                raise UsageError(
                    f"--against {commit}: that commit has no {WORKERS[0]}, which measures; take a "
                    "younger one"
                )
            yield OldCommit(name, folder, worker)
        finally:
            _git("worktree", "remove", "--force", str(folder))


@functools.cache  # asked for every line of a log
def _refusal(folder: Path) -> str | None:
    """Why the C++ kernels in this checkout cannot be used; None if they can, or it does not say."""
    module = _first(folder, BUILDERS) or BUILDERS[0]
    command = [sys.executable, "-c", REFUSAL, str(folder), str(process.ROOT.resolve()), module]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip() if done.returncode == 0 else None


def _first(folder: Path, modules: Iterable[str]) -> str | None:
    """The first of these modules that the checkout has."""
    files = {name: Path(folder, *name.split(".")).with_suffix(".py") for name in modules}
    return next((name for name, file in files.items() if file.is_file()), None)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(process.ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise QuantbenchError(f"--against needs git: {error.strerror}") from None
