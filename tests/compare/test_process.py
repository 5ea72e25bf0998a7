"""What a worker answers, as whoever asked it gets it."""

import sys

import pytest

from compare.sampling.process import Process, WorkerFailed
from errors import QuantbenchError, UsageError

ANSWER = "import sys; input(); print(sys.argv[1], flush=True); sys.stdin.read()"


@pytest.fixture
def worker():
    started = []

    def start(answer):
        started.append(Process((sys.executable, "-c", ANSWER, answer)))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_what_a_person_asked_for_in_vain_is_a_usage_error(worker):
    """Whichever command asked: exit code 2, and the worker's own words."""
    with pytest.raises(UsageError, match="^no such scheme$") as refusal:
        worker('{"failed": "no such scheme", "kind": "usage"}').ask("load")
    assert refusal.value.exit_code == UsageError.exit_code == 2
    assert isinstance(refusal.value, WorkerFailed)  # a comparison goes on without the arm


@pytest.mark.parametrize("kind", ["memory", "other"])
def test_what_failed_otherwise_is_not(worker, kind):
    with pytest.raises(WorkerFailed, match="^too large$") as failure:
        worker(f'{{"failed": "too large", "kind": "{kind}"}}').ask("load")
    assert failure.value.kind == kind and not isinstance(failure.value, UsageError)
    assert failure.value.exit_code == QuantbenchError.exit_code == 1
