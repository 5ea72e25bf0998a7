"""A worker process as the coordinator sees it: ask, and get an answer or why there is none."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TypeVar

from quantbench import files, host
from quantbench.bench import ranks
from quantbench.environment import DEFAULTS, check_room
from quantbench.errors import QuantbenchError, UsageError
from quantbench.typed_json import from_json, to_json

COMMAND = (sys.executable, "-m", "quantbench.bench.worker")
ROOT = Path(__file__).parents[2]
INSTALLED = not (ROOT / "generate.py").exists()  # in a checkout it is next to the package
PATIENCE = 5  # seconds for ranks to end
# The template: until it reads its socket, after seconds of importing, it ends with the thread that
# started it (PR_SET_PDEATHSIG and SIGKILL of Linux).
TEMPLATE = """
import ctypes, os, runpy, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[2]):
    runpy.run_module("quantbench.bench.template", run_name="__main__", alter_sys=True)
"""
STOPPED, LOOKS = 60.0, 4  # seconds after which a stopped worker is given up; looks in that time
# Where these exist a worker is started anew: drivers do not survive a fork.
CARDS = Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg")  # the last in WSL
T = TypeVar("T")


class WorkerFailed(QuantbenchError):
    """A request failed, or the worker ended."""

    def __init__(self, reason: str, kind: str = "dead") -> None:
        """`kind`: memory, where there was too little; usage; refused, for another reason that is
        known; other; dead, where the worker has ended."""
        super().__init__(reason)
        self.kind = kind


class WorkerRefused(WorkerFailed, UsageError):
    """The options that the worker was given are wrong."""


def building() -> str:
    """What else the first process does that computes, for a line of progress."""
    if any(files.cache_folder().glob("kernels-*.so")):
        return ""
    return ", and building the C++ kernels (once, up to three minutes)"


def environment() -> dict[str, str]:
    """The variables of every worker: those of generate.py's process, and the checkout's path.

    PYTHONSAFEPATH keeps a file errors.py of the current folder from being taken for ours.
    """
    variables = {**DEFAULTS, **os.environ, "PYTHONSAFEPATH": "1"}
    if INSTALLED:
        return variables
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(search)}


class Template:
    """The process of bench/template.py. It ends with this one."""

    running: "Template | None" = None

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables  # libraries have read them
        self.requests, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                (sys.executable, "-c", TEMPLATE, str(number), str(os.getpid())),
                pass_fds=[number],
                env=variables,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


class Forked:
    """A worker that a template has forked: what Process needs of a subprocess.Popen."""

    returncode: int | None = None

    def __init__(self, template: Template, stderr: IO[bytes]) -> None:
        """Raises OSError if the template has ended."""
        (stdin, own_stdin), (own_stdout, stdout), (own_end, end) = os.pipe(), os.pipe(), os.pipe()
        self.stdin, self.stdout = (
            os.fdopen(own_stdin, "w", encoding="utf-8"),
            os.fdopen(own_stdout, encoding="utf-8"),
        )
        self.end = os.fdopen(own_end)
        try:
            given = [stdin, stdout, stderr.fileno(), end]
            socket.send_fds(template.requests, [os.fsencode(os.getcwd())], given)
        finally:
            for descriptor in (stdin, stdout, end):
                os.close(descriptor)
        number = self.end.readline()
        if not number:
            raise OSError("the template has ended")
        self.pid = int(number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with self.end:
                self.returncode = int(self.end.readline() or -signal.SIGKILL)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def forked(stderr: IO[bytes]) -> Forked | None:
    """A worker with the variables of today; None where it has to be started anew."""
    if sys.platform != "linux" or any(card.exists() for card in CARDS):
        return None
    variables = environment()
    if Template.running is None or Template.running.variables != variables:
        Template.running = Template(variables)
    try:
        return Forked(Template.running, stderr)
    except OSError:
        Template.running = None
        return None


def is_stopped(pid: int) -> bool:
    """Whether this process or a rank that it started was stopped by a signal; on Linux, else
    False. A long load or a compiler is no stop: nobody knows how long these take."""
    stats = map(host.read, (host.ROOT / "proc").glob("[0-9]*/stat"))
    # 12 (its name) S 7 …: the process, its state and its parent.
    found = (re.match(r"([0-9]+) \(.*\) (.) ([0-9]+)", stat, re.DOTALL) for stat in stats)
    own = [match for match in found if match and str(pid) in (match[1], match[3])]
    return any(match[2] == "T" for match in own)


class Process:
    """One worker. Its stderr goes to a temporary file."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        check_room()
        self.stderr = tempfile.TemporaryFile()
        self.is_ranks = ranks.MODULE in command
        # In a separate session, so that Ctrl-C on the terminal reaches only this process, which
        # then ends the worker and every compiler that the worker started.
        fork = forked(self.stderr) if tuple(command) == COMMAND else None
        self.spawned = fork or subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            start_new_session=True,
            env=environment(),
            encoding="utf-8",
        )
        assert self.spawned.stdin and self.spawned.stdout
        self.pid = self.spawned.pid
        self.stdin, self.stdout = self.spawned.stdin, self.spawned.stdout

    def answer(self, kind: type[T], do: str, /, **arguments: object) -> T:
        """`ask`, its answer read as a `kind` of bench/answers.py.

        Raises WorkerFailed as well where the answer is something else.
        """
        value = self.ask(do, **arguments)
        try:
            return from_json(kind, value)
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerFailed(f"answered {do} with something else: {error}", "other") from error

    def ask(self, do: str, /, **arguments: object) -> object:
        """The worker's answer, parsed JSON.

        Raises WorkerFailed; WorkerRefused, which is a UsageError as well, where the worker raised
        a UsageError.
        """
        try:
            self.stdin.write(json.dumps(to_json({"do": do, **arguments})) + "\n")
            self.stdin.flush()
            self._wait()
            line = self.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise WorkerFailed(self._last_words())
        reply = json.loads(line)
        if "failed" in reply:
            failure = WorkerRefused if reply["kind"] == "usage" else WorkerFailed
            raise failure(reply["failed"], reply["kind"])
        return reply["did"]

    def _wait(self) -> None:
        """Wait for an answer. Raises WorkerFailed where the worker was stopped for STOPPED."""
        stops, answered = 0, select.poll()
        answered.register(self.stdout, select.POLLIN)
        while not answered.poll(1000 * STOPPED / LOOKS):
            stops = stops + 1 if is_stopped(self.pid) else 0
            if stops == LOOKS:
                raise WorkerFailed(f"its process was stopped (SIGSTOP) for {STOPPED:g} s")

    def kill(self) -> None:
        """End it, and whatever it started; from another thread, too. Then `close` it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and whatever it started."""
        if self.is_ranks:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self.stdin.close()  # ranks end with their input, and their memory is free then
                self.spawned.wait(PATIENCE)
        self.kill()
        self.spawned.kill()  # it may not have its own session yet
        self.spawned.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self.stderr.close()

    def _last_words(self) -> str:
        code = self.spawned.wait()
        if code == -signal.SIGKILL:
            return "killed (SIGKILL), as the system does when memory runs out"
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}: {lines[-1] if lines else 'nothing on stderr'}"
