"""Energy from counters: a powercap tree in a folder, and a library like NVIDIA's."""

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from quantbench.ops.ranks import ALONE, Ranks
from quantbench.run import counters, energy
from quantbench.run.counters import Counter, Meter, NoCounter
from quantbench.run.energy import Energy, NotCounted

RANGE = 262_143_328_850  # microjoules, as Intel's driver says
CPU = torch.device("cpu")
ZONES = {
    "intel-rapl:0": "package-0",
    "intel-rapl:0:0": "core",  # inside the package: must not count twice
    "intel-rapl:0:1": "dram",
    "intel-rapl:1": "package-1",
    "intel-rapl:2": "psys",  # the whole platform, packages included
    "intel-rapl-mmio:0": "package-0",  # the same package by another driver
}


class Tree:
    """A powercap tree whose counters the test moves on."""

    def __init__(self, root, start=0):
        self.root, self.microjoules = root, dict.fromkeys(ZONES, start)
        for folder, name in ZONES.items():
            (root / folder).mkdir(parents=True)
            (root / folder / "name").write_text(f"{name}\n")
            (root / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (root / "intel-rapl").mkdir()  # the control type itself has no counter
        self.spend(0)

    def spend(self, joules):
        """As many joules in every zone; counters start again from zero at their end."""
        for folder, count in self.microjoules.items():
            self.microjoules[folder] = (count + round(joules * 1e6)) % RANGE
            (self.root / folder / "energy_uj").write_text(f"{self.microjoules[folder]}\n")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test adds them, or when the meter sleeps."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    monkeypatch.setattr(counters.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(counters.time, "sleep", sleep)
    return clock


def counter_of(read):
    return Counter("a fake", read, [math.inf], 1e-3)


def test_a_run_net_of_the_idle_machine(tmp_path, clock):
    """20 J in 0.02 s in each of three zones, which end 50 J after the start. RAPL is updated every
    millisecond: 50 of these take three runs. 600 W of the idle machine are 12 J of a run's 60."""
    tree = Tree(tmp_path, start=RANGE - 50_000_000)

    def one_run():
        clock.now += 0.02
        tree.spend(20)
        return 1

    name = "RAPL (package-0, dram, package-1)"
    used = Meter(counters.rapl(tmp_path), 600.0, CPU, ALONE).energy(one_run)
    assert used == Energy(name, pytest.approx(48), pytest.approx(0.02), 600.0, 3)

    def last_run():
        one_run()
        (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
        return 1

    lost = Meter(counters.rapl(tmp_path), 0.0, CPU, ALONE).energy(last_run)
    assert lost.why_not.startswith(f"{name} stopped while it was read: the RAPL counter cannot be")


def test_a_counter_that_does_not_move_counts_nothing(clock):
    def one_run():
        clock.now += 0.1
        return 1

    meter = Meter(counter_of(lambda: [0.0]), 0.0, CPU, ALONE)
    assert meter.energy(one_run) == NotCounted("a fake does not move in 0.1 s")


def test_energies_of_several_processes_are_one():
    """By their repeats: one run of 4 J and three of 8 J are 28 J in four."""
    one, more = Energy("a fake", 4.0, 1.0, 10.0, 1), Energy("a fake", 8.0, 3.0, 20.0, 3)
    assert energy.pooled([one, more]) == Energy("a fake", 7.0, 2.5, 15.0, 4)


class TwoRanks(Ranks):
    """Two ranks in two threads of this process, which meet at a barrier."""

    meeting, sums = threading.Barrier(2), {}

    def total(self, values, device="cpu"):
        self.sums[self.rank] = values
        self.meeting.wait(20)
        totals = [sum(pair) for pair in zip(*self.sums.values(), strict=True)]
        self.meeting.wait(20)
        return totals


def of_two_ranks(work):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: work(TwoRanks(rank, 2)), (0, 1)))


def test_ranks_repeat_a_run_as_often_as_the_first_one_needs(clock):
    """0.02 s a run: three runs span 50 milliseconds by rank 0's clock, which decides."""
    ran, total = {0: 0, 1: 0}, [0.0]

    def metered(ranks):
        def one_run():
            ran[ranks.rank] += 1
            if ranks.rank == 0:
                clock.now += 0.02
                total[0] += 1.0
            return 1

        return Meter(counter_of(lambda: list(total)), 0.0, CPU, ranks).energy(one_run)

    first, second = of_two_ranks(metered)
    assert first.repeats == second.repeats == 3 and first.joules == 1.0 and ran == {0: 3, 1: 3}


