"""A sweep of latencies: which cells are measured, and what becomes of those that cannot be."""

import pytest

from quantbench.compare.sampling.latency_progress import LatencyProgress
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.compare.sampling.latency_sweep import Sweep
from tests.compare.fake_latency_worker import World
from tests.compare.latency_folders import plan


@pytest.fixture
def swept(tmp_path):
    """swept(world, results): the results after a session."""

    def run(world, results=None, **changes):
        results = results or LatencyResults(plan(**changes))
        Sweep(results, lambda: results.save(tmp_path), lambda line: None, world.start).run()
        assert world.alive == 0
        return results

    return run


def cells(results, arm="none", ranks=1, length=100):
    table = results.table("tiny", arm, ranks, length)
    return {cell.batch_size: cell for cell in table.cells}


def test_every_cell_is_measured_and_each_model_loaded_once(swept):
    world = World()
    results = swept(world, ranks=[1, 2], sequence_lengths=[100, 200])
    assert results.ended == "complete"
    assert len(results.tables) == 8
    for table in results.tables:
        assert [cell.batch_size for cell in table.cells] == [1, 2, 4]
        assert all(len(cell.samples) == 10 and cell.reason is None for cell in table.cells)
        assert all(len(s.step_seconds) == 2 for cell in table.cells for s in cell.samples)
    starts = [line for line in world.journal if line.startswith(("start", "load"))]
    assert starts == ["start 1", "load", "start 2", "load"] * 2
    assert world.journal[:5] == ["start 1", "describe none", "load", "cell 100 1", "cell 100 2"]
    assert [table.key for table in results.tables][:3] == [
        ("tiny", "none", 1, 100), ("tiny", "none", 1, 200), ("tiny", "none", 2, 100)
    ]  # fmt: skip


def test_a_cell_that_cannot_run_has_its_reason_and_the_others_go_on(swept):
    world = World(refused={(200, 1)}, out_of_memory={(100, 1)}, dies_at={(100, 2)})
    results = swept(world, sequence_lengths=[100, 200])
    first, second = cells(results), cells(results, length=200)
    assert first[1].reason == "out of memory" and not first[1].samples
    assert first[2].reason.startswith("killed (SIGKILL)")
    assert len(first[2].samples) == 3 and not first[2].counted  # kept, and not counted
    assert first[4].reason is None and len(first[4].samples) == 10  # a larger batch goes on
    assert second[1].reason == "past the context" and len(second[4].samples) == 10
    # A worker goes on after what it reports, and is started anew when it has ended.
    assert world.journal.count("start 1") == world.journal.count("load") == 4
    assert "cell 200 1" not in world.journal


def test_an_arm_that_cannot_be_loaded(swept):
    results = swept(World(fails_to_load={"none"}))
    assert {cell.reason for cell in cells(results).values()} == {"no such kernel"}
    assert all(len(cell.samples) == 10 for cell in cells(results, "int8wo").values())
    assert results.ended == "complete"


def test_nothing_is_loaded_for_cells_that_are_refused(swept):
    world = World(refused={(100, size) for size in (1, 2, 4)})
    results = swept(world)
    assert "load" not in world.journal
    assert {cell.reason for cell in cells(results).values()} == {"past the context"}


def test_an_interrupted_sweep_keeps_what_there_is_and_is_resumed(swept, tmp_path):
    results = swept(World(interrupted_at=(100, 2)))
    assert results.ended == "interrupted"
    assert [len(cell.samples) for cell in cells(results).values()] == [10, 3]
    again = LatencyResults.load(tmp_path)  # kept by every change
    assert [table.cells for table in again.tables] == [table.cells for table in results.tables]
    world = World()
    swept(world, again)
    assert again.ended == "complete"
    assert world.journal[:4] == ["start 1", "describe none", "load", "cell 100 2"]
    assert all(len(cell.samples) == 10 for t in again.tables for cell in t.cells)
    world = World()
    swept(world, again)
    assert not world.journal  # nothing is left


def test_a_table_says_what_ran_and_what_was_compiled(swept):
    results = swept(World(compiles=True), batch_sizes=[1, 2, 3, 4, 8])
    carried = results.table("tiny", "none", 1, 100).carried
    assert carried.compiled == ["for batch size 1", "for batch sizes 2, 3, 4, 8"]
    assert carried.decoder == "cpu-step; modules at batch size 4"


def test_overhead_is_what_neither_runs_nor_compiles(swept):
    spent = swept(World()).tables[0].spent
    # 11 runs of each batch size: a prompt's 0.1 s a row, and two steps of 0.02 s.
    assert spent.runs == pytest.approx(11 * (0.1 * (1 + 2 + 4) + 3 * 0.04))
    assert spent.compiling == 0 and spent.overhead == 0  # less time has passed than they say
    spent.add(wall=12.0, runs=9.0, compiling=2.0)
    assert spent.overhead == pytest.approx(1.0)
    assert spent.overhead_share == pytest.approx(1.0 / spent.runs)


def test_a_cell_that_takes_too_long_is_ended(tmp_path):
    world = World(hangs_at={(100, 2)})
    results = LatencyResults(plan(("none",)))
    Sweep(results, lambda: None, lambda line: None, world.start, timeout=1).run()
    assert cells(results)[2].reason == "timed out: it takes longer than --timeout 1 s"
    assert len(cells(results)[4].samples) == 10
    assert world.journal.count("start 1") == 2


# ---------------------------------------------------------------------------------- progress


def test_the_time_that_is_left():
    """Time is proportional to a run's tokens: 0.1 s for each, the load of 5 s included."""
    now, said = [0.0], []
    made = plan(arms=("a", "b"), batch_sizes=[1, 2], runs=10, warmups=0)
    cells = [(load, 100, size) for load in made.loads for size in (1, 2)]
    progress = LatencyProgress(made, said.append, cells)
    progress.clock, progress.started = (lambda: now[0]), 0.0
    first = made.loads[0]
    assert progress.left() is None
    progress.loading(first)
    one, two = (10 * (size * 100 + 32 * 2) for size in (1, 2))  # tokens of a cell
    progress.measuring(first, 100, 1)
    now[0] += 0.05 * one
    progress.measuring(first, 100, 1, 0.5)
    assert progress.left() == pytest.approx(0.1 * (one / 2 + two + one + two))
    now[0] += 0.05 * one
    progress.finish(100, 1)
    progress.measuring(first, 100, 2)
    progress.finish(100, 2, measured=False)  # given up: its work took no time
    assert progress.left() == pytest.approx(0.1 * (one + two))
    assert said[0] == "0 of 4 cells: loading a"
    assert progress.line() == "2 of 4 cells: a: prompts of 100, batch size 2; about 7 min left"
