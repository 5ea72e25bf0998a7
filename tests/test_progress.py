"""What a long phase prints, on a terminal and elsewhere."""

import io
import sys

import pytest

from quantbench import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)

    def replace(file):
        monkeypatch.setattr(sys, "stderr", file)
        return file

    return replace


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_lines_come_now_and_then_where_none_can_be_erased(stderr, monkeypatch, kind):
    monkeypatch.setenv("TERM", "dumb")
    file = stderr(kind())
    with progress.progress("Loading") as report:
        report(400_000_000, 2_200_000_000)
        report(1_000_000_000, 2_200_000_000)
        report(2_200_000_000, 2_200_000_000)
    *between, last = file.getvalue().splitlines()
    assert between == ["Loading: 0.40 of 2.20 GB", "Loading: 1.00 of 2.20 GB"]
    assert last.startswith("Loading: 0.") and last.endswith(" s")


def test_the_time_left_is_that_of_the_work_so_far(stderr, monkeypatch):
    file, clock = stderr(io.StringIO()), iter([0.0, 10.0, 30.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with progress.progress("Reading", unit="tokens") as report:
        report(100, 300)
    assert file.getvalue().splitlines() == [
        "Reading: 100 of 300 tokens, 20 s left",
        "Reading: 30.0 s",
    ]


def test_a_short_phase_is_one_line(stderr, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
    file = stderr(io.StringIO())
    with progress.progress("Loading") as report:
        report(1, 2)
    assert len(file.getvalue().splitlines()) == 1


def test_a_terminal_erases_the_moving_line(stderr, monkeypatch):
    """What stays is the line with the seconds; rich erases a line with the code ESC [2K."""
    monkeypatch.setenv("TERM", "xterm")
    file = stderr(Terminal())
    with progress.progress("Loading") as report:
        report(1_000_000_000, 2_200_000_000)
    moving, _, last = file.getvalue().rpartition("\x1b[2K")
    assert "Loading" in moving and last.count("Loading") == 1 and last.endswith(" s\n")
