"""A worker that is several ranks sharing one model: each of them carries out every request.

    command(2, WORKER)   # what Process starts: this file, which starts the ranks

The ranks have the variables of run/launch.py. Rank 0 has the worker's stdin and stdout: it reads
the requests, passes each of them on to the other ranks through named pipes, and answers. Where one
rank fails, all are ended, and this file answers in their place with the cause.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from quantbench.cli import RANK_REPORTS, explained
from quantbench.errors import UsageError
from quantbench.run import environment, launch

MODULE = "quantbench.bench.ranks"
SHORT = ".short"  # suffix of a file of a rank that had too little memory


def command(ranks: int, module: str) -> tuple[str, ...]:
    """The command that starts the worker in `module` as this many ranks."""
    return of((sys.executable, "-m", module), ranks)


def of(worker: Sequence[str], ranks: int) -> tuple[str, ...]:
    """The command that starts a worker as this many ranks. worker: that for one process."""
    if ranks == 1:
        return tuple(worker)
    python, *words = worker
    return (python, "-m", MODULE, str(ranks), *words)


def are_started_by(command: Sequence[str]) -> bool:
    return tuple(command[1:3]) == ("-m", MODULE)


def run(size: int, words: Sequence[str]) -> None:
    """Run the ranks until all have ended; if one fails, answer with the reason."""
    with launch.run_ranks([sys.executable, *words], size) as ranks:
        try:
            ranks.wait()
        except launch.RankFailed as error:
            kind = "usage" if error.exit_code == UsageError.exit_code else "dead"
            if any(ranks.folder.glob(f"*{SHORT}")):
                kind = "memory"
            print(json.dumps({"failed": " ".join(str(error).split()), "kind": kind}), flush=True)


# ---------------------------------------------------------------------------------- in a rank


def requests(where: environment.Place | None) -> Iterator[str]:
    """Lines of stdin, for this rank and every other one; until the input ends."""
    if where is None:
        yield from sys.stdin
        return
    launch.end_with_launcher()
    if where.rank:
        with open(_pipe(where.rank)) as pipe:
            yield from pipe
        return
    with contextlib.ExitStack() as stack:
        paths = [_pipe(rank) for rank in range(1, where.size)]
        pipes = [stack.enter_context(open(path, "w", buffering=1)) for path in paths]
        for line in sys.stdin:
            for pipe in pipes:
                pipe.write(line)
            yield line


def _pipe(rank: int) -> Path:
    """The pipe of a rank's requests, made by whoever comes first."""
    path = Path(os.environ[RANK_REPORTS]).parent / f"{rank}.requests"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path)
    return path


def fail(error: BaseException, kind: str) -> None:
    """End this rank for an error of this kind; its launcher ends the others, and reports."""
    message, code = explained(error)
    report = Path(os.environ[RANK_REPORTS])
    if kind == "memory":
        report.with_suffix(SHORT).touch()
    report.write_text(message)
    os._exit(code)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2:])
