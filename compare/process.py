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

from errors import QuantbenchError

COMMAND = (sys.executable, "-m", "compare.worker")
ROOT = Path(__file__).parent.parent
# After each parallel loop, threads spin for a while in case another one follows. GNU's OpenMP,
# which torch's own builds carry, gives up after a few milliseconds; Intel's, which others carry,
# after 200: the next arm's sample would begin beside it.
ENVIRONMENT = {"KMP_BLOCKTIME": "5"}


class WorkerFailed(QuantbenchError):
    """What the worker said, or how it ended without a word."""

    def __init__(self, reason: str, kind: str = "dead") -> None:
        """`kind`: memory, where that was short; usage, where a person asked for what cannot be;
        other; dead, where the worker cannot be asked anything more."""
        super().__init__(reason)
        self.kind = kind


class Process:
    """One worker. Its stderr goes to a file that is gone with it."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.stderr = tempfile.TemporaryFile()
        search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A session of its own: Ctrl-C on the terminal is for us, and we end it with all the
        # processes that compilers started in it.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            start_new_session=True,
            env={**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(search)},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The worker's answer. Raises WorkerFailed."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise WorkerFailed(self._last_words())
        answer = json.loads(line)
        if "failed" in answer:
            raise WorkerFailed(answer["failed"], answer["kind"])
        found: dict[str, Any] = answer["did"]
        return found

    def close(self) -> None:
        """End it, and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with contextlib.suppress(OSError):
                stream.close()
        self.stderr.close()

    def _last_words(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "killed (SIGKILL), as the system does when memory runs out"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}: {lines[-1] if lines else 'no word on stderr'}"