def test_ranks_count_where_each_has_a_counter(monkeypatch):
    monkeypatch.setattr(counters, "IDLE_SECONDS", 0.0)
    counter = counter_of(lambda: [0.0])
    there = [counter, counter, counter, None]

    def found(kind, cards):
        if one := there.pop(0):
            return one
        raise NoCounter("there is none here")

    monkeypatch.setattr(counters, "find", found)
    for meter in of_two_ranks(lambda ranks: Meter.find(CPU, ranks)):
        assert (meter.counter, meter.idle_watts) == (counter, 0.0)
    reasons = {meter.why_not for meter in of_two_ranks(lambda ranks: Meter.find(CPU, ranks))}
    assert {reason.rpartition(" (")[2] for reason in reasons} == {
        "of some ranks)", "there is none here)",
    }  # fmt: skip


def test_the_idle_machine_is_watched_only_where_something_counts(monkeypatch, clock):
    moving = counter_of(lambda: [12.0 * clock.now])
    monkeypatch.setattr(counters, "find", lambda kind, cards: moving)
    assert Meter.find(CPU, ALONE).idle_watts == pytest.approx(12) and clock.now == 1.0
    monkeypatch.setattr(counters, "find", lambda kind, cards: counters.rapl(counters.Path("/none")))
    assert Meter.find(CPU, ALONE) == NotCounted(
        "no counter; power limit × time is an upper bound (there is no RAPL counter in /none)"
    )
    assert clock.now == 1.0


class Library:
    """As pynvml: millijoules of four GPUs, of which CUDA_VISIBLE_DEVICES may hide some."""

    class NVMLError(Exception):
        pass

    def __init__(self, counts=True):
        self.millijoules = {"GPU-a": 100, "GPU-b": 1000, "GPU-c": 200, "GPU-d": 5000}
        self.counts = counts

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.millijoules:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if not self.counts:
            raise self.NVMLError("Not Supported")
        return self.millijoules[handle]


@pytest.fixture
def cuda(monkeypatch):
    """cuda(library, *uuids): CUDA's devices, in the order in which this process sees them."""

    def set_up(library, *uuids):
        def properties(index):
            if index >= len(uuids):
                raise AssertionError("Invalid device id")
            return SimpleNamespace(uuid=uuids[index])

        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setitem(sys.modules, "pynvml", library)

    return set_up


def test_the_gpus_that_cuda_has_at_these_numbers_are_summed(cuda):
    """CUDA_VISIBLE_DEVICES=3,1: NVML's order is another, and has all four."""
    library = Library()
    cuda(library, "d", "b")
    assert counters.nvml((0,)).read() == [5.0]
    counter = counters.nvml((0, 1))
    before = counter.read()
    library.millijoules |= {"GPU-b": 3500, "GPU-d": 5500}
    assert counter.between(before, counter.read()) == pytest.approx(3.0)
    assert counter.name == "NVML (2 GPUs)"


def test_the_cards_of_a_run(monkeypatch):
    asked = []

    def found(kind, cards):
        asked.append(list(cards))
        raise NoCounter("none")

    monkeypatch.setattr(counters, "find", found)
    for device, ranks in (("cuda", 1), ("cuda:3", 1), ("cuda:0", 4), ("cpu", 1)):
        several = SimpleNamespace(size=ranks, total=lambda values, device: values)
        Meter.find(torch.device(device), several)
    assert asked == [[0], [3], [0, 1, 2, 3], [0]]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: counters.rapl(path / "missing"), "there is no RAPL counter"),
        (lambda path: counters.rapl(path).read(), "cannot be read: Is a directory"),
        (lambda path: counters.nvml((0,)).read(), "counts no energy here: Not Supported"),
        (lambda path: counters.nvml((1,)).read(), "counts no energy here: Not Found"),
        (lambda path: counters.nvml((2,)), "CUDA has no device 2 here"),
        (lambda path: counters.find("mps"), "no counter of energy for mps"),
    ],
)
def test_no_counter_says_why(tmp_path, cuda, make, reason):
    cuda(Library(counts=False), "a", "of a partition")
    Tree(tmp_path)
    for folder in ZONES:
        (tmp_path / folder / "energy_uj").unlink()
        (tmp_path / folder / "energy_uj").mkdir()  # cannot be read, even by root
    with pytest.raises(NoCounter, match=reason):
        make(tmp_path)


def test_power_limits_of_packages(tmp_path):
    """The long-term limits of two packages. Memory has none; another driver shows one twice."""
    Tree(tmp_path)
    for folder in ("intel-rapl:0", "intel-rapl:1", "intel-rapl-mmio:0"):
        for number, name, watts in ((0, "long_term", 65), (1, "short_term", 130)):
            file = tmp_path / folder / f"constraint_{number}"
            file.with_name(f"{file.name}_name").write_text(f"{name}\n")
            file.with_name(f"{file.name}_power_limit_uw").write_text(f"{watts}000000\n")
    assert counters.power_limit(tmp_path) == 130.0
    assert counters.power_limit(tmp_path / "none") is None
