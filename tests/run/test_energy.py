"""Energy from counters: a powercap tree in a folder, and a library like NVIDIA's."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from quantbench.ops.ranks import Ranks
from quantbench.run import energy
from quantbench.run.energy import Energy, NoCounter, NotCounted, Nvml, Rapl

RANGE = 262_143_328_850  # microjoules, as Intel's driver says


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


class Tree:
    """A powercap tree whose counters the test moves on."""

    def __init__(self, root, start=0):
        self.root, self.microjoules = root, {}
        for folder, name in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),  # inside the package: must not count twice
            ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"),
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


def test_packages_and_memory_are_summed_each_once(tmp_path):
    tree = Tree(tmp_path)
    counter = Rapl(tmp_path)
    before = counter.joules()
    tree.spend(5)
    assert counter.difference(before, counter.joules()) == pytest.approx(15)  # two packages, dram
    assert counter.name == "RAPL (package-0, dram 0, package-1)"


def test_a_counter_that_starts_again_goes_on(tmp_path):
    tree = Tree(tmp_path, start=RANGE - 2_000_000)  # two joules before its end
    counter = Rapl(tmp_path)
    before = counter.joules()
    tree.spend(7)
    after = counter.joules()
    assert after[0] < before[0]
    assert counter.difference(before, after) == pytest.approx(3 * 7)


def test_idle_is_subtracted_and_short_runs_are_repeated(tmp_path):
    """Every run takes 3 J in 0.1 s on top of 20 W idle, and the idle counters move by 1.196 J at
    once, so by 2.5 times as much under 150 W instead of 60: 2 % of the whole are that after 150 J,
    which are 10 runs of 3 zones · (3 + 2) J."""
    tree, clock = Tree(tmp_path), Clock()
    counter = Rapl(tmp_path)

    def one_run():
        clock.now += 0.1
        tree.spend(3 + 20 * 0.1)
        return 1

    measured = energy.measure(counter, one_run, idle=60.0, step=1.196, clock=clock)
    # 3 %: the fake clock's own milliseconds lower the power that the step is scaled by
    assert measured.repeats == 10 and measured.resolution == pytest.approx(2.99 / 150, rel=0.03)
    assert measured.joules_with_idle == pytest.approx(15)
    assert measured.joules == pytest.approx(9, rel=0.05)  # three zones; the clock itself takes 1 %
    assert measured.idle_watts == 60.0


def test_a_run_is_measured_across_the_counters_ends(tmp_path):
    """10 J a run in each of three zones, whose counters end 25 J after the start: in the third of
    five runs. 2.99 J at once are 2 % of the 150 J of all five."""
    tree, clock = Tree(tmp_path, start=RANGE - 25_000_000), Clock()
    counter, seen = Rapl(tmp_path), []

    def one_run():
        clock.now += 0.1
        tree.spend(10)
        seen.append(counter.joules()[0])
        return 1

    measured = energy.measure(counter, one_run, idle=0.0, step=2.99, clock=clock)
    assert seen[1] > seen[2] and measured.repeats == len(seen) == 5
    assert measured.joules == pytest.approx(30) == measured.joules_with_idle


def test_the_energy_of_a_run_on_two_gpus(monkeypatch):
    """Each run takes 2 J on one and 3 J on the other in 0.1 s; both idle at 20 W together."""
    cuda_devices(monkeypatch, "b", "d")
    library, clock = Library(), Clock()

    def one_run():
        clock.now += 0.1
        library.millijoules["GPU-b"] += 2000
        library.millijoules["GPU-d"] += 3000
        return 1

    measured = energy.measure(Nvml((0, 1), library), one_run, idle=20.0, step=0.2, clock=clock)
    assert (measured.counter, measured.repeats) == ("NVML (2 GPUs)", 5)
    assert measured.joules_with_idle == pytest.approx(5)
    assert measured.joules == pytest.approx(3, rel=0.05)  # the clock itself takes 1 %


@pytest.mark.parametrize("phase", [0.0, 0.03, 0.07, 0.0999])
def test_a_counter_that_is_renewed_every_tenth_of_a_second(phase):
    """It grows by 7 J at once while idle, at 70 W, and by 70 J under load: only runs of 5 s count
    within 2 %, whenever the counter is renewed."""
    clock = SimpleNamespace(now=phase)

    def spent(seconds):
        renewed = seconds // 0.1 * 0.1
        return 70 * min(renewed, 10) + 700 * max(0, renewed - 10)  # the load begins after 10 s

    counter = SimpleNamespace(name="a fake", difference=lambda a, b: b[0] - a[0])
    counter.joules = lambda: [spent(clock.now)]

    def read_the_clock():
        clock.now += 1e-4
        return clock.now

    def one_run():
        clock.now += 0.05
        return 1

    step = energy.step_of(counter, read_the_clock)
    assert step == pytest.approx(7)
    clock.now = 10 + phase
    measured = energy.measure(counter, one_run, 70.0, step, read_the_clock)
    assert measured.resolution <= 0.02 and measured.seconds * measured.repeats >= 4.9
    assert measured.joules == pytest.approx(630 * 0.05, rel=0.025)  # of which idle was subtracted


def test_a_counter_that_cannot_be_read_any_more_ends_no_run(tmp_path):
    tree = Tree(tmp_path)
    counter = Rapl(tmp_path)

    def one_run():
        tree.spend(1)
        (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
        return 1

    energy_or_reason = energy.measure(counter, one_run, idle=0.0, step=9.0, clock=Clock())
    assert energy_or_reason == NotCounted(
        f"{counter.name} stopped while it was read: the RAPL counter cannot be read: No such file "
        "or directory"
    )


def test_memory_is_counted_once_where_another_zone_comes_before_its_package(tmp_path):
    for folder, name in (("intel-rapl:0", "psys"), ("intel-rapl:1", "package-0"),
                         ("intel-rapl:1:0", "dram"), ("intel-rapl-mmio:0", "package-0"),
                         ("intel-rapl-mmio:0:0", "dram")):  # fmt: skip
        (tmp_path / folder).mkdir()
        for file, text in (("name", name), ("max_energy_range_uj", RANGE), ("energy_uj", 0)):
            (tmp_path / folder / file).write_text(f"{text}\n")
    assert Rapl(tmp_path).name == "RAPL (package-0, dram 0)"


def runs_of(counter, clock, joules, seconds=0.1):
    """A function that runs once, in which the fake counter goes on by so much."""

    def one_run():
        clock.now += seconds
        counter.total += joules
        return 1

    return one_run


@pytest.fixture
def counter():
    counter = SimpleNamespace(total=0.0, name="a fake", difference=lambda a, b: b[0] - a[0])
    counter.joules = lambda: [counter.total]
    return counter


def test_what_a_counter_does_not_resolve_is_not_known(counter):
    """1 J a run and 1 J at once: 2 % would take 50 runs, and 3 s are over after 30."""
    clock = Clock()
    found = energy.measure(counter, runs_of(counter, clock, 1.0), 0.0, 1.0, clock, most=3.0)
    assert found == NotCounted(
        "a fake moves by 1 J at once, 3% of what it counted in 3 s of runs; at most 2% are accepted"
    )
    found = energy.measure(counter, runs_of(counter, clock, 1.0), 0.0, 1.0, clock, most=6.0)
    assert (found.repeats, found.resolution) == (50, 0.02)


@pytest.mark.parametrize(("joules", "step"), [(0.0, 1.0), (1.0, math.inf)])
def test_a_counter_that_does_not_move_counts_nothing(counter, joules, step):
    clock = Clock()
    found = energy.measure(counter, runs_of(counter, clock, joules), 0.0, step, clock, most=3.0)
    assert found.why_not.startswith("a fake does not move")


def test_a_slow_counter_is_watched_until_it_moves(counter):
    """It moves every second, which is more than the 0.3 s for which a counter is watched."""
    clock = Clock()
    counter.joules = lambda: [7.0 * int(clock.now)]
    assert energy.step_of(counter, clock) == 7.0
    counter.joules = lambda: [7.0]
    assert energy.step_of(counter, Clock()) == math.inf


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


def test_ranks_repeat_a_run_as_often_as_the_first_one_needs(counter):
    """1 J a run, and 0.05 J at once: three runs. The second rank's own counter plays no part."""
    ran = {0: 0, 1: 0}

    def metered(ranks):
        own = counter if ranks.rank == 0 else None

        def one_run():
            ran[ranks.rank] += 1
            counter.total += 1.0 if ranks.rank == 0 else 0.0
            return 1

        return energy.Meter(own, 0.0, 0.05, torch.device("cpu"), ranks).energy(one_run)

    first, second = of_two_ranks(metered)
    assert first.repeats == 3 and ran == {0: 3, 1: 3}
    assert isinstance(second, NotCounted)


