"""docs/data/trust.json proves the statistics as they are, and the simulation is what it says."""

import json
import math

import numpy as np
import pytest

from tests.trust import simulation


def test_the_proof_is_of_this_code():
    proof = json.loads(simulation.RESULT.read_text())
    command = f"run `{simulation.COMMAND}` (four minutes) and commit {simulation.RESULT.name}"
    assert proof["digest"] == simulation.digest(), f"the statistics have changed: {command}"
    assert [row["cell"] for row in proof["rows"]] == [cell.name for cell in simulation.CELLS]
    assert simulation.failures(proof["rows"]) == []


def test_a_requirement_that_is_missed_is_named():
    rows = json.loads(simulation.RESULT.read_text())["rows"]
    rows[0] = {**rows[0], "false_verdicts": simulation.bounds(20, 200), "half_width": 0.5}
    (line,) = simulation.failures(rows)
    assert line.startswith(f"{rows[0]['cell']}: false verdicts, upper bound 0.1")


def test_bounds_of_none_and_all():
    """The rule of three: 3.69 / n for a two-sided 95 %."""
    assert simulation.bounds(0, 100)["high"] == pytest.approx(1 - 0.025 ** (1 / 100), abs=1e-4)
    assert simulation.bounds(100, 100)["low"] == pytest.approx(0.025 ** (1 / 100), abs=1e-4)


def test_simulated_turns_have_their_expectation():
    """Groups, a heavy tail and states: residuals have mean 0, and turns of a cycle one number."""
    cell = simulation.Cell("", (0.3, 0.0, 0.0), 400, group=2, heavy=(1,))
    session = simulation.simulate(cell, np.random.default_rng(19), between=0.0)
    for turns, expected in zip(session.turns, session.expected, strict=True):
        residuals = np.log(turns.seconds) - expected
        error = 4 * residuals.std() / math.sqrt(len(residuals))  # what lasts a second: twice
        assert abs(residuals.mean()) < 2 * error
    baseline, arms, truths = session.until(session.looks[-1])
    assert set(arms[3].cycle) <= set(baseline.cycle) and not set(arms[1].cycle) & set(arms[3].cycle)
    assert np.abs(truths - cell.effects).max() < 0.3  # the states that it met
