"""A worker process as the coordinator sees it: ask, and get an answer or why there is none."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare.sampling.nursery import Nursery
from errors import QuantbenchError, UsageError
from run.environment import defaults

COMMAND = (sys.executable, "-m", "compare.sampling.worker")
ROOT = Path(__file__).parents[2]


class WorkerFailed(QuantbenchError):
    """What the worker said, or how it ended without a word."""

    def __init__(self, reason: str, kind: str = "dead") -> None:
        """`kind`: memory, where that was short; other; dead, where the worker cannot be asked
        anything more."""
        super().__init__(reason)
        self.kind = kind


class WorkerRefused(WorkerFailed, UsageError):
    """A person asked for what cannot be."""


def environment() -> dict[str, str]:
    """The variables of every worker: those of generate.py's process, and where our modules lie."""
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**defaults(os.environ), "PYTHONPATH": os.pathsep.join(search)}


class Process:
    """One worker. Its stderr goes to a file that is gone with it."""

    def __init__(self, command: Sequence[str] = COMMAND, nursery: Nursery | None = None) -> None:
        """`nursery`: what forks it, if it can."""
        self.stderr = tempfile.TemporaryFile()
        self.spawned: subprocess.Popen[bytes] | None = None
        self.nursery = nursery
        self.exit_code: int | None = None
        read, asked = os.pipe()
        answered, write = os.pipe()
        streams = (read, write, self.stderr.fileno())
        pid = nursery.fork(command[1:], streams) if nursery else None
        if pid is None:
            # A session of its own: Ctrl-C on the terminal is for us, and we end it with all the
            # processes that compilers started in it.
            self.spawned = subprocess.Popen(
                command,
                stdin=read,
                stdout=write,
                stderr=self.stderr,
                start_new_session=True,
                env=environment(),
            )
            pid = self.spawned.pid
        self.pid: int = pid
        os.close(read)
        os.close(write)
        self.stdin, self.stdout = os.fdopen(asked, "w"), os.fdopen(answered)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The worker's answer. Raises WorkerFailed; WorkerRefused, which is a UsageError, too,
        where the worker met one."""
        try:
            self.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.stdin.flush()
            line = self.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise WorkerFailed(self._last_words())
        answer = json.loads(line)
        if "failed" in answer:
            failure = WorkerRefused if answer["kind"] == "usage" else WorkerFailed
            raise failure(answer["failed"], answer["kind"])
        found: dict[str, Any] = answer["did"]
        return found

    def close(self) -> None:
        """End it, and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it may have no session of its own yet
            self._wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self.stderr.close()

    def _wait(self) -> int:
        if self.exit_code is None:
            self.exit_code = self.spawned.wait() if self.spawned else self._forked_exit_code()
        return self.exit_code

    def _forked_exit_code(self) -> int:
        assert self.nursery
        return self.nursery.wait(self.pid)

    def _last_words(self) -> str:
        code = self._wait()
        if code == -signal.SIGKILL:
            return "killed (SIGKILL), as the system does when memory runs out"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}: {lines[-1] if lines else 'no word on stderr'}"
