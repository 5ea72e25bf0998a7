"""docs/data/trust.json is of today's statistics; the simulation does what its docstring says."""

import json
import math

import numpy as np

from tests.trust import simulation


def test_the_proof_is_of_this_code():
    proof = json.loads(simulation.RESULT.read_text())
    command = f"run `{simulation.COMMAND}` (15 minutes) and commit {simulation.RESULT.name}"
    assert proof["digest"] == simulation.digest(), f"the statistics have changed: {command}"
    assert [row["cell"] for row in proof["rows"]] == [cell.name for cell in simulation.CELLS]
    assert simulation.failures(proof["rows"]) == []


def test_a_requirement_that_is_missed_is_named():
    rows = json.loads(simulation.RESULT.read_text())["rows"]
    rows[0] = {**rows[0], "false_verdicts": simulation.bounds(20, 200), "half_width": 0.5}
    (line,) = simulation.failures(rows)
    assert line.startswith(f"{rows[0]['cell']}: false verdicts, upper bound 0.1")


def test_simulated_turns_have_their_expectation():
    """Groups, a heavy tail and states: what is left without the expected logarithm has mean 0."""
    cell = simulation.Cell("", (0.3, 0.0, 0.0), 10, beside=2, heavy=(1,))
    store, seconds = simulation.simulate(cell, seed=19, between=0.0)
    assert 0 < seconds < 630
    for arm, clean in zip(store.results.arms, store.clean.arms, strict=True):
        pairs = zip(arm.turns, clean.turns, strict=True)
        residuals = np.array([math.log(turn.seconds / own.seconds) for turn, own in pairs])
        error = 4 * residuals.std() / math.sqrt(len(residuals))  # what lasts a second: twice
        assert abs(residuals.mean()) < 2 * error
    assert np.abs(store.ratios([1, 2, 3]) - cell.effects).max() < 0.3  # the states that it met
