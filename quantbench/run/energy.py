"""The energy of a run, from the hardware's own counters: Linux's powercap and NVIDIA's driver.

meter = Meter.find(device, ranks)           # NotCounted, with the reason, where nothing counts
energy = meter.energy(runs)                 # of one run; idle power is subtracted
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quantbench.ops.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")
NO_COUNTER = "no counter; power limit × time is an upper bound"
IDLE_SECONDS = 1.0  # for which the idle machine is read; only where there is a counter
UPDATES = 50  # of the counter that a measurement spans: one of them is 2 %


class NoCounter(Exception):
    """There is no counter of energy; the message says why, in a few words."""


@dataclass(frozen=True)
class Energy:
    """The energy of one run; where it was repeated, the mean of the repeats."""

    counter: str
    joules: float  # without the idle machine's
    joules_with_idle: float
    seconds: float
    idle_watts: float
    repeats: int
    resolution: float  # the counter's update interval ÷ the seconds of all repeats


@dataclass(frozen=True)
class NotCounted:
    """There is no figure of a run's energy."""

    why_not: str


@dataclass(frozen=True)
class Counter:
    """Counters of energy that are read together. read() may raise NoCounter."""

    name: str  # "RAPL (package-0, dram package-0)", "NVML (2 GPUs)"
    read: Callable[[], list[float]]  # joules since some time, a counter each
    ends: Sequence[float]  # joules at which each counter starts again from zero
    interval: float  # seconds between updates

    def between(self, before: Sequence[float], after: Sequence[float]) -> float:
        """Joules between two readings; a counter that is lower than before wrapped once."""
        each = zip(before, after, self.ends, strict=True)
        return sum(now - was + (end if now < was else 0.0) for was, now, end in each)


def zones(root: Path = POWERCAP) -> dict[str, Path]:
    """RAPL's folders of processor packages, and of memory where it is counted apart from them. The
    MSR and the MMIO driver may both list a package; cores lie within their package's figure."""
    found: dict[str, Path] = {}
    folders = root.glob("intel-rapl*:*") if root.is_dir() else ()
    for folder in sorted(folders, key=lambda path: ("mmio" in path.name, path.name)):
        with contextlib.suppress(OSError):
            name = (folder / "name").read_text().strip()
            if name == "dram":  # inside the package whose folder's name its own begins with
                name += f" {(root / folder.name.rpartition(':')[0] / 'name').read_text().strip()}"
            if name.startswith(("package", "dram")):
                found.setdefault(name, folder)
    return found


def rapl(root: Path = POWERCAP) -> Counter:
    """The counters of all packages. Raises NoCounter where there are none, or none can be read."""
    if not (found := zones(root)):
        raise NoCounter(f"there is no RAPL counter in {root}")

    def read(file: str = "energy_uj") -> list[float]:
        try:
            return [int((folder / file).read_text()) / 1e6 for folder in found.values()]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise NoCounter(f"the RAPL counter cannot be read: {reason}") from None

    read()
    return Counter(f"RAPL ({', '.join(found)})", read, read("max_energy_range_uj"), 1e-3)


