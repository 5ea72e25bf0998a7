"""Progress lines: arithmetic by hand, on a clock of the test's own."""

import pytest

from quantbench.compare import progress
from quantbench.compare.progress import Progress, duration


def test_pieces_and_the_time_that_is_left():
    now, said = [100.0], []
    pieces = Progress(said.append, 4, "line", clock=lambda: now[0])
    for name, seconds in (("a", 60), ("b", 120), ("c", 30), ("", 1)):
        pieces.next(name)
        now[0] += seconds
    assert said == [
        "line 1 of 4: a",
        "line 2 of 4: b; about 3 min left",  # 60 s a piece, three are left
        "line 3 of 4: c; about 3 min left",  # 90 s a piece, two are left
        "line 4 of 4; about 70 s left",
    ]


def test_a_line_comes_every_ten_seconds_and_at_once_where_it_matters():
    now, said = [0.0], []
    shown = Progress(said.append, total=10, clock=lambda: now[0])
    shown.where = "block 1 of 2"
    for now[0] in range(25):
        shown.at(f"at {now[0]}")
        shown.done = now[0] / 10
    shown.at("loading", now=True)
    assert said == [
        "block 1 of 2: at 10; about 2 min left",  # 10 s for 0.9 of 10
        "block 1 of 2: at 20; about 85 s left",
        "block 1 of 2: loading; about 76 s left",
    ]


def test_a_thread_speaks_while_the_command_waits(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    said = []
    shown = Progress(said.append)
    shown.at("none: loading", now=True)
    with shown.ticking():
        while len(said) < 3:
            pass
    assert said[:3] == ["none: loading"] * 3


@pytest.mark.parametrize(
    "seconds, shown",
    [(0.1, "1 s"), (89, "89 s"), (91, "2 min"), (5000, "83 min"), (9000, "2.5 h")],
)
def test_durations_are_rounded_for_people(seconds, shown):
    assert duration(seconds) == shown
