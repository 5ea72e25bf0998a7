"""What is said while pieces of work are done, on a clock of the test's own."""

import pytest

from quantbench.compare.countdown import Countdown, duration


def test_pieces_and_the_time_that_is_left():
    now, said = [100.0], []
    pieces = Countdown(4, said.append, "line", clock=lambda: now[0])
    for name, seconds in (("a", 60), ("b", 120), ("c", 30), ("", 1)):
        pieces.next(name)
        now[0] += seconds
    assert said == [
        "Line 1 of 4: a",
        "Line 2 of 4: b, about 3 min left",  # 60 s a piece, three to go
        "Line 3 of 4: c, about 3 min left",  # 90 s a piece, two to go
        "Line 4 of 4, about 70 s left",
    ]


@pytest.mark.parametrize(
    "seconds, shown",
    [(0.1, "1 s"), (89, "89 s"), (91, "2 min"), (5000, "83 min"), (9000, "2.5 h")],
)
def test_durations_are_rounded_for_people(seconds, shown):
    assert duration(seconds) == shown
