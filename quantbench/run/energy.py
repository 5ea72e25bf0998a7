"""The energy that a run takes, read from the hardware's own counters: RAPL's and NVIDIA's.

    meter = Meter.find(device, ranks)           # NotCounted where there is no counter: it says why
    energy = meter.energy(runs)                 # repeated until the counter resolves it
    energy.joules                               # of one run, without what the idle machine takes

RAPL counts the energy of whole processor packages, and of memory where that has a counter of its
own, in microjoules that start again from zero (Linux: powercap, Documentation/power/powercap). The
driver of NVIDIA's cards since Volta counts millijoules of the whole board.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from quantbench.ops.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")
RESOLUTION = 0.02  # the counter's step may be this share of what is measured
IDLE_SECONDS = 1.0  # for which the idle machine is read
WATCHED_SECONDS = 0.3  # for which a counter is read again and again, to see its steps
MOST_WATCHED = 3.0  # seconds, where it does not move in these
MOST_SECONDS = 30.0  # of repeating a short run


NO_COUNTER = "no counter; power limit × time is an upper bound"


class NoCounter(Exception):
    """There is no counter of energy; the message says why, in a few words."""


class Counter(Protocol):
    """A counter of the energy of all devices of a run together."""

    name: str  # "RAPL (package-0, dram)", "NVML (2 GPUs)"

    def joules(self) -> list[float]:
        """One running total a device; only differences of two readings mean anything. Raises
        NoCounter where it cannot be read, or no longer."""

    def difference(self, before: Sequence[float], after: Sequence[float]) -> float:
        """Joules between two readings, all devices together."""


@dataclass(frozen=True)
class Energy:
    """The energy of one run; where it was repeated, the mean of the repeats."""

    counter: str
    joules: float  # without the idle machine's
    joules_with_idle: float
    seconds: float
    idle_watts: float
    repeats: int
    resolution: float  # the counter's step ÷ the joules of all repeats


@dataclass(frozen=True)
class NotCounted:
    """There is no figure of a run's energy."""

    why_not: str


@dataclass(frozen=True)
class _Zone:
    """A folder of powercap: its counter and where it starts again."""

    name: str
    energy: Path
    range_uj: int


class Rapl:
    """The processor packages, and memory where it is counted apart from them."""

    def __init__(self, root: Path = POWERCAP) -> None:
        """Find the counters under `root`. Raises NoCounter where none can be read."""
        self.zones = list(_zones(root))
        if not self.zones:
            raise NoCounter(f"there is no RAPL counter in {root}")
        self.name = f"RAPL ({', '.join(zone.name for zone in self.zones)})"
        self.joules()

    def joules(self) -> list[float]:
        try:
            return [int(zone.energy.read_text()) / 1e6 for zone in self.zones]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise NoCounter(f"the RAPL counter cannot be read: {reason}") from None

    def difference(self, before: Sequence[float], after: Sequence[float]) -> float:
        """Joules between two readings. A counter that is lower than before wrapped around once."""
        total = 0.0
        for zone, first, last in zip(self.zones, before, after, strict=True):
            total += last - first + (zone.range_uj / 1e6 if last < first else 0.0)
        return total


