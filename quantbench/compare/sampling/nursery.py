"""A process that has imported what every worker imports, and forks workers: they start at once.

Importing torch, torchao and the compiler takes two seconds, and a comparison starts each arm
several times. An arm's peaks have to be those of generate.py, so a fork first touches the pages of
libraries that the nursery has in memory (compare/sampling/file_pages.py). Where that cannot be done
the nursery is not `honest`: an arm's first process, whose peaks count, is then started anew.

`Nursery` is the coordinator's side of it. `python -m quantbench.compare.sampling.nursery FD` is the
process, which reads requests from the socket FD and ends when whoever holds its other end does.

On Linux only, and only with a torch for the CPU: CUDA does not survive a fork. Elsewhere `fork`
gives None, and workers are started the long way.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from quantbench.run.environment import prepare

IMPORTED = (  # no more: all that is here counts as memory
    *(f"quantbench.run.{name}" for name in ("loading", "decoding", "sizes", "bandwidth")),
    *("quantbench.run.saved_model", "quantbench.quantize.registry"),
    "quantbench.compare.sampling.clock",
)
MESSAGE = 1 << 20  # bytes, at most: a command line
# What a nursery says of itself when it begins: it cannot fork safely; it forks; and the memory of
# its forks counts as that of processes that were started.
CANNOT, FORKS, HONEST = 0, 1, 2
ALIKE = 0.98  # least share of the nursery's resident pages of files that a fork must have


class Nursery:
    """Forks processes; starts with the first of them. `close` ends the nursery alone."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.skill = CANNOT

    @property
    def honest(self) -> bool:
        """Whether the memory of a fork counts as that of a process which was started."""
        if self.process is None and sys.platform == "linux":
            self._begin()
        return self.skill == HONEST

    def fork(self, command: Sequence[str], streams: Sequence[int]) -> int | None:
        """The number of a new process that runs sys.executable's `command`, as in
        ["-m", "module", …] or ["file.py", …], in a session of its own, with those three streams;
        None where that cannot be had."""
        if self.process is None and sys.platform == "linux":
            self._begin()
        return self._ask({"command": list(command)}, streams)

    def wait(self, pid: int) -> int:
        """The exit code of a process that ended or is about to, as subprocess has it."""
        code = self._ask({"wait": pid})
        return -signal.SIGKILL if code is None else code

    def close(self) -> None:
        if self.process and self.control:
            self.control.close()
            self.process.kill()
            self.process.wait()
            self.control = None

    def _begin(self) -> None:
        self.control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quantbench.compare.sampling.nursery", str(child.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[child.fileno()],
            start_new_session=True,
            env={**self.environment, "OPENBLAS_NUM_THREADS": "1"},  # no threads, to be forked
        )
        child.close()
        self.skill = self._answer() or CANNOT
        if self.skill == CANNOT:
            self.close()

    def _ask(self, request: Mapping[str, object], streams: Sequence[int] = ()) -> int | None:
        if self.control is None:
            return None
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], streams)
        except OSError:
            return None
        return self._answer()

    def _answer(self) -> int | None:
        assert self.control
        try:
            answer: int | None = json.loads(self.control.recv(MESSAGE) or b"null")
        except OSError:
            return None
        return answer


def serve(control: socket.socket) -> None:
    """Import, say whether forking is safe, then fork and wait as asked."""
    prepare()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    from quantbench import generate  # noqa: F401
    from quantbench.compare.sampling.file_pages import touch

    safe = torch.version.cuda is None and torch.version.hip is None and not torch.xpu._is_compiled()
    pages = _pages_to_touch() if safe and _is_alone() else []
    skill = (HONEST if pages else FORKS) if safe and _is_alone() else CANNOT
    control.send(json.dumps(skill).encode())
    while True:
        message, streams, *_ = socket.recv_fds(control, MESSAGE, 3)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            control.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            with contextlib.suppress(OSError):
                touch(pages)
            _become(request["command"], streams)
        for stream in streams:
            os.close(stream)
        control.send(json.dumps(pid).encode())


def _is_alone() -> bool:
    """Whether this process has one thread. A fork has one, whatever locks the others held, and
    waits for ever for a team of OpenMP's that its parent had."""
    return len(os.listdir("/proc/self/task")) == 1


def _pages_to_touch() -> list[tuple[int, int]]:
    """The pages of mapped files that every fork should touch, so that it has as much in memory as a
    process that was started. None where touching does not achieve that, which one fork tries out.
    """
    from quantbench.compare.sampling.file_pages import resident, resident_bytes, touch

    try:
        pages, own = resident(), resident_bytes()
    except (OSError, ValueError):
        return []
    pid = os.fork()
    if pid == 0:
        alike = False
        with contextlib.suppress(OSError):
            touch(pages)
            alike = resident_bytes() >= ALIKE * own
        os._exit(int(not alike))
    _, status = os.waitpid(pid, 0)
    return [] if os.waitstatus_to_exitcode(status) else pages


def _become(command: list[str], streams: Sequence[int]) -> None:
    """Run the command in this process, which ends with it."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                file.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
