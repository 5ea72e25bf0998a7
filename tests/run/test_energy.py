"""Energy from counters: a powercap tree in a folder, and a library like NVIDIA's."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from quantbench.ops.ranks import ALONE, Ranks
from quantbench.run import energy
from quantbench.run.energy import Energy, NotCounted, meter

CPU = torch.device("cpu")
NONE = "no counter; power limit × time is an upper bound"
ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",  # inside the package: must not count twice
    "intel-rapl:0:1": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",  # the whole platform, packages included
    "intel-rapl-mmio:0": "package-0",  # the same package by another driver
}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test adds them, or when the meter sleeps."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(energy.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(energy.time, "sleep", sleep)
    return clock


class Tree:
    """A powercap tree. Every zone takes 200 W, plus `more`."""

    def __init__(self, root, clock):
        self.root, self.clock, self.more = root, clock, 0.0
        for folder, name in ZONES.items():
            (root / folder).mkdir()
            (root / folder / "name").write_text(f"{name}\n")
            (root / folder / "energy_uj").write_text("0\n")
            (root / folder / "constraint_0_power_limit_uw").write_text("65000000\n")
        (root / "intel-rapl").mkdir()  # the control type itself has no counter
        (root / "intel-rapl:0:1" / "constraint_0_power_limit_uw").unlink()  # memory has none

    def move(self, *_):
        for folder in ZONES:
            joules = 200 * self.clock.now + self.more
            (self.root / folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")


@pytest.fixture
def tree(tmp_path, monkeypatch, clock):
    tree, sleep = Tree(tmp_path, clock), energy.time.sleep
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy.time, "sleep", lambda seconds: tree.move(sleep(seconds)))
    return tree


def test_a_run_net_of_the_idle_machine(tree, clock):
    """20 J in 0.02 s in each of three zones. 50 updates of a millisecond take three runs, and the
    idle machine's 600 W are 12 J of a run's 60."""

    def one_run(more=16.0):
        clock.now += 0.02
        tree.more += more
        tree.move()

    used = meter(CPU, ALONE).energy(0, one_run)
    assert used == Energy("RAPL", pytest.approx(48), *map(pytest.approx, (0.02, 600.0)), 3)

    again = meter(CPU, ALONE).energy(0, lambda: one_run(-1000.0))  # it starts again from zero
    assert again == NotCounted("RAPL does not move in 0.1 s, or started again at 0")

    def last_run():
        (tree.root / "intel-rapl:1" / "energy_uj").unlink(missing_ok=True)
        one_run()

    tree.move = lambda *_: None
    lost = meter(CPU, ALONE).energy(0, last_run)
    assert lost.why_not.startswith("RAPL stopped while it was read: [Errno 2] No such file")


def test_energies_of_several_processes_are_one():
    one, more = Energy("a fake", 4.0, 1.0, 10.0, 1), Energy("a fake", 8.0, 3.0, 20.0, 3)
    assert energy.pooled([one, more]) == Energy("a fake", 6.0, 2.0, 15.0, 4)


def test_power_limits_of_packages(tree, monkeypatch, tmp_path):
    assert energy.power_limit() == 130.0
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "none")
    assert energy.power_limit() is None


class TwoRanks(Ranks):
    """Two ranks in two threads of this process, which meet at a barrier."""

    meeting, sums = threading.Barrier(2), {}

    def total(self, values, device="cpu"):
        self.sums[self.rank] = values
        self.meeting.wait(20)
        totals = [sum(pair) for pair in zip(*self.sums.values(), strict=True)]
        self.meeting.wait(20)
        return totals


def of_two_ranks(run):
    def counted(rank):
        return meter(CPU, TwoRanks(rank, 2)).energy(0, lambda: run(rank))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(counted, (0, 1)))


def test_ranks_repeat_a_run_as_often_as_the_first_one_needs(clock, monkeypatch):
    """0.02 s a run: three runs span 50 milliseconds by rank 0's clock, which decides."""
    ran = {0: 0, 1: 0}

    def run(rank):
        ran[rank] += 1
        clock.now += 0.02 * (rank == 0)

    def read():
        clock.now += 1e-6
        return clock.now

    monkeypatch.setattr(energy, "reader", lambda device, ranks: ("a fake", read))
    monkeypatch.setattr(energy, "IDLE_SECONDS", 0.0)
    assert [used.repeats for used in of_two_ranks(run)] == [3, 3] and ran == {0: 3, 1: 3}


def test_ranks_count_where_each_has_a_counter(monkeypatch):
    there = [("a fake", lambda: 0.0), None]

    def reader(device, ranks):
        return there.pop() or meter.missing

    monkeypatch.setattr(energy, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(energy, "reader", reader)
    said = {used.why_not for used in of_two_ranks(pytest.fail)}
    assert said == {
        f"{NONE} (of some ranks)",
        f"{NONE} ('function' object has no attribute 'missing')",
    }


class Library:
    """As pynvml: millijoules of four GPUs, of which CUDA_VISIBLE_DEVICES may hide some."""

    class NVMLError(Exception):
        pass

    millijoules = {"GPU-a": 100, "GPU-b": 1000, "GPU-c": None, "GPU-d": 5000}

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.millijoules:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if (joules := self.millijoules[handle]) is None:
            raise self.NVMLError("Not Supported")
        return joules


@pytest.mark.parametrize(
    ("device", "ranks", "visible", "joules"),
    [
        ("cuda", 1, "db", 5.0),  # CUDA_VISIBLE_DEVICES=3,1: NVML's order is another
        ("cuda:1", 1, "db", 1.0),
        ("cuda:0", 2, "db", 6.0),
        ("cuda", 1, "c", "Not Supported"),
        ("cuda", 1, "z", "Not Found"),  # a partition
        ("cuda:2", 1, "db", "Invalid device id"),
        ("cuda", 1, None, "NVIDIA's counter needs a package: pip install nvidia-ml-py"),
        ("mps", 1, "", "there is no counter of energy for mps"),
        ("cpu", 1, "", "there is no RAPL counter in /none"),
    ],
)
def test_the_cards_of_a_run_or_why_nothing_counts(
    monkeypatch, clock, device, ranks, visible, joules
):
    def properties(index):
        if index >= len(visible):
            raise AssertionError("Invalid device id")
        return SimpleNamespace(uuid=visible[index])

    monkeypatch.setattr(energy, "POWERCAP", energy.Path("/none"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setitem(sys.modules, "pynvml", Library() if visible is not None else None)
    device = torch.device(device)
    if isinstance(joules, float):
        name, read = energy.reader(device, ranks)
        assert (name, read()) == ("NVML", joules)
    else:
        assert meter(device, ALONE).energy(0, pytest.fail) == NotCounted(f"{NONE} ({joules})")
        assert clock.now == 0.0  # nobody waits for the idle machine