def nvml(indices: Sequence[int], library: Any = None) -> Counter:
    """The counters of CUDA's devices of these numbers, found by their UUID, for NVML numbers cards
    otherwise. library: pynvml. Raises NoCounter."""
    import torch

    try:
        import pynvml

        library = library or pynvml
    except ImportError:
        if library is None:
            raise NoCounter("NVIDIA's counter needs a package: pip install nvidia-ml-py") from None
    try:
        uuids = [torch.cuda.get_device_properties(index).uuid for index in indices]
    except (AssertionError, AttributeError, RuntimeError):  # torch's, of a number without a card
        raise NoCounter(f"CUDA has no device {max(indices)} here, or hides its UUID") from None

    def read() -> list[float]:
        try:
            library.nvmlInit()
            cards = [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            return [library.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3 for card in cards]
        except library.NVMLError as error:
            raise NoCounter(f"NVIDIA's driver counts no energy here: {error}") from None

    read()
    count = f"{len(uuids)} GPU{'s' * (len(uuids) != 1)}"
    return Counter(f"NVML ({count})", read, [math.inf] * len(uuids), 0.1)


def find(device_type: str, indices: Sequence[int] = (0,)) -> Counter:
    """The counter of a device. Raises NoCounter where there is none."""
    if device_type == "cuda":
        return nvml(indices)
    if device_type == "cpu":
        return rapl()
    raise NoCounter(f"there is no counter of energy for {device_type}")


def power_limit(root: Path = POWERCAP) -> float | None:
    """Watts to which the firmware holds the processor packages in the long term; None where nothing
    tells. Anyone may read it, unlike the counters on most systems."""
    total = 0.0
    for file in (f for folder in zones(root).values() for f in folder.glob("constraint_*_name")):
        with contextlib.suppress(OSError, ValueError):
            if file.read_text().strip() == "long_term":
                limit = file.with_name(file.name.replace("_name", "_power_limit_uw"))
                total += int(limit.read_text()) / 1e6
    return total or None


@dataclass(frozen=True)
class Meter:
    """A counter of a run's devices, and the idle machine's power. The ranks of a run call its
    methods together: rank 0 counts, and the others repeat a run as often as it does."""

    counter: Counter
    idle_watts: float
    device: "torch.device"
    ranks: "Ranks"

    @staticmethod
    def find(device: "torch.device", ranks: "Ranks") -> "Meter | NotCounted":
        """The meter, or why there is none. Where there is a counter it takes IDLE_SECONDS."""
        cards = range(ranks.size) if ranks.size > 1 else [device.index or 0]
        try:
            counter = find(device.type, cards)
            before, started = counter.read(), time.perf_counter()
            time.sleep(IDLE_SECONDS)
            idle = counter.between(before, counter.read()) / (time.perf_counter() - started)
        except NoCounter as error:
            ranks.total([0.0], device)
            return NotCounted(f"{NO_COUNTER} ({error})")
        if ranks.total([1.0], device)[0] < ranks.size:
            return NotCounted(f"{NO_COUNTER} (of some ranks)")
        return Meter(counter, idle, device, ranks)

    def energy(self, runs: Callable[[], int]) -> Energy | NotCounted:
        """The energy of a run. runs() carries out one or more and returns their number; it is
        repeated until the counter was updated UPDATES times."""
        counter, first, going = self.counter, self.ranks.rank == 0, True
        repeats, spent, seconds, started = 0, 0.0, 0.0, time.perf_counter()
        try:
            last = counter.read() if first else []
            while going:
                repeats += runs()
                if first:  # run by run: a counter wraps once at most
                    now, seconds = counter.read(), time.perf_counter() - started
                    spent, last = spent + counter.between(last, now), now
                going = self._rank_0_says(seconds < UPDATES * counter.interval)
        except NoCounter as error:
            self._rank_0_says(False)
            return NotCounted(f"{counter.name} stopped while it was read: {error}")
        if not first:
            return NotCounted("rank 0 counts the energy of all")
        if not spent:
            return NotCounted(f"{counter.name} does not move in {seconds:.1f} s")
        net = max(0.0, spent - self.idle_watts * seconds)
        net, spent, each = net / repeats, spent / repeats, seconds / repeats
        resolution = counter.interval / seconds
        return Energy(counter.name, net, spent, each, self.idle_watts, repeats, resolution)

    def _rank_0_says(self, going: bool) -> bool:
        return self.ranks.first([float(going)], self.device)[0] > 0


def pooled(energies: Sequence[Energy]) -> Energy:
    """The energy of a run that was counted several times: means over all repeats. The idle power is
    the mean of its readings, the resolution the coarsest."""
    repeats = [one.repeats for one in energies]
    net = statistics.fmean((one.joules for one in energies), repeats)
    spent = statistics.fmean((one.joules_with_idle for one in energies), repeats)
    seconds = statistics.fmean((one.seconds for one in energies), repeats)
    idle = statistics.fmean(one.idle_watts for one in energies)
    resolution = max(one.resolution for one in energies)
    return Energy(energies[0].counter, net, spent, seconds, idle, sum(repeats), resolution)


def sentence(
    joules: float | None, idle_watts: float | None, why_not: str | None, estimated: float | None
) -> str:
    """Joules of a new token, or why they are not known, beside the estimate; "" where there is
    neither a counter nor an estimate."""
    estimate = "" if estimated is None else f"; {estimated:.3g} J estimated"
    if joules is not None:
        idle = "" if idle_watts is None else f", {idle_watts:.3g} W"
        return f"{joules:.3g} J a new token, without the idle machine's{idle}{estimate}"
    if why_not is not None and not why_not.startswith(NO_COUNTER):
        return f"joules of a new token are not known: {why_not}{estimate}"
    return f"at most {estimated:.3g} J a new token ({NO_COUNTER})" if estimated else ""
