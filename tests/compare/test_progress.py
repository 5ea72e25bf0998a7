"""What a comparison says of how far it is: arithmetic by hand, on a clock of the test's own."""

import pytest

from quantbench.compare.sampling import progress
from quantbench.compare.sampling.progress import Progress, minutes


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_in_the_first_block_time_left_is_that_of_its_steps(clock):
    """The first of 40 steps takes 60 s, the next ten 100 s: 290 s for the rest, and 400 s for
    another block. From the first step alone nobody can say."""
    shown = Progress(lambda line: None)
    assert shown.left() == "" and shown.where() == ""
    shown.plan(2, 2)
    shown.begin_block(1, loads=0, units=40)
    shown.at("fp6: loading")
    clock.now = 60.0
    shown.unit_done(1.0)
    assert shown.left() == ""
    for _ in range(10):
        clock.now += 10.0
        shown.unit_done(1.0)
    assert shown.line() == "fp6: loading; block 1 of 2; about 12 min left"


def test_how_long_loading_took_is_no_measure_of_the_samples(clock):
    """Three arms are filled 65536 positions deep, in 100 s each; a sample takes 5 s, of which 4 s
    count. Of 15 samples two are taken: 65 s for the rest. Another block takes 300 + 75 s, and
    180 s of measuring are 3 blocks of 15 · 4 s."""
    shown = Progress(lambda line: None)
    shown.plan(4, 8, lambda each: int(180 / each))
    shown.begin_block(1, loads=3, units=15)
    for _ in range(3):
        clock.now += 100.0
        shown.load_done()
        assert shown.left() == "" and shown.where() == "block 1 of 4, at most 8"
    for done in (1, 2):
        clock.now += 5.0
        shown.unit_done(measuring=4.0 * done)
    assert shown.where() == "block 1 of 3"
    assert shown.left() == f"about {minutes(65 + 2 * 375)} left" == "about 14 min left"


def test_later_blocks_take_as_long_as_the_last(clock):
    """60 s a block; 15 s into the third of four, of at most 10."""
    shown = Progress(lambda line: None)
    shown.begin_block(2, loads=0, units=4)
    clock.now = 60.0
    shown.end_block()
    shown.plan(4, 10)
    shown.begin_block(3, loads=0, units=4)
    clock.now, shown.done = 75.0, 1
    assert shown.left() == "about 2 min to the next look, 8 min at most"
    assert shown.where() == "block 3 of 4, at most 10"


def test_it_speaks_where_nothing_else_does(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    said = []
    shown = Progress(said.append)
    shown.at("none: loading")
    with shown.ticking():
        while len(said) < 2:
            pass
    assert said[:2] == ["none: loading"] * 2


@pytest.mark.parametrize("seconds, text", [(4.4, "4 s"), (89, "89 s"), (91, "2 min")])
def test_minutes(seconds, text):
    assert minutes(seconds) == text
