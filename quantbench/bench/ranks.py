"""A worker that is several ranks sharing one model: each of them carries out every request.

    of(process.COMMAND, 2)   # what Process starts: this file, which starts the ranks

The ranks have the variables of parallel/launch.py. This file passes its stdin on to each of them,
and rank 0 answers on its stdout. If one rank fails, this file ends all and answers with the cause.
"""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from quantbench.cli import RANK_REPORTS, explained
from quantbench.errors import UsageError
from quantbench.parallel import launch

MODULE = "quantbench.bench.ranks"
KINDS = {UsageError.exit_code: "usage", errno.ENOMEM: "memory"}  # by a rank's exit code


def of(worker: Sequence[str], ranks: int) -> tuple[str, ...]:
    """The command that starts a worker as this many ranks. worker: that for one process."""
    if ranks == 1:
        return tuple(worker)
    python, *words = worker
    return (python, "-m", MODULE, str(ranks), *words)


def run(size: int, words: Sequence[str]) -> None:
    """Run the ranks until all have ended; if one fails, answer with the reason."""
    try:
        with launch.Running([sys.executable, *words], size, stdin=subprocess.PIPE) as ranks:
            threading.Thread(target=_pass_on, args=(ranks,), daemon=True).start()
            ranks.wait()
    except launch.RankFailed as error:  # all have ended, and their memory is free
        kind = KINDS.get(error.exit_code, "dead")
        print(json.dumps({"failed": " ".join(str(error).split()), "kind": kind}), flush=True)


def _pass_on(ranks: launch.Running) -> None:
    """Write this process's stdin into each rank's, until it ends or a rank does."""
    streams = [process.stdin for process in ranks.processes if process.stdin]
    with contextlib.suppress(OSError):
        while requests := os.read(0, 1 << 16):
            for stream in streams:
                stream.write(requests)
                stream.flush()
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def fail(error: BaseException, kind: str) -> None:
    """End this rank for an error of this kind; its launcher ends the others, and reports."""
    message, code = explained(error)
    Path(os.environ[RANK_REPORTS]).write_text(message, encoding="utf-8")
    os._exit(errno.ENOMEM if kind == "memory" else code)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
