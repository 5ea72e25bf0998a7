"""The threads that share a decoding step: too many of them, too few, two steps at once, failures.

A mistake here is a hang, so each test is a process that has to end in time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantbench.ops.cpu import build, compiler

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))

ROOT = Path(__file__).parents[2]
SECONDS = 300  # each takes a few; a hang takes for ever
START = """
import os, sys, threading
if sys.argv[1:] == ["one core"]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from quantbench.ops.cpu import build, compiler
from tests.ops.small_step import SmallStep, fail_allocation
build.load()
torch.set_num_threads(1)
alone = [SmallStep(seed).sequence() for seed in range(2)]
"""


@pytest.fixture(scope="module", autouse=True)
def library():
    """Built before the time of a test counts."""
    build.built()


def run(program: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + program, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_four_threads_on_one_core_finish():
    program = """
torch.set_num_threads(4)
for _ in range(5):
    assert torch.equal(SmallStep(0).sequence(), alone[0])
"""
    run(program, "one core", OMP_NUM_THREADS="4")


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(threads):
    program = f"""
torch.set_num_threads({threads})
assert torch.equal(SmallStep(0).sequence(), alone[0])
"""
    run(program)


def test_two_steps_at_once():
    program = """
wrong = []
def decode(seed):
    torch.set_num_threads(3)  # OpenMP counts threads for each thread that calls
    step = SmallStep(seed)
    for _ in range(10):
        if not torch.equal(step.sequence(), alone[seed]):
            wrong.append(seed)
threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
"""
    run(program)


@pytest.mark.parametrize("limit", ["1", "3"])
def test_fewer_threads_than_wanted(limit):
    program = """
torch.set_num_threads(4)
assert torch.get_num_threads() == 4
assert torch.equal(SmallStep(0).sequence(), alone[0])
"""
    run(program, OMP_THREAD_LIMIT=limit)


@pytest.mark.parametrize("member", [0, 1, 3])
@pytest.mark.parametrize("layer", [0, 2])
def test_an_allocation_that_fails_in_one_member_ends_the_step(member, layer):
    program = f"""
torch.set_num_threads(4)
step = SmallStep(0)
for _ in range(3):
    fail_allocation({member}, {layer})
    try:
        step.run(0)
        raise SystemExit("nothing was raised")
    except RuntimeError as error:
        assert "could not allocate memory" in str(error), error
    assert torch.equal(step.sequence(), alone[0])
"""
    run(program)


@pytest.mark.parametrize("sanitizer", [None, "thread"])
def test_waiting_sleeps_and_ends(sanitizer, tmp_path):
    """See barrier_check.cpp: who waits long uses no core, and a barrier can be ended."""
    program = tmp_path / "check"
    flags = [f"-fsanitize={sanitizer}"] if sanitizer else []
    source = Path(__file__).parent / "barrier_check.cpp"
    command = [*compiler.command(), "-std=c++20", "-O1", "-pthread", f"-I{build.SOURCES}", *flags]
    built = subprocess.run([*command, source, "-o", program], capture_output=True, text=True)
    if built.returncode and sanitizer:
        pytest.skip(f"thread sanitizer: {built.stderr.splitlines()[-1]}")
    assert not built.returncode, built.stderr
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([program], env=bare, capture_output=True, text=True, timeout=SECONDS)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("thread sanitizer: does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
