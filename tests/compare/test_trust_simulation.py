"""A small version of `make trust`'s simulation, on fresh seeds, and what the large one has shown.

Limits are those of the binomial distribution: a rate that is as promised passes but for one time in
ten thousand, and false verdicts of 8 %, or coverage of 85 %, fail nearly always.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from quantbench.compare.figures.families import FALSE_VERDICTS
from quantbench.log.about import machine
from quantbench.report.doc_tables import TABLES
from tests.compare.trust_simulation import (
    Cell,
    bounds,
    cells,
    failures,
    main,
    measure,
    simulate,
    somebody_watches,
)
from tests.seeds import new_generator

SHOWN = Path(__file__).parents[2] / "docs/data/trust_simulated.json"
TRIALS, SURE = 250, 1e-4
ALL = [cell for in_turn in (False, True) for cell in cells(in_turn)]
SOME = [
    cell
    for cell in ALL
    if cell.name
    in ("equal", "5 %", "heavy tail, equal means", "drift 30 %, equal", "scatter 5 %, equal")
]


@pytest.mark.parametrize("cell", SOME, ids=lambda cell: f"{cell.name} {cell.in_turn}")
def test_verdicts_and_intervals_hold(cell):
    row = measure(cell, TRIALS, new_generator())
    assert row["false_verdicts"]["count"] <= stats.binom.isf(SURE, TRIALS, FALSE_VERDICTS)
    assert row["coverage_95"]["count"] >= stats.binom.ppf(SURE, TRIALS, 0.94)
    assert row["coverage_shown"]["count"] >= stats.binom.ppf(SURE, TRIALS, 0.97)
    if cell.effects[0]:
        assert row["found"]["count"] >= stats.binom.ppf(SURE, TRIALS, 0.97)


@pytest.mark.parametrize("in_turn", [False, True])
def test_eight_arms_share_the_level(in_turn):
    cell = next(c for c in ALL if c.name == "8 arms, equal" and c.in_turn == in_turn)
    row = measure(cell, 100, new_generator())
    assert row["false_verdicts"]["count"] <= stats.binom.isf(SURE, 100, FALSE_VERDICTS)
    assert row["fastest_among_candidates"]["count"] >= stats.binom.ppf(SURE, 100, 0.97)


def test_whoever_interrupts_and_resumes_gains_nothing():
    row = somebody_watches(60, new_generator())
    assert row["false_verdicts"]["count"] <= stats.binom.isf(SURE, 60, FALSE_VERDICTS)


def test_a_simulated_run_has_the_truth_it_says():
    """Means over many runs: the heavy tail's mean is as given, though its typical step is not."""
    generator = new_generator()
    for cell in (Cell("", (0.3,), heavy=(1,)), Cell("", (0.3,), True, drift=0.3, jump=0.3)):
        values = simulate(cell, 400, generator).values
        error = values.mean(1).std() / np.sqrt(400)
        # the logarithm's bias is half of the relative variance of a process's mean
        assert values.mean() == pytest.approx(0.3, abs=4 * error + 0.004)


def test_the_simulation_would_notice():
    """Plain 95 % intervals after one process fewer than the rule, of a machine that scatters by
    5 % and is believed to scatter by 2 %, as this project's first statistics did."""
    runs = simulate(Cell("", between=0.05), 400, new_generator())
    means = runs.values[:, :4, 0].mean(1)
    reach = stats.t.isf(0.01, 6) * 0.02 * np.sqrt(2 / 4)
    wrong = int((np.abs(means) > reach).sum())
    assert wrong > stats.binom.isf(SURE, 400, FALSE_VERDICTS)
    row = {"cell": "old", "mode": "side by side", "false_verdicts": bounds(wrong, 400)}
    assert failures(row)


def test_clopper_pearson():
    for count, trials in ((0, 40), (39, 40), (3, 200), (40, 40)):
        exact = stats.binomtest(count, trials).proportion_ci(0.95, "exact")
        row = bounds(count, trials)
        assert (row["low"], row["high"]) == pytest.approx((exact.low, exact.high), abs=1e-4)


def test_what_is_committed_covers_every_cell_and_meets_the_requirements():
    document = json.loads(SHOWN.read_text())
    rows = {(row["cell"], row["mode"]): row for row in document["cells"]}
    names = {(cell.name, "in turn" if cell.in_turn else "side by side") for cell in ALL}
    assert names <= set(rows)
    about = document.get("about", document)  # that of 2026-11-21 has no commit and no machine
    assert document["seed"] and about["date"] and "--seed" in about["command"]
    for row in rows.values():
        assert row["trials"] >= 300 and not failures(row)
        for value in row.values():
            if isinstance(value, dict):
                again = bounds(value["count"], value["of"])
                assert value == pytest.approx(again)


def test_the_file_says_where_it_comes_from(tmp_path):
    """Its seed, too, where that was drawn; the documentation's table has its caption from there."""
    path = tmp_path / "trust.json"
    options = ["--trials", "2", "--only", "scatter 0.5 %", "--output", str(path)]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert len(document["cells"]) == 2 and document["about"]["machine"] == machine()
    ends = f"trust_simulation --trials 2 --seed {document['seed']}"
    assert document["about"]["command"].endswith(ends)
    assert TABLES["trust"]([str(path)]).endswith(f"{ends}`</sub>")