def test_ranks_count_where_each_has_a_counter(monkeypatch, counter):
    monkeypatch.setattr(energy, "idle_watts", lambda counter: 5.0)
    monkeypatch.setattr(energy, "step_of", lambda counter: 0.05)
    there = [counter, counter, counter, None]

    def found(kind, cards):
        if one := there.pop(0):
            return one
        raise NoCounter("there is none here")

    monkeypatch.setattr(energy, "find", found)
    for meter in of_two_ranks(lambda ranks: energy.Meter.find(torch.device("cpu"), ranks)):
        assert (meter.counter, meter.idle_watts, meter.step) == (counter, 5.0, 0.05)
    reasons = {m.why_not for m in of_two_ranks(lambda r: energy.Meter.find(torch.device("cpu"), r))}
    assert {reason.rpartition(" (")[2] for reason in reasons} == {
        "of some ranks)", "there is none here)",
    }  # fmt: skip


def test_a_step_is_what_the_counter_grows_by_at_once(monkeypatch):
    readings = iter([0.0, 0.0, 0.5, 0.5, 0.5, 1.25, 1.25] + [1.25] * 1000)
    counter = SimpleNamespace(
        joules=lambda: [next(readings)], difference=lambda a, b: sum(b) - sum(a)
    )
    assert energy.step_of(counter, Clock()) == 0.75


