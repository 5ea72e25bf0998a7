"""Forked processes, seen from outside, are like ones that were started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compare.sampling.nursery import Nursery
from compare.sampling.process import Process, WorkerFailed, environment

WORKER = """
import json, os, sys
print("said on stderr", file=sys.stderr, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "end":
        sys.exit(request["code"])
    if request["do"] == "fail":
        raise RuntimeError("it failed")
    found = {"argv": sys.argv[1:], "name": __name__, "torch": "torch" in sys.modules}
    found |= {"session": os.getsid(0), "pid": os.getpid()}
    print(json.dumps({"did": found}), flush=True)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")


@pytest.fixture(scope="module")
def nursery():
    found = Nursery(environment())
    yield found
    found.close()


@pytest.fixture
def start(nursery, tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    started = []

    def forked(*arguments):
        started.append(Process((sys.executable, str(path), *arguments), nursery))
        if started[-1].spawned:
            pytest.skip("no fork of this torch: it is not for the CPU alone")
        return started[-1]

    yield forked
    for process in started:
        process.close()


def test_a_fork_has_its_own_arguments_streams_and_session(start):
    first, second = start("1", "--two"), start()
    for process, arguments in ((first, ["1", "--two"]), (second, [])):
        found = process.ask("tell")
        assert found["argv"] == arguments and found["name"] == "__main__" and found["torch"]
        assert found["session"] == found["pid"] == process.pid


def test_how_a_fork_ended(start):
    with pytest.raises(WorkerFailed, match="exit code 3: said on stderr"):
        start().ask("end", code=3)
    with pytest.raises(WorkerFailed, match="exit code 1: RuntimeError: it failed"):
        start().ask("fail")
    killed = start()
    killed.ask("tell")
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="killed"):
        killed.ask("tell")


def test_closing_ends_a_fork(start):
    process = start()
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_where_the_nursery_is_gone_processes_are_started(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    nursery = Nursery(environment())
    command = (sys.executable, str(tmp_path / "worker.py"))
    forked = Process(command, nursery)
    os.kill(nursery.process.pid, signal.SIGKILL)
    started = Process(command, nursery)
    try:
        assert started.spawned and started.ask("tell")["pid"] == started.pid
        assert forked.ask("tell")["pid"] == forked.pid  # it lives on
    finally:
        started.close()
        forked.close()
        nursery.close()


COORDINATOR = """
import sys, time
from compare.sampling.nursery import Nursery
from compare.sampling.process import Process, environment
nursery = Nursery(environment())
process = Process((sys.executable, sys.argv[1]), nursery)
process.ask("tell")
print(nursery.process.pid, process.pid, flush=True)
time.sleep(100)
"""


def test_nobody_is_left_behind_when_the_coordinator_is_killed(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    coordinator = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(tmp_path / "worker.py")],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    left = [int(word) for word in coordinator.stdout.readline().split()]
    assert len(left) == 2 and all(map(alive, left))
    coordinator.kill()
    coordinator.communicate()
    until = time.monotonic() + 20
    while any(map(alive, left)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(alive, left))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_comparison_without_further_processes_has_no_nursery():
    nursery = Nursery(environment())
    nursery.close()
    assert nursery.process is None
