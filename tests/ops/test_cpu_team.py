"""The threads that share a decoding step: too many of them, too few, two steps at once, failures;
and how a thread's share of a weight is cut into streams.

A mistake here is a hang, so each test is a process that has to end in time.
"""

import itertools
import os
from pathlib import Path

import pytest

from quantbench.ops.cpu import build, compiler
from tests.ops.instructions import NEEDS_COMPILER
from tests.programs import finished, ran

pytestmark = NEEDS_COMPILER

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
rows = 1, 6  # of steps that a member prepares for itself, and that all prepare
alone = [SmallStep(*step).sequence() for step in enumerate(rows)]
"""


@pytest.fixture(scope="module", autouse=True)
def library():
    """Built before the time of a test counts."""
    build.built()


ONCE = "assert all(torch.equal(SmallStep(*s).sequence(), alone[s[0]]) for s in enumerate(rows))"
FAILING = """
for seed in (0, 1, 0):
    step = SmallStep(seed, rows[seed])
    fail_allocation({member}, {layer})
    try:
        step.sequence()
        raise SystemExit("nothing was raised")
    except RuntimeError as error:
        assert "could not allocate memory" in str(error), error
    assert torch.equal(step.sequence(), alone[seed])
"""
AT_ONCE = """
wrong = []
def decode(seed):
    torch.set_num_threads(3)  # OpenMP counts threads for each thread that calls
    step = SmallStep(seed, rows[seed])
    for _ in range(10):
        if not torch.equal(step.sequence(), alone[seed]):
            wrong.append(seed)
threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
"""
# What happens → threads of torch, a program after START, its arguments, its environment.
PROGRAMS = {
    "four threads on one core": (4, f"for _ in range(5): {ONCE}", ["one core"], {}),
    "seven threads": (7, ONCE, [], {}),  # up to four: test_cpu_step.py
    "one thread instead of four": (4, ONCE, [], {"OMP_THREAD_LIMIT": "1"}),
    "three threads instead of four": (4, ONCE, [], {"OMP_THREAD_LIMIT": "3"}),
    "two steps at once": (1, AT_ONCE, [], {}),
    "an allocation fails in one member": (
        4,
        "".join(FAILING.format(member=m, layer=layer) for m in (0, 1, 3) for layer in (0, 2)),
        *([], {}),
    ),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_step_gives_the_same_bits_and_ends(case):
    threads, program, arguments, environment = PROGRAMS[case]
    wanted = f"torch.set_num_threads({threads})\nassert torch.get_num_threads() == {threads}\n"
    env = {**os.environ, "OMP_NUM_THREADS": "4", **environment}
    finished("-c", START + wanted + program, *arguments, env=env, timeout=SECONDS)


def compiled(name, folder, *flags):
    """How compiling a program of this folder ends, and the program."""
    source, program = Path(__file__).with_name(f"{name}.cpp"), folder / name
    command = [*compiler.command(), "-std=c++20", "-O1", "-pthread", f"-I{build.SOURCES}", *flags]
    return ran(*command, source, "-o", program), program


@pytest.mark.parametrize("sanitizer", [None, "thread"])
def test_waiting_sleeps_and_ends(sanitizer, tmp_path):
    """See barrier_check.cpp: who waits long uses no core, and a barrier can be ended."""
    flags = [f"-fsanitize={sanitizer}"] if sanitizer else []
    built, program = compiled("barrier_check", tmp_path, *flags)
    if built.returncode and sanitizer:
        pytest.skip(f"thread sanitizer: {built.stderr.splitlines()[-1]}")
    assert not built.returncode, built.stderr
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = ran(program, env=bare, timeout=SECONDS)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("thread sanitizer: does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr


UNEVEN_FROM = 64  # Streams::UNEVEN_FROM


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The streams' beginnings, and the end, of each range (first, last), by streams_check.cpp."""
    built, program = compiled("streams_check", tmp_path_factory.mktemp("streams"))
    assert not built.returncode, built.stderr

    def begin(ranges):
        done = ran(program, *itertools.chain(*ranges), check=True)
        return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]

    return begin


def test_streams_have_each_unit_once_and_the_first_is_the_longest(cut):
    ranges = [(first, first + count) for count in range(400) for first in (0, 7)]
    ranges += [(0, 4748), (4748, 9496), (3, 151936), (2**40, 2**40 + 2**33 + 1)]
    for (first, last), begin in zip(ranges, cut(ranges), strict=True):
        assert len(begin) == 5 and begin[0] == first and begin[-1] == last
        lengths = [end - start for start, end in itertools.pairwise(begin)]
        assert min(lengths) >= 0 and lengths[0] == max(lengths)
        # A round has a unit of each stream: few streams end before the first stream does.
        assert 4 * lengths[0] - sum(lengths) <= 6


def test_streams_begin_at_unequal_distances(cut):
    """The loops for several tokens read more slowly at equal ones, whatever they are."""
    ranges = [(0, count) for count in [*range(UNEVEN_FROM, 400), 4748, 9496, 151936]]
    for begin in cut(ranges):
        one, two, three, _ = (end - start for start, end in itertools.pairwise(begin))
        assert one != two != three
        assert one + two != two + three  # every second stream
