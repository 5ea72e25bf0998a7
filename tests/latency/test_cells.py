"""The session of latency, with workers that have no model: order, failures, memory, resuming."""

import threading
from dataclasses import dataclass, field

import pytest

from quantbench.bench.answers import TurnTime
from quantbench.bench.process import WorkerFailed
from quantbench.bench.store import SAMPLES, Store
from quantbench.latency.answer import resumable, tables
from quantbench.latency.cells import Cells, begin
from quantbench.progress import duration
from quantbench.run.energy import Energy, NotCounted
from tests.bench.facts import arm_facts
from tests.latency.latencies import plan


@dataclass
class World:
    """What happens at which cells (arm, prompt, batch size)."""

    plan: object
    # At a cell: "out of memory", or "out of memory beside" while another arm is loaded; "dies" in
    # its third turn; "hangs" until it is killed; "interrupted" in its seventh turn.
    at: dict = field(default_factory=dict)
    fails_to_load: set = field(default_factory=set)  # arms
    fits_beside: dict = field(default_factory=dict)  # other arms that each may have beside it
    energy: object = field(default_factory=lambda: NotCounted("no counter"))
    journal: list = field(default_factory=list)
    alive: list = field(default_factory=list)

    def start(self, command):
        return FakeProcess(self, self.plan.cells[int(command[0])], len(command))


class FakeProcess:
    """As bench.process.Process."""

    def __init__(self, world, cell, words):
        self.world, self.arm, self.killed = world, cell.arm.name, threading.Event()
        assert (words > 1) == (cell.ranks > 1)
        self.start = f"load {self.arm}" + f" × {cell.ranks}" * (cell.ranks > 1)
        world.alive.append(self)

    def kill(self):
        self.killed.set()

    def close(self):
        self.world.alive.remove(self)

    def ask(self, do, argv, headroom=0, others=0):
        self.world.journal.append(self.start)
        if self.arm in self.world.fails_to_load:
            raise WorkerFailed("no such kernel", "refused")
        if headroom and len(self.world.alive) - 1 > self.world.fits_beside.get(self.arm, 9):
            raise WorkerFailed("out of memory", "memory")

    def answer(self, kind, do, /, **arguments):
        return getattr(self, do)(**arguments)

    def cell(self, prompt, rows, new_tokens, most_rows):
        self.at, self.turns = (self.arm, prompt, rows), 0
        self.happens = self.world.at.get(self.at)
        self.world.journal.append(f"cell {self.arm} {prompt} {rows}")
        beside = self.happens == "out of memory beside" and len(self.world.alive) > 1
        if beside or self.happens == "out of memory":
            raise WorkerFailed("out of memory", "memory")
        facts = arm_facts(decoder="cpu-step" if rows < 4 else "modules")
        facts.energy.append(self.world.energy)
        return facts

    def turn(self, kind, tokens, each):
        self.turns += 1
        self.world.journal.append(f"{kind} {self.arm}")
        if self.happens == "hangs":
            assert self.killed.wait(30)
        if self.happens == "hangs" or (self.happens == "dies" and self.turns > 2):
            raise WorkerFailed("killed (SIGKILL), as the system does when memory runs out")
        if self.happens == "interrupted" and self.turns > 6:
            raise KeyboardInterrupt
        if kind == "prompt":
            return TurnTime(self.at[1], 0.1 * self.at[2], [0.1])
        return TurnTime(tokens, 0.02 * tokens, [0.02] * tokens)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Measure in a World of these; the Latencies, the store's results and the world."""

    def run(results=None, timeout=None, happens=None, **changes):
        made = plan(**{"runs": 4, **changes})
        world = World(made, **(happens or {}))

        monkeypatch.setattr("quantbench.bench.pool.Process", world.start)
        if results is None:  # a new session has a new folder
            (tmp_path / SAMPLES).unlink(missing_ok=True)
        kept = Store(results or begin(made), tmp_path)
        Cells(kept, made, timeout=timeout, command=lambda n: (str(n),)).run()
        assert not world.alive
        return tables(kept.results, made), kept.results, world

    return run


def cells(measured, arm="none", length=100, ranks=1):
    (table,) = [t for t in measured.tables if t.key == ("tiny", arm, ranks, length)]
    return {cell.batch_size: cell for cell in table.cells}


def test_arms_take_turns_in_cycles(measure):
    measured, results, world = measure(batch_sizes=[1], warmups=1)
    order = ["prompt none", "prompt int8wo", "decode none", "decode int8wo"]
    back = ["prompt int8wo", "prompt none", "decode int8wo", "decode none"]
    assert world.journal[:2] == ["load none", "load int8wo"]
    assert world.journal[4:] == [*order, *order, *back, *back, *order]  # the first is a warm-up
    cycles = [[turn.cycle for turn in results.turns(n, "decode")] for n in (0, 1)]
    assert cycles == [[0, 1, 2, 3]] * 2


def test_every_cell_is_measured_and_each_model_loaded_once(measure):
    measured, _, world = measure(ranks=[1, 2], sequence_lengths=[100, 200], batch_sizes=[4, 1, 2])
    assert measured.ended == "complete" and len(measured.tables) == 8
    for table in measured.tables:
        assert [cell.batch_size for cell in table.cells] == [4, 1, 2]
        assert all(len(cell.samples) == 4 and cell.reason is None for cell in table.cells)
        assert all(len(s.step_seconds) == 2 for cell in table.cells for s in cell.samples)
    loads = [line for line in world.journal if line.startswith("load")]
    assert loads == ["load none", "load int8wo", "load none × 2", "load int8wo × 2"]
    sizes = [line for line in world.journal if line.startswith("cell none 100")]
    assert sizes[:3] == [f"cell none 100 {size}" for size in (1, 2, 4)]  # small ones first
    assert measured.tables[0].ran.decoder == "modules; cpu-step at batch size 1"


