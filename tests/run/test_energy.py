"""Energy from counters: a powercap tree in a folder, and a library like NVIDIA's."""

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from quantbench.ops.ranks import ALONE, Ranks
from quantbench.run import energy
from quantbench.run.energy import Counter, Energy, Meter, NoCounter, NotCounted

RANGE = 262_143_328_850  # microjoules, as Intel's driver says
CPU = torch.device("cpu")


class Tree:
    """A powercap tree whose counters the test moves on."""

    def __init__(self, root, start=0):
        self.root, self.microjoules = root, {}
        for folder, name in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),  # inside the package: must not count twice
            ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:2", "psys"),  # the whole platform, packages included
            ("intel-rapl-mmio:0", "package-0"),  # the same package by another driver
        ):
            (root / folder).mkdir(parents=True)
            (root / folder / "name").write_text(f"{name}\n")
            (root / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
            self.microjoules[folder] = start
        (root / "intel-rapl").mkdir()  # the control type itself has no counter
        self.spend(0)

    def spend(self, joules):
        """As many joules in every zone; counters start again from zero at their end."""
        for folder, count in self.microjoules.items():
            self.microjoules[folder] = (count + round(joules * 1e6)) % RANGE
            (self.root / folder / "energy_uj").write_text(f"{self.microjoules[folder]}\n")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test says so."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(energy.time, "perf_counter", lambda: clock.now)
    return clock


def fake(ranks=ALONE, total=None, idle=0.0):
    """A meter of a counter that the test moves on: `total` is a list of one number."""
    total = total if total is not None else [0.0]
    return Meter(Counter("a fake", lambda: list(total), [math.inf], 1e-3), idle, CPU, ranks)


@pytest.mark.parametrize("start", [0, RANGE - 2_000_000])  # the second ends two joules later
def test_packages_and_memory_are_summed_each_once(tmp_path, start):
    tree = Tree(tmp_path, start)
    counter = energy.rapl(tmp_path)
    before = counter.read()
    tree.spend(5)
    assert counter.between(before, counter.read()) == pytest.approx(15)  # two packages, dram
    assert counter.name == "RAPL (package-0, dram package-0, package-1)"


def test_a_run_net_of_the_idle_machine(tmp_path, clock):
    """20 J in 0.02 s in each of three zones, which end 50 J after the start. RAPL is updated every
    millisecond: 50 of these take three runs. 600 W of the idle machine are 12 J of a run's 60."""
    tree = Tree(tmp_path, start=RANGE - 50_000_000)

    def one_run():
        clock.now += 0.02
        tree.spend(20)
        return 1

    used = Meter(energy.rapl(tmp_path), 600.0, CPU, ALONE).energy(one_run)
    assert used == Energy(
        "RAPL (package-0, dram package-0, package-1)", pytest.approx(48), pytest.approx(60),
        pytest.approx(0.02), 600.0, 3, pytest.approx(1 / 60),
    )  # fmt: skip


def test_a_counter_that_cannot_be_read_any_more_ends_no_run(tmp_path):
    tree = Tree(tmp_path)

    def one_run():
        tree.spend(1)
        (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
        return 1

    counter = energy.rapl(tmp_path)
    assert Meter(counter, 0.0, CPU, ALONE).energy(one_run) == NotCounted(
        f"{counter.name} stopped while it was read: the RAPL counter cannot be read: No such file "
        "or directory"
    )


def test_a_counter_that_does_not_move_counts_nothing(clock):
    def one_run():
        clock.now += 0.1
        return 1

    assert fake().energy(one_run) == NotCounted("a fake does not move in 0.1 s")


def test_energies_of_several_processes_are_one():
    """By their repeats: one run of 4 J and three of 8 J are 28 J in four."""
    one = Energy("a fake", 4.0, 5.0, 1.0, 10.0, 1, 0.005)
    more = Energy("a fake", 8.0, 9.0, 3.0, 20.0, 3, 0.02)
    assert energy.pooled([one, more]) == Energy("a fake", 7.0, 8.0, 2.5, 15.0, 4, 0.02)


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

        return fake(ranks, total).energy(one_run)

    first, second = of_two_ranks(metered)
    assert first.repeats == second.repeats == 3 and first.joules == 1.0 and ran == {0: 3, 1: 3}


def test_ranks_count_where_each_has_a_counter(monkeypatch):
    monkeypatch.setattr(energy, "IDLE_SECONDS", 0.0)
    counter = fake().counter
    there = [counter, counter, counter, None]

    def found(kind, cards):
        if one := there.pop(0):
            return one
        raise NoCounter("there is none here")

    monkeypatch.setattr(energy, "find", found)
    for meter in of_two_ranks(lambda ranks: Meter.find(CPU, ranks)):
        assert (meter.counter, meter.idle_watts) == (counter, 0.0)
    reasons = {meter.why_not for meter in of_two_ranks(lambda ranks: Meter.find(CPU, ranks))}
    assert {reason.rpartition(" (")[2] for reason in reasons} == {
        "of some ranks)", "there is none here)",
    }  # fmt: skip


def test_the_idle_machine_is_watched_only_where_something_counts(monkeypatch, clock):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(energy.time, "sleep", sleep)
    meter = fake()
    moving = Counter("a fake", lambda: [12.0 * clock.now], [math.inf], 1e-3)
    monkeypatch.setattr(energy, "find", lambda kind, cards: moving)
    assert Meter.find(CPU, ALONE).idle_watts == pytest.approx(12) and slept == [1.0]
    monkeypatch.setattr(energy, "find", lambda kind, cards: energy.rapl(energy.Path("/none")))
    assert Meter.find(CPU, ALONE) == NotCounted(
        "no counter; power limit × time is an upper bound (there is no RAPL counter in /none)"
    )
    assert slept == [1.0] and meter.idle_watts == 0.0


def cuda_devices(monkeypatch, *uuids):
    """CUDA's devices, in the order in which this process sees them."""
    properties = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


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


def test_the_gpus_that_cuda_has_at_these_numbers_are_summed(monkeypatch):
    """CUDA_VISIBLE_DEVICES=3,1: NVML's order is another, and has all four."""
    cuda_devices(monkeypatch, "d", "b")
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert energy.nvml((0,)).read() == [5.0]
    counter = energy.nvml((0, 1))
    before = counter.read()
    library.millijoules |= {"GPU-b": 3500, "GPU-d": 5500}
    assert counter.between(before, counter.read()) == pytest.approx(3.0)
    assert counter.name == "NVML (2 GPUs)"


def test_the_cards_of_a_run(monkeypatch):
    asked = []

    def found(kind, cards):
        asked.append(list(cards))
        raise NoCounter("none")

    monkeypatch.setattr(energy, "find", found)
    for device, ranks in (("cuda", 1), ("cuda:3", 1), ("cuda:0", 4), ("cpu", 1)):
        several = SimpleNamespace(size=ranks, total=lambda values, device: values)
        Meter.find(torch.device(device), several)
    assert asked == [[0], [3], [0, 1, 2, 3], [0]]


def no_such_device(index):
    raise AssertionError("Invalid device id")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: energy.rapl(path), "there is no RAPL counter"),
        (lambda path: energy.rapl(path / "missing"), "there is no RAPL counter"),
        (lambda path: energy.nvml((0,)).read(), "counts no energy here: Not Supported"),
        (lambda path: energy.nvml((1,)).read(), "counts no energy here: Not Found"),
        (lambda path: energy.find("mps"), "no counter of energy for mps"),
    ],
)
def test_no_counter_says_why(tmp_path, monkeypatch, make, reason):
    cuda_devices(monkeypatch, "a", "of a partition")
    monkeypatch.setitem(sys.modules, "pynvml", Library(counts=False))
    with pytest.raises(NoCounter, match=reason):
        make(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_such_device)
    with pytest.raises(NoCounter, match="CUDA has no device 1 here"):
        energy.nvml((1,))


def test_a_counter_that_must_not_be_read(tmp_path):
    tree = Tree(tmp_path)
    for folder in tree.microjoules:
        (tmp_path / folder / "energy_uj").unlink()
        (tmp_path / folder / "energy_uj").mkdir()  # cannot be read, even by root
    with pytest.raises(NoCounter, match="cannot be read: Is a directory"):
        energy.rapl(tmp_path).read()


def test_power_limits_of_packages(tmp_path):
    """The long-term limits of two packages. Memory has none; another driver shows one twice."""
    Tree(tmp_path)
    for folder, watts in (("intel-rapl:0", 65), ("intel-rapl:1", 65), ("intel-rapl-mmio:0", 65)):
        for number, name, factor in ((0, "long_term", 1), (1, "short_term", 2)):
            (tmp_path / folder / f"constraint_{number}_name").write_text(f"{name}\n")
            limit = tmp_path / folder / f"constraint_{number}_power_limit_uw"
            limit.write_text(f"{watts * factor * 1_000_000}\n")
    assert energy.power_limit(tmp_path) == 130.0
    assert energy.power_limit(tmp_path / "none") is None