def test_idle_is_watts():
    passed = Clock()
    counter = SimpleNamespace(
        joules=lambda: [12.0 * passed.now], difference=lambda a, b: sum(b) - sum(a)
    )

    def sleep(seconds):
        passed.now += seconds

    assert energy.idle_watts(counter, sleep, passed) == pytest.approx(12, rel=0.01)


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

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 300_000  # milliwatts


def test_gpus_are_summed(monkeypatch):
    cuda_devices(monkeypatch, "b", "d")
    library = Library()
    counter = Nvml((0, 1), library)
    before = counter.joules()
    library.millijoules |= {"GPU-b": 3500, "GPU-d": 5500}
    assert counter.difference(before, counter.joules()) == pytest.approx(3.0)
    assert counter.name == "NVML (2 GPUs)"


def test_a_gpu_is_the_one_that_cuda_has_at_that_number(monkeypatch):
    """CUDA_VISIBLE_DEVICES=3,1: NVML's order is another, and has all four."""
    cuda_devices(monkeypatch, "d", "b")
    library = Library()
    assert Nvml((0,), library).joules() == [5.0]
    assert Nvml((1,), library).joules() == [1.0]
    library.nvmlDeviceGetEnforcedPowerLimit = {"GPU-d": 450_000, "GPU-b": 300_000}.get
    assert energy.power_limit("cuda", (0,), library=library) == 450.0


@pytest.mark.parametrize(
    ("device", "ranks", "numbers"),
    [("cuda", 1, [0]), ("cuda:3", 1, [3]), ("cuda:0", 4, [0, 1, 2, 3]), ("cpu", 1, [0])],
)
def test_the_cards_of_a_run(device, ranks, numbers):
    assert list(energy.cards(torch.device(device), ranks)) == numbers


def test_a_gpu_that_cuda_or_nvml_does_not_have(monkeypatch):
    def no_such_device(index):
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "get_device_properties", no_such_device)
    with pytest.raises(NoCounter, match="CUDA has no device 1 here"):
        Nvml((1,), Library())
    assert energy.power_limit("cuda", (1,), library=Library()) is None
    cuda_devices(monkeypatch, "of a partition")
    with pytest.raises(NoCounter, match="counts no energy here: Not Found"):
        Nvml((0,), Library())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: Rapl(path), "there is no RAPL counter"),
        (lambda path: Rapl(path / "missing"), "there is no RAPL counter"),
        (lambda path: Nvml((0,), Library(counts=False)), "counts no energy here: Not Supported"),
        (lambda path: energy.find("mps"), "no counter of energy for mps"),
    ],
)
def test_no_counter_says_why(tmp_path, monkeypatch, make, reason):
    cuda_devices(monkeypatch, "a")
    with pytest.raises(NoCounter, match=reason):
        make(tmp_path)


def test_a_counter_that_must_not_be_read(tmp_path):
    tree = Tree(tmp_path)
    for folder in tree.microjoules:
        (tmp_path / folder / "energy_uj").unlink()
        (tmp_path / folder / "energy_uj").mkdir()  # cannot be read, even by root
    with pytest.raises(NoCounter, match="cannot be read: Is a directory"):
        Rapl(tmp_path)


def test_power_limits_of_packages_and_cards(tmp_path, monkeypatch):
    """The long-term limits of two packages. Memory has none; another driver shows one twice."""
    cuda_devices(monkeypatch, "a", "b")
    Tree(tmp_path)
    for folder, watts in (("intel-rapl:0", 65), ("intel-rapl:1", 65), ("intel-rapl-mmio:0", 65)):
        for number, name, factor in ((0, "long_term", 1), (1, "short_term", 2)):
            (tmp_path / folder / f"constraint_{number}_name").write_text(f"{name}\n")
            limit = tmp_path / folder / f"constraint_{number}_power_limit_uw"
            limit.write_text(f"{watts * factor * 1_000_000}\n")
    assert energy.power_limit("cpu", root=tmp_path) == 130.0
    assert energy.power_limit("cuda", (0, 1), library=Library()) == 600.0
    assert energy.power_limit("cpu", root=tmp_path / "none") is None
    assert energy.power_limit("mps") is None
