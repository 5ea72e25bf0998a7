"""What a long phase prints, on a terminal and elsewhere."""

import sys

import pytest

from quantbench import progress


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_lines_come_now_and_then_where_none_can_be_erased(capsys, monkeypatch, terminal):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.progress("Loading") as report:
        report(400_000_000, 2_200_000_000)
        report(1_000_000_000, 2_200_000_000)
        report(2_200_000_000, 2_200_000_000)
    *between, last = capsys.readouterr().err.splitlines()
    assert between == ["Loading: 0.40 of 2.20 GB", "Loading: 1.00 of 2.20 GB"]
    assert last.startswith("Loading: 0.") and last.endswith(" s")


def test_the_time_left_is_that_of_the_work_so_far(capsys, monkeypatch):
    clock = iter([0.0, 10.0, 30.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with progress.progress("Reading", unit="tokens") as report:
        report(100, 300)
    assert capsys.readouterr().err.splitlines() == [
        "Reading: 100 of 300 tokens, 20 s left",
        "Reading: 30.0 s",
    ]


def test_a_short_phase_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
    with progress.progress("Loading") as report:
        report(1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_terminal_erases_the_moving_line(capsys, monkeypatch):
    """What stays is the line with the seconds; rich erases a line with the code ESC [2K."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.progress("Loading") as report:
        report(1_000_000_000, 2_200_000_000)
    moving, _, last = capsys.readouterr().err.rpartition("\x1b[2K")
    assert "Loading" in moving and last.count("Loading") == 1 and last.endswith(" s\n")


def test_a_line_that_cannot_be_written_is_not_the_last(capfd, monkeypatch):
    def full(*_, **__):
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(progress.click, "echo", full)
        progress.say("lost")
    progress.say("kept")
    assert capfd.readouterr().err == "kept\n"
