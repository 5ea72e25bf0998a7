"""What a worker answers, as whoever asked it gets it."""

import contextlib
import json
import os
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from quantbench.bench import process, ranks
from quantbench.bench.process import Forked, Process, Template, WorkerFailed
from quantbench.errors import UsageError
from tests.programs import ROOT, alive, finished, started, wait_for

ANSWER = "import sys; input(); print(sys.argv[1], flush=True); sys.stdin.read()"


@pytest.fixture
def opened():
    """Makes workers, which the test's end closes."""
    with contextlib.ExitStack() as stack:
        yield lambda *command: stack.enter_context(closing(Process(*command)))


@pytest.mark.parametrize(("kind", "code"), [("usage", 2), ("memory", 1), ("other", 1)])
def test_only_wrong_options_are_a_usage_error(opened, kind, code):
    """Whichever command asked: the worker's own words; a comparison goes on without the arm."""
    answer = f'{{"failed": "too large", "kind": "{kind}"}}'
    with pytest.raises(WorkerFailed, match="^too large$") as failure:
        opened((sys.executable, "-c", ANSWER, answer)).ask("load")
    assert (failure.value.kind, failure.value.exit_code) == (kind, code)
    assert isinstance(failure.value, UsageError) == (code == UsageError.exit_code)


# ---------------------------------------------------------------------------------- forks


@pytest.mark.skipif(sys.platform != "linux", reason="other systems fork no workers")
def test_a_fork_is_what_a_new_process_is(opened, monkeypatch, tmp_path):
    """A fork has its folder and variables, and a new process's memory; its end is explained."""
    monkeypatch.setattr(process, "CARDS", ())
    monkeypatch.chdir(tmp_path)
    first, second = opened(), opened()
    Template.running.process.kill()
    anew = opened()
    assert isinstance(second.spawned, Forked) and not isinstance(anew.spawned, Forked)
    resident, maps = [], []
    for worker in (first, second, anew):
        worker.ask("load", argv=OPTIONS)
        place = Path(f"/proc/{worker.pid}")
        resident.append(int(re.search(r"VmRSS:\s+(\d+)", (place / "status").read_text())[1]))
        maps.append((place / "maps").read_text())
        assert (place / "cwd").resolve() == tmp_path and os.getsid(worker.pid) == worker.pid
    assert resident[0] == pytest.approx(resident[2], rel=0.1)
    assert maps[0] != maps[1]  # addresses
    first.kill()
    with pytest.raises(WorkerFailed, match=r"^killed \(SIGKILL\)"):
        first.ask("get_ready")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    named = opened()
    assert isinstance(named.spawned, Forked)
    assert b"OMP_WAIT_POLICY=passive" in Path(f"/proc/{named.pid}/environ").read_bytes()


STOPPING = """
import os, signal, time
from quantbench.bench.worker import serve

class Worker:
    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def load(self) -> str:
        time.sleep(1.5)
        return "loaded"

serve(Worker())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_worker_is_given_up_and_a_slow_one_is_not(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "STOPPED", 0.4)
    (tmp_path / "stopping.py").write_text(STOPPING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = opened((sys.executable, "-m", "stopping"))
    assert worker.ask("load") == "loaded"
    with pytest.raises(WorkerFailed, match=r"^its process was stopped \(SIGSTOP\) for 0.4 s$"):
        worker.ask("stop")
    worker.close()


COORDINATOR = """
import sys, threading, time
from quantbench.bench.process import Process
worker = Process()
print(worker.pid, flush=True)
worker.ask("schemes", argv=[])
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("at", ["the import", "an answer"])
def test_a_killed_coordinator_leaves_no_process(at, tmp_path):
    """Not even where the template has not come to its socket, or a worker runs a compiler."""
    mark = f"QUANTBENCH_TEST={tmp_path}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "QUANTBENCH_TEST": str(tmp_path)}
    coordinator = started("-c", COORDINATOR, env=variables)

    def marked() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return [pid for pid in found if alive(pid)]

    wait_for(lambda: len(marked()) > 1)
    if at == "an answer":
        assert coordinator.stdout and int(coordinator.stdout.readline())
    coordinator.kill()
    coordinator.communicate()
    wait_for(lambda: not marked(), seconds=3 if at == "the import" else 20)


# ---------------------------------------------------------------------------------- ranks

