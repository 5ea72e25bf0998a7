"""A counter of energy that moves by 3 J during each run; the idle machine takes nothing."""

import itertools

from quantbench.run import energy


def install(monkeypatch, error=None):
    """error: what reading raises. Returns the list of readings, which grows."""
    joules, looks = itertools.cycle([0.0, 0.0, 3.0]), []

    def read():
        if error:
            raise error
        looks.append(next(joules))
        return looks[-1]

    monkeypatch.setattr(energy, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(energy, "LEAST_SECONDS", {"cpu": 0.0})  # one run is enough
    monkeypatch.setattr(energy, "reader", lambda device, ranks: ("a fake", read))
    return looks
