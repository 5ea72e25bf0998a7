"""The loop of real sessions, with workers that have no model."""

import pytest

from quantbench.bench.answers import ArmFacts
from tests.bench.world import Behaviour, World
from tests.trust import sessions

ARGV = ["--max_new_tokens", "8"]


@pytest.mark.parametrize("true", [1.0, sessions.SLOWER])
def test_the_slower_arm_is_slower_by_what_it_says(true, monkeypatch):
    world = World.of(*[Behaviour(seconds=1e-3, noise=0.001)] * 3)
    workers = [world.start((str(number),)) for number in range(3)]
    for worker in workers:
        worker.ask("load", argv=ARGV)
    idle = [(worker, worker.answer(ArmFacts, "get_ready")) for worker in workers]
    monkeypatch.setattr(sessions.Kept, "idle", list(idle))
    found = sessions.session(ARGV, 0.03, true)
    assert found["ratio"] == pytest.approx(true, rel=0.01) and found["processes"] >= 2
    assert found["covers"] and not found["false"]
    assert sorted(map(id, sessions.Kept.idle)) == sorted(map(id, idle))  # all are idle again
    both = sessions.summary([found, found])
    assert (
        both["sessions"] == 2 and both["covers"]["share"] == 1 and both["ratio"] == found["ratio"]
    )