ANSWERING = """
import os, signal
from quantbench.bench.worker import serve
from quantbench.errors import MemoryShortage, UsageError

class Worker:
    def who(self) -> str:
        return f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"

    def write(self, folder: str) -> None:
        with open(f"{folder}/{os.environ['RANK']}", "w") as file:
            file.write(str(os.getpid()))

    def refuse(self) -> None:
        raise UsageError("no such scheme")

    def lack(self) -> None:
        raise MemoryShortage("60 GB are needed")

    def die(self, rank: str) -> None:
        if os.environ["RANK"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    serve(Worker())
"""


@pytest.fixture
def two_ranks(opened, tmp_path, monkeypatch):
    """A worker of two ranks, whose class has no model."""
    (tmp_path / "answering.py").write_text(ANSWERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return opened(ranks.of((sys.executable, "-m", "answering"), 2))


def test_every_rank_carries_out_a_request_and_the_first_one_answers(two_ranks, tmp_path):
    assert two_ranks.ask("who") == "rank 0 of 2"
    two_ranks.ask("write", folder=str(tmp_path))
    wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
    assert two_ranks.ask("who") == "rank 0 of 2"
    with pytest.raises(WorkerFailed, match="^no such scheme$") as failure:  # of every rank
        two_ranks.ask("refuse")
    assert failure.value.kind == "usage"
    processes = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    two_ranks.close()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    wait_for(lambda: not list(tmp_path.glob("quantbench-ranks-*")))  # nothing is left behind


def test_a_rank_that_is_killed_is_the_answer(two_ranks):
    with pytest.raises(WorkerFailed, match=r"^rank 1 of 2 was killed \(SIGKILL\)") as failure:
        two_ranks.ask("die", rank="1")
        two_ranks.ask("who")  # rank 0 may have answered before the other one died
        wait_for(lambda: two_ranks.ask("who") is None)
    assert failure.value.kind == "dead"


def test_a_rank_that_lacks_memory_says_so(two_ranks):
    with pytest.raises(WorkerFailed, match=r"^rank \d of 2: 60 GB are needed$") as failure:
        two_ranks.ask("lack")
    assert failure.value.kind == "memory"


# --------------------------------------------------------------------------------- imports
# A worker's peak memory is that of generate.py: it has imported next to nothing else.

OPTIONS = ["--num_samples", "1", "--max_new_tokens", "4", "--device", "cpu"]
# `finish` starts when the peak has been read.
GENERATE = """
import json, sys
from quantbench import generate
from quantbench.commands.generate import generate as main

def tell(*given):
    print("modules", json.dumps(sorted(sys.modules)))

generate.finish = tell
main(sys.argv[1:], standalone_mode=False)
"""
WORKER = """
import sys
from quantbench.bench.worker import Worker, serve

class Telling(Worker):
    def modules(self) -> list:
        return sorted(sys.modules)

serve(Telling())
"""
# What else a worker needs, by prefixes of names: our own files, some kB each, and Python's
# modules by which it reads its requests.
OURS = (
    "quantbench.bench",
    "quantbench.parallel",  # whose ranks bench/ranks.py starts
    "quantbench.run.turns",
    "quantbench.quality",
    "quantbench.run.saved_model",
    "quantbench.run.bandwidth",
    "quantbench.models.formats.saved",  # --resume reads quantized arms
    "quantbench.unfinished",
    "quantbench.ops.cpu.attention",  # 64 tokens are read again after a judge
    "quantbench.models.chat",
)
OF_PYTHON = {"_queue", "queue"}


@pytest.fixture(scope="module")
def of_generate():
    done = finished("-c", GENERATE, *OPTIONS, "--write_result", "none")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("modules "))
    return set(json.loads(line.partition(" ")[2]))


def test_a_run_imports_nothing_that_estimates(of_generate):
    assert not [name for name in of_generate if name.startswith("quantbench.estimate")]
    assert "scipy.optimize" not in of_generate


@pytest.mark.parametrize("judged", [False, True], ids=["speed", "after a judge"])
def test_a_worker_imports_next_to_nothing_that_generate_does_not(
    of_generate, opened, tmp_path, judged
):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    worker = opened((sys.executable, str(path)))
    worker.ask("load", argv=OPTIONS)
    if judged:
        assert worker.ask("divergence", judged={"ids": [1], "tokens": [[5]], "logs": [[-2.0]]}) > 0
    worker.ask("get_ready")
    worker.ask("sample", index=0)
    found = set(worker.ask("modules"))
    assert "torch" in found & of_generate
    more = {name for name in found - of_generate if not name.startswith(OURS)}
    assert more <= OF_PYTHON