def test_larger_batches_than_one_out_of_memory_are_not_tried(measure):
    happens = {"at": {("none", 100, 2): "out of memory"}}
    measured, _, world = measure(sequence_lengths=[100, 200], happens=happens)
    found = cells(measured)
    assert [found[size].reason for size in (1, 2)] == [None, "out of memory"]
    assert found[4].reason == "not tried: batch size 2 is out of memory"
    assert len(cells(measured, length=200)[4].samples) == 4  # other prompts are
    assert len(cells(measured, "int8wo")[4].samples) == 4
    assert "cell none 100 4" not in world.journal


def test_a_cell_that_does_not_fit_beside_the_others_is_measured_alone(measure):
    measured, results, world = measure(happens={"at": {("int8wo", 100, 2): "out of memory beside"}})
    assert all(len(cell.samples) == 4 for cell in cells(measured, "int8wo").values())
    assert world.journal.count("load int8wo") == 2
    arms = [cells(measured, arm) for arm in ("none", "int8wo")]
    cycles = [[[s.cycle for s in arm[size].samples] for size in (1, 2, 4)] for arm in arms]
    assert [a == b for a, b in zip(*cycles, strict=True)] == [True, False, False]


@pytest.mark.parametrize("others", [0, 1])
def test_arms_that_do_not_fit_together_share_the_baseline(measure, others):
    """If the third fits next to the baseline; else it is loaded alone."""
    arms, happens = ("none", "int8wo", "fp6"), {"fits_beside": {"fp6": others}}
    measured, _, world = measure(arms=arms, batch_sizes=[1], happens=happens)
    loads = [line for line in world.journal if line.startswith("load")]
    assert loads[:5] == ["load none", "load int8wo", "load fp6", "load none", "load fp6"]
    assert len(loads) == 6 - others
    baseline, _, third = ([s.cycle for s in cells(measured, arm)[1].samples] for arm in arms)
    assert len(third) == 4 and len(baseline) == 4 + 4 * others
    assert (set(third) <= set(baseline)) == bool(others)


def test_a_worker_that_dies_is_started_again_and_the_others_go_on(measure):
    measured, _, world = measure(happens={"at": {("int8wo", 100, 2): "dies"}})
    found = cells(measured, "int8wo")
    assert found[2].reason.startswith("killed (SIGKILL)") and not found[2].counted
    assert len(found[4].samples) == 4 and len(cells(measured)[2].samples) == 4
    # Together, then twice alone: the cell that dies, and the one behind it.
    assert world.journal.count("load int8wo") == 3


def test_an_arm_that_cannot_be_loaded(measure):
    measured, _, world = measure(happens={"fails_to_load": {"none"}})
    assert {cell.reason for cell in cells(measured).values()} == {"no such kernel"}
    assert all(len(cell.samples) == 4 for cell in cells(measured, "int8wo").values())
    assert measured.ended == "complete" and world.journal.count("load none") == 1


def test_a_cell_that_takes_too_long_is_ended(measure):
    measured, _, world = measure(timeout=1, happens={"at": {("none", 100, 2): "hangs"}})
    assert cells(measured)[2].reason == "timed out: it takes longer than --timeout 1 s"
    assert len(cells(measured)[4].samples) == 4 and world.journal.count("load none") == 2


def test_an_interrupted_session_keeps_what_there_is_and_is_resumed(measure, tmp_path):
    measured, results, _ = measure(happens={"at": {("none", 100, 2): "interrupted"}})
    assert measured.ended == "interrupted"
    assert [len(cell.samples) for cell in cells(measured).values()] == [4, 2]
    again, made = resumable(tmp_path)
    assert tables(again, made).tables == measured.tables  # the store has every event
    measured, results, world = measure(results=again)
    assert measured.ended == "complete" and "cell none 100 1" not in world.journal
    assert all(len(cell.samples) == 4 for t in measured.tables for cell in t.cells)
    assert {s.process for s in cells(measured)[2].samples} == {0, 1}
    _, _, world = measure(results=results)
    assert not world.journal  # nothing is left


def test_cells_that_are_known_not_to_run_are_not_tried(measure):
    results = begin(plan(runs=4))
    results.arms[0].unable = results.arms[0].failed = "past the context"
    measured, _, world = measure(results=results)
    assert cells(measured)[1].reason == "past the context"
    assert "cell none 100 1" not in world.journal and len(cells(measured)[2].samples) == 4


def test_the_energy_of_a_cell(measure):
    """A run of 6 J: 2 rows and 3 tokens, 1 J a token."""
    energy = Energy("a fake", 6.0, 0.2, 10.0, 5)
    measured, _, _ = measure(batch_sizes=[2], happens={"energy": energy})
    cell = cells(measured)[2]
    assert cell.joules_per_token == pytest.approx(1.0) and cell.energy.idle_watts == 10.0
    why_not = NotCounted("a fake moves by 9 J at once")
    measured, _, _ = measure(batch_sizes=[2], happens={"energy": why_not}, results=None)
    assert (cells(measured)[2].joules_per_token, cells(measured)[2].energy) == (None, why_not)


# ----------------------------------------------------------------------------------- progress


def test_progress_says_which_cells_and_how_many_are_done(measure, capsys):
    measure(batch_sizes=[1, 2], runs=1, warmups=0)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == "none: loading; 0 of 4 cells"
    assert last.startswith("prompts of 100, batch size 2: none, int8wo; 2 of 4 cells; about ")


def test_durations_are_rounded_for_people():
    shown = {0.1: "1 s", 89: "89 s", 91: "2 min", 5000: "83 min", 9000: "2.5 h"}
    assert {seconds: duration(seconds) for seconds in shown} == shown
