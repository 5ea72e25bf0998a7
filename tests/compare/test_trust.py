"""`make trust` in a world where the truth and every figure are known."""

import pytest

from quantbench.compare.figures.families import Interval
from tests.compare import trust
from tests.compare.fake_process import Behaviour, World
from tests.compare.trust import CELLS, Run, counted, failures, next_cell, one_run, summary


def interval(arm, ratio, reach):
    return Interval(arm, ratio, ratio / reach, ratio * reach, 0.98, 8, 7)


def run(intervals, truths, cell=CELLS[0].name, seconds=10.0):
    return Run(cell, seconds, 8, "precise", truths, intervals, [])


def test_what_a_run_said_is_held_against_the_truth():
    good = run([interval(1, 1.05, 1.01), interval(2, 1.0, 1.01)], [1.05, 1.0])
    assert not good.false_verdict and good.covered == [True, True] and good.found == [True]
    wrong = run([interval(1, 0.9, 1.01), interval(2, 1.05, 1.01)], [1.05, 1.0])
    assert wrong.false_verdict and wrong.covered == [False, False] and wrong.found == [False]
    unsure = run([interval(1, 1.05, 1.2)], [1.05])
    assert not unsure.false_verdict and unsure.found == [False] and unsure.covered == [True]


def test_bounds_are_those_of_clopper_and_pearson():
    """0 of 10: 1 - 0.025^(1/10) = 0.3085; 10 of 10: 0.025^(1/10) = 0.6915."""
    row = summary("x", [run([interval(1, 1.0, 1.01)], [1.0])] * 10)
    assert row["false_verdicts"]["high"] == pytest.approx(0.3085, abs=1e-4)
    assert row["coverage_shown"]["low"] == pytest.approx(0.6915, abs=1e-4)
    assert not failures(row) and "found" not in row


def test_a_requirement_is_missed_only_where_the_runs_show_it():
    wrong = run([interval(1, 0.9, 1.01)], [1.0])
    right = run([interval(1, 1.0, 1.01)], [1.0])
    assert not failures(summary("x", [wrong, *[right] * 9]))
    assert failures(summary("x", [wrong] * 5))


def test_the_cell_that_had_the_least_time_is_next():
    first, second, *_ = CELLS
    runs = [run([], [], first.name, 5.0), run([], [], first.name, 5.0)]
    assert next_cell(CELLS[:2], runs, 9) is second
    runs.append(run([], [], second.name, 20.0))
    assert next_cell(CELLS[:2], runs, 9) is first
    assert next_cell(CELLS[:2], runs, 1) is None


def test_the_file_is_read_back(tmp_path):
    document = counted([run([interval(1, 1.05, 1.01)], [1.05])], ["python -m tests.compare.trust"])
    path = tmp_path / "trust.json"
    path.write_text(trust.json.dumps(trust.to_json(document)))
    assert trust.read(path).runs == document.runs and trust.read(path).cells == document.cells


@pytest.mark.parametrize("mode", ["side by side", "in turn"])
def test_a_planted_difference_is_found(monkeypatch, mode):
    cell = next(cell for cell in CELLS if cell.mode == mode and cell.question.name == "5 %")
    equal = Behaviour(between=0.005)
    world = World.of(equal, Behaviour(seconds=1.05, between=0.005))
    world.install(monkeypatch)
    started = []
    monkeypatch.setattr(
        "quantbench.compare.sampling.workers.Process",
        lambda command: (
            started.append(command) or world.start(["1" if "slow_worker" in command[1] else "0"])
        ),
    )
    found = one_run(cell, 0, 12, 1000.0)
    assert found.found == [True] and not found.false_verdict and found.covered == [True]
    assert ("0.05",) in {command[2:] for command in started}
