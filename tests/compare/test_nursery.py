"""Forked processes, seen from outside, are like ones that were started."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantbench.compare.sampling import file_pages
from quantbench.compare.sampling.nursery import Nursery
from quantbench.compare.sampling.process import Process, WorkerFailed, environment

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
from quantbench.compare.sampling.nursery import Nursery
from quantbench.compare.sampling.process import Process, environment
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
    until = time.monotonic() + 120
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


MEMORY = """
import json, re, sys
from quantbench import generate
from quantbench.quantize import registry
from quantbench.run import bandwidth, decoding, loading, saved_model, sizes
from quantbench.compare.sampling import clock, worker
from pathlib import Path
for line in sys.stdin:
    text = Path("/proc/self/status").read_text()
    print(json.dumps({"did": dict(re.findall(r"(Rss\\w+):\\s*(\\d+) kB", text))}), flush=True)
"""


def test_a_fork_takes_as_much_memory_as_a_process_that_imported_the_same(nursery, tmp_path):
    """A peak that is measured in it is then that of generate.py: here within
    10 MB of some 400, in the kinds of pages that count."""
    if not nursery.honest:
        pytest.skip("no fork of this torch: it is not for the CPU alone")
    path = tmp_path / "worker.py"
    path.write_text(MEMORY)
    resident = {}
    for name, which in (("forked", nursery), ("started", None)):
        process = Process((sys.executable, str(path)), which)
        resident[name] = {k: int(v) for k, v in process.ask("tell").items()}
        process.close()
    for kind in ("RssAnon", "RssFile"):
        forked, started = resident["forked"][kind], resident["started"][kind]
        assert forked == pytest.approx(started, abs=10_000), kind  # kB


def test_pages_of_a_file_that_were_touched_are_found(tmp_path):
    """Those that were read are found, and after `touch` two more. A system may map some megabytes
    around each (large folios), so the file is larger, and a hole, which takes no disk."""
    size, pages, far = os.sysconf("SC_PAGE_SIZE"), 1 << 15, 20_000
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, pages * size)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)  # or the system maps more than what is read
        (start,) = [
            int(line.split("-")[0], 16)
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(str(path))
        ]

        def here():
            ranges = [r for r in file_pages.resident() if start <= r[0] < start + pages * size]
            return {
                page
                for first, length in ranges
                for page in range((first - start) // size, (first + length - start) // size)
            }

        for page in (3, 4, 40):
            mapped[page * size]
        before = here()
        assert before >= {3, 4, 40} and not before & {far, far + 1}
        file_pages.touch([(start + far * size, 2 * size)])
        assert here() >= before | {far, far + 1}


def test_what_is_counted_before_a_fork_starts_no_thread():
    """A fork of a process with a team of OpenMP's would wait for it for ever, in its first parallel
    loop: seen with two threads, where torch's operations had counted the pages."""
    code = (
        "import os, torch\n"
        "from quantbench.compare.sampling import file_pages\n"
        "found = file_pages.resident()\n"
        "assert sum(length for _, length in found) > 1 << 20\n"
        "print(len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
