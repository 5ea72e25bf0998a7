"""Starting the ranks of a run, and ending them all when one of them ends early.

    torchrun --nproc_per_node 2 generate.py …       # torchrun starts the ranks
    python generate.py --tp 2 …                     # or this file does; the log says torchrun

    place()                 # this process among the ranks, from torchrun's variables; None: no rank
    start(config)           # run the command as config.tp ranks, and wait for them

Ranks that this file starts have torchrun's variables, too, but they meet through a file, so that no
port has to be free. A rank that fails writes its message to a file; from all of these, one line is
printed. No torch here: a mistake in the options is reported before it is imported.
"""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from quantbench.cli import RANK_REPORTS
from quantbench.environment import STORE, place
from quantbench.errors import QuantbenchError
from quantbench.log.config import RunConfig, argv

COMMAND = ("-m", "quantbench", "generate")
IN_CHECKOUT = Path(__file__).resolve().parents[2] / "generate.py"
LIFELINE = "QUANTBENCH_LIFELINE"
# What torch's backends say in a rank whose peer has ended: not the cause, only a consequence.
LOST = re.compile(
    r"closed by peer|reset by peer|Broken pipe|another rank has (ended|failed)|NCCL|store"
)
SECONDS_FOR_CAUSE = 3  # in which a cause may follow a consequence
SECONDS_TO_END = 5  # between SIGTERM and SIGKILL


class RankFailed(QuantbenchError):
    """A rank failed, or the system ended it."""

    code = "rank"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def become_rank(config: RunConfig) -> RunConfig:
    """Prepare this process if it is a rank; returns the options that it has to carry out.

    Only rank 0 prints and writes files. A rank whose launcher has ended ends, too.
    """
    where = place()
    if where is None:
        return config
    end_with_launcher()
    config = dataclasses.replace(config, tp=where.size)
    if where.rank == 0:
        return config
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the process ends
    if not config.debug:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # `save` stays: how the model is read depends on it.
    return dataclasses.replace(config, write_result="none", output_json_path=None)


def end_with_launcher() -> None:
    """End this process when its launcher ends, if `Running` started it."""

    def wait(lifeline: int) -> None:
        os.read(lifeline, 1)  # the launcher never writes: this returns when it has ended
        shutil.rmtree(Path(os.environ[STORE]).parent, ignore_errors=True)  # which it left
        os._exit(1)

    if lifeline := os.environ.get(LIFELINE):
        threading.Thread(target=wait, args=(int(lifeline),), daemon=True).start()


# ---------------------------------------------------------------------------------- starting


def start(config: RunConfig) -> None:
    """Run generate.py with these options as config.tp ranks on this machine, until all have ended.

    Raises RankFailed, one line, if one of them fails; the others are ended first.
    """
    program = (str(IN_CHECKOUT),) if IN_CHECKOUT.exists() else COMMAND
    arguments = argv(dataclasses.replace(config, tp=1), said=True)
    with Running([sys.executable, *program, *arguments], config.tp, config.debug) as ranks:
        ranks.wait()


class Running(contextlib.AbstractContextManager["Running"]):
    """The ranks of one run, as processes; those that are left at the end of `with` are ended.

    stdin: of each, as subprocess takes it; None: rank 0 has this process's, the others have none.
    """

    def __init__(
        self, command: Sequence[str], size: int, debug: bool = False, stdin: int | None = None
    ) -> None:
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="quantbench-ranks-"))
        lifeline, self.lifeline = os.pipe()
        shared = {
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            **os.environ,
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size)),
            STORE: str(self.folder / "store"),
            LIFELINE: str(lifeline),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            null = subprocess.DEVNULL if rank else None
            of_rank = {
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                RANK_REPORTS: str(self.folder / f"{rank}.report"),
            }
            with open(self.folder / f"{rank}.stderr", "wb") as stderr:
                process = subprocess.Popen(
                    command,
                    env=shared | of_rank,
                    pass_fds=[lifeline],
                    stdin=null if stdin is None else stdin,
                    stdout=null,
                    stderr=stderr if rank and not debug else None,
                    # Ctrl-C on the terminal reaches only the launcher, which ends the ranks.
                    start_new_session=True,
                )
            self.processes.append(process)
        os.close(lifeline)

    def wait(self) -> None:
        """Wait until all ranks have ended. Raises RankFailed as soon as a rank has failed."""
        deadline = math.inf
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [(self._report(rank, code), code) for rank, code in enumerate(codes) if code]
            if failed:
                deadline = min(deadline, time.monotonic() + SECONDS_FOR_CAUSE)
            elif None not in codes:
                return
            causes = [(report, code) for report, code in failed if not LOST.search(report)]
            if causes or time.monotonic() > deadline:
                report, code = (causes or failed)[0]
                raise RankFailed(report, code if code > 0 else 1)
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.poll() is None]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + SECONDS_TO_END
            while any(p.poll() is None for p in running) and time.monotonic() < deadline:
                time.sleep(0.02)
        os.close(self.lifeline)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _report(self, rank: int, code: int) -> str:
        """Why a rank has failed, in one line."""
        who, written = f"rank {rank} of {self.size}", self.folder / f"{rank}.report"
        if written.exists():
            why = written.read_text("utf-8")
            return why if code == 2 else f"{who}: {why}"
        if code == -signal.SIGKILL:
            return f"{who} was killed (SIGKILL), as the system does when memory runs out"
        ending = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        stderr = (self.folder / f"{rank}.stderr").read_text("utf-8", "replace").strip()
        last = f": {stderr.splitlines()[-1]}" if stderr else ""
        return f"{who} ended {ending}{last}; nothing was logged"