def _zones(root: Path) -> list[_Zone]:
    """Packages, and zones of memory inside them. What is inside a package otherwise (core, uncore)
    is in the package's own figure. Two drivers (MSR and MMIO) may show the same package."""
    zones: dict[str, _Zone] = {}
    folders = root.glob("intel-rapl*:*") if root.is_dir() else ()
    for folder in sorted(folders, key=lambda path: ("mmio" in path.name, path.name)):
        try:
            name = (folder / "name").read_text().strip()
            largest = int((folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            continue
        kind = f"{name} {_package(folder, root)}" if name == "dram" else name
        if name.startswith("package") or name == "dram":
            zones.setdefault(kind, _Zone(kind, folder / "energy_uj", largest))
    return list(zones.values())


def _package(folder: Path, root: Path) -> str:
    """Which package a zone of memory is inside: its number is not that of the folder where another
    zone (psys) comes first."""
    above = folder.name.rpartition(":")[0]
    with contextlib.suppress(OSError):
        return (root / above / "name").read_text().strip().removeprefix("package-")
    return above.rpartition(":")[2]


class Nvml:
    """NVIDIA's total-energy counters of some GPUs."""

    def __init__(self, indices: Sequence[int], library: Any = None) -> None:
        """indices: the GPUs' numbers in CUDA's order. Raises NoCounter."""
        self.library = library or _library()
        try:
            self.handles = _handles(self.library, indices)
        except self.library.NVMLError as error:
            raise NoCounter(f"NVIDIA's driver counts no energy here: {error}") from None
        self.joules()
        count = len(self.handles)
        self.name = f"NVML ({count} GPU{'s' * (count != 1)})"

    def joules(self) -> list[float]:
        read = self.library.nvmlDeviceGetTotalEnergyConsumption  # millijoules
        try:
            return [read(handle) / 1e3 for handle in self.handles]
        except self.library.NVMLError as error:
            raise NoCounter(f"NVIDIA's driver counts no energy here: {error}") from None

    def difference(self, before: Sequence[float], after: Sequence[float]) -> float:
        return sum(after) - sum(before)


def _handles(library: Any, indices: Sequence[int]) -> list[Any]:
    """NVML's handles of CUDA's devices, by what both call a card: NVML has an order of its own, and
    does not know CUDA_VISIBLE_DEVICES. Raises NoCounter, and the library's NVMLError."""
    import torch

    library.nvmlInit()
    handles = []
    for index in indices:
        try:
            uuid = torch.cuda.get_device_properties(index).uuid
        except (AssertionError, AttributeError, RuntimeError):  # torch's, of numbers without a card
            raise NoCounter(f"CUDA has no device {index} here, or does not say which") from None
        handles.append(library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    return handles


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NoCounter("NVIDIA's counter needs a package: pip install nvidia-ml-py") from None
    return pynvml


def cards(device: "torch.device", ranks: int) -> Sequence[int]:
    """CUDA's numbers of a run's devices: each rank's, or the one that --device names."""
    return range(ranks) if ranks > 1 else (device.index or 0,)


def find(device_type: str, indices: Sequence[int] = (0,)) -> Counter:
    """The counter of a device. Raises NoCounter where there is none."""
    if device_type == "cuda":
        return Nvml(indices)
    if device_type == "cpu":
        return Rapl()
    raise NoCounter(f"there is no counter of energy for {device_type}")


def power_limit(
    device_type: str, indices: Sequence[int] = (0,), root: Path = POWERCAP, library: Any = None
) -> float | None:
    """Watts to which a device is held by its firmware or driver, all of `indices` together; None
    where nothing says it. Reading it needs no rights, unlike RAPL's counters on most systems."""
    if device_type == "cpu":
        packages = [zone for zone in _zones(root) if zone.name.startswith("package")]
        limits = [watts for one in packages if (watts := _long_term(one.energy.parent))]
        return sum(limits) or None
    if device_type != "cuda":
        return None
    try:
        own = library or _library()
    except NoCounter:
        return None
    try:
        milliwatts = map(own.nvmlDeviceGetEnforcedPowerLimit, _handles(own, indices))
        return float(sum(milliwatts) / 1e3)
    except (NoCounter, own.NVMLError):
        return None


def _long_term(folder: Path) -> float | None:
    """A package's limit over seconds: what its cooling is made for. Zones of memory have none."""
    for name in sorted(folder.glob("constraint_*_name")):
        try:
            if name.read_text().strip() == "long_term":
                limit = name.with_name(name.name.replace("_name", "_power_limit_uw"))
                return int(limit.read_text()) / 1e6
        except (OSError, ValueError):
            continue
    return None


def step_of(counter: Counter, clock: Callable[[], float] = time.perf_counter) -> float:
    """Joules by which a counter grows at once, as seen while it is read again and again; infinite
    where it does not grow in MOST_WATCHED seconds."""
    started = clock()
    last, largest = counter.joules(), 0.0
    while (passed := clock() - started) < WATCHED_SECONDS or (
        not largest and passed < MOST_WATCHED
    ):
        now = counter.joules()
        grown = counter.difference(last, now)
        if grown > 0:
            largest, last = max(largest, grown), now
    return largest or math.inf


def idle_watts(
    counter: Counter,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Watts of a machine on which this process does nothing."""
    before, started = counter.joules(), clock()
    sleep(IDLE_SECONDS)
    return counter.difference(before, counter.joules()) / max(clock() - started, 1e-9)


def measure(
    counter: Counter,
    runs: Callable[[], int],
    idle: float,
    step: float,
    clock: Callable[[], float] = time.perf_counter,
    most: float = MOST_SECONDS,
) -> Energy | NotCounted:
    """The energy of a run. runs() carries out one or more, returns their number, and ends when the
    device has finished.

    It is repeated until the counter's step is RESOLUTION of the whole; where it is more than that
    after `most` seconds, nothing is known of a run, nor where the counter cannot be read any more.
    idle: watts of the idle machine. step: joules by which the counter grows at once meanwhile;
    counters are renewed every so often, so under load they grow by more, in proportion to power.
    """
    repeats, spent = 0, 0.0
    try:
        last, started = counter.joules(), clock()
        while True:
            repeats += runs()
            now = counter.joules()
            spent += counter.difference(last, now)  # run by run: it starts again once at most
            last, seconds = now, clock() - started
            loaded = step * max(1.0, spent / seconds / idle) if idle else step
            if spent > 0 and loaded / spent <= RESOLUTION:
                break
            if seconds > most:
                return NotCounted(_too_coarse(counter, loaded, spent, seconds))
    except NoCounter as error:
        return NotCounted(f"{counter.name} stopped while it was read: {error}")
    return Energy(
        counter=counter.name,
        joules=max(0.0, spent - idle * seconds) / repeats,
        joules_with_idle=spent / repeats,
        seconds=seconds / repeats,
        idle_watts=idle,
        repeats=repeats,
        resolution=loaded / spent,
    )


def _too_coarse(counter: Counter, step: float, spent: float, seconds: float) -> str:
    if not spent or math.isinf(step):
        return f"{counter.name} does not move, neither while it is watched nor in {seconds:.0f} s"
    return (
        f"{counter.name} moves by {step:.3g} J at once, {step / spent:.0%} of what it counted in "
        f"{seconds:.0f} s of runs; at most {RESOLUTION:.0%} are accepted"
    )


def pooled(energies: Sequence[Energy]) -> Energy:
    """The energy of a run that was counted several times: means over all repeats. The idle power is
    the mean of its readings, the resolution the coarsest."""
    repeats = [one.repeats for one in energies]

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values, repeats)

    return replace(
        energies[0],
        joules=mean([one.joules for one in energies]),
        joules_with_idle=mean([one.joules_with_idle for one in energies]),
        seconds=mean([one.seconds for one in energies]),
        idle_watts=statistics.fmean(one.idle_watts for one in energies),
        repeats=sum(repeats),
        resolution=max(one.resolution for one in energies),
    )


def sentence(
    joules: float | None, idle_watts: float | None, why_not: str | None, estimated: float | None
) -> str:
    """Joules of a new token, or why they are not known, beside the estimate; "" where there is
    neither a counter nor an estimate."""
    estimate = "" if estimated is None else f"{estimated:.3g} J estimated"
    if joules is not None:
        idle = "" if idle_watts is None else f", {idle_watts:.3g} W"
        said = f"{joules:.3g} J a new token, without the idle machine's{idle}"
        return f"{said}; {estimate}" if estimate else said
    if why_not is not None and not why_not.startswith(NO_COUNTER):
        said = f"joules of a new token are not known: {why_not}"
        return f"{said}; {estimate}" if estimate else said
    return f"at most {estimated:.3g} J a new token ({NO_COUNTER})" if estimate else ""


@dataclass(frozen=True)
class Meter:
    """A counter of the devices of a run, and what was read of it while the machine was idle.

    The ranks of a run call everything together: rank 0 counts, and the others repeat a run as often
    as it does.
    """

    counter: Counter
    idle_watts: float
    step: float  # joules by which the counter grows at once, of the idle machine
    device: "torch.device"
    ranks: "Ranks"

    @staticmethod
    def find(device: "torch.device", ranks: "Ranks") -> "Meter | NotCounted":
        """The meter, or why there is none. It takes seconds, in which nothing should run."""
        try:
            counter = find(device.type, cards(device, ranks.size))
            meter = Meter(counter, idle_watts(counter), step_of(counter), device, ranks)
        except NoCounter as error:
            ranks.total([0.0], device)
            return NotCounted(f"{NO_COUNTER} ({error})")
        (counting,) = ranks.total([1.0], device)
        return meter if counting == ranks.size else NotCounted(f"{NO_COUNTER} (of some ranks)")

    def energy(self, runs: Callable[[], int], most: float = MOST_SECONDS) -> Energy | NotCounted:
        """`measure` of runs that all ranks carry out together."""
        if self.ranks.rank:
            while self._goes_on(False):
                runs()
            return NotCounted("rank 0 counts the energy of all")

        def together() -> int:
            self._goes_on(True)
            return runs()

        used = measure(self.counter, together, self.idle_watts, self.step, most=most)
        self._goes_on(False)
        return used

    def _goes_on(self, own: bool) -> bool:
        """What rank 0 says."""
        (said,) = self.ranks.first([float(own)], self.device)
        return said > 0
