"""Files that somebody else may have damaged, at random: tests/fuzz.py in small."""

import random

import pytest

from tests.programs import python


@pytest.mark.slow
def test_damaged_files_are_read_or_refused_in_one_line():
    done = python("-m", "tests.fuzz", "--inputs", 500, "--seed", random.randrange(2**32))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
