"""The energy of a run, from the hardware's own counters: Linux's powercap and NVIDIA's driver.

meter = Meter.find(device, ranks)           # NotCounted, with the reason, where nothing counts
energy = meter.energy(runs)                 # of one run; idle power is subtracted
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quantbench.ops.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")
NO_COUNTER = "no counter; power limit × time is an upper bound"
IDLE_SECONDS = 1.0  # for which the idle machine is read; only where there is a counter
ENOUGH = 50  # updates of the counter that a measurement spans: one of them is 2 %
Library = Any  # pynvml, or a fake of it


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
    """Counters of energy that are read together."""

    name: str  # "RAPL (package-0, dram)", "NVML (2 GPUs)"
    joules: Callable[[], list[float]]  # a running total each; only differences mean anything
    ends: Sequence[float]  # joules at which each starts again from zero; infinite for NVML
    interval: float  # seconds between updates

    def since(self, before: Sequence[float]) -> float:
        """Joules since an earlier reading; a counter that is lower than before wrapped once."""
        pairs = zip(before, self.joules(), self.ends, strict=True)
        return sum(now - was + (end if now < was else 0.0) for was, now, end in pairs)


def zones(root: Path = POWERCAP) -> dict[str, Path]:
    """RAPL's folders of processor packages, and of memory where it is counted apart from them. The
    MSR and the MMIO driver may both list a package; cores lie within their package's figure."""
    found: dict[str, Path] = {}
    folders = root.glob("intel-rapl*:*") if root.is_dir() else ()
    for folder in sorted(folders, key=lambda path: ("mmio" in path.name, path.name)):
        with contextlib.suppress(OSError):
            name = (folder / "name").read_text().strip()
            if name == "dram":  # of the package that its folder's name begins with
                name += f" {(root / folder.name.rpartition(':')[0] / 'name').read_text().strip()}"
            if name.startswith(("package", "dram")):
                found.setdefault(name, folder)
    return found


def rapl(root: Path = POWERCAP) -> Counter:
    """The counters of all packages. Raises NoCounter where there are none, or none can be read."""
    if not (found := zones(root)):
        raise NoCounter(f"there is no RAPL counter in {root}")

    def read(file: str) -> list[float]:
        try:
            return [int((folder / file).read_text()) / 1e6 for folder in found.values()]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise NoCounter(f"the RAPL counter cannot be read: {reason}") from None

    read("energy_uj")
    name = f"RAPL ({', '.join(found)})"
    return Counter(name, partial(read, "energy_uj"), read("max_energy_range_uj"), 1e-3)


def nvml(indices: Sequence[int], library: Library = None) -> Counter:
    """The counters of CUDA's devices of these numbers, by their UUID: NVML numbers cards otherwise.
    Raises NoCounter."""
    library = library or _pynvml()
    handles = _handles(indices, library)

    def read() -> list[float]:
        try:
            return [library.nvmlDeviceGetTotalEnergyConsumption(one) / 1e3 for one in handles]
        except library.NVMLError as error:
            raise NoCounter(f"NVIDIA's driver counts no energy here: {error}") from None

    read()
    name = f"NVML ({len(handles)} GPU{'s' * (len(handles) != 1)})"
    return Counter(name, read, [float("inf")] * len(handles), 0.1)


def _pynvml() -> Library:
    try:
        import pynvml
    except ImportError:
        raise NoCounter("NVIDIA's counter needs a package: pip install nvidia-ml-py") from None
    return pynvml


def _handles(indices: Sequence[int], library: Library) -> list[Any]:
    import torch

    try:
        library.nvmlInit()
        uuids = [torch.cuda.get_device_properties(index).uuid for index in indices]
        return [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    except library.NVMLError as error:
        raise NoCounter(f"NVIDIA's driver counts no energy here: {error}") from None
    except (AssertionError, AttributeError, RuntimeError):  # torch's, of a number without a card
        raise NoCounter(f"CUDA has no device {max(indices)} here, or hides its UUID") from None


def find(device_type: str, indices: Sequence[int] = (0,)) -> Counter:
    """The counter of a device. Raises NoCounter where there is none."""
    kinds: Mapping[str, Callable[[], Counter]] = {"cuda": partial(nvml, indices), "cpu": rapl}
    if device_type not in kinds:
        raise NoCounter(f"there is no counter of energy for {device_type}")
    return kinds[device_type]()


def power_limit(root: Path = POWERCAP) -> float | None:
    """Watts to which the firmware holds the processor packages in the long term; None where nothing
    tells. Anyone may read it, unlike the counters on most systems."""
    total = 0.0
    for folder in (path for name, path in zones(root).items() if name.startswith("package")):
        for name in folder.glob("constraint_*_name"):
            with contextlib.suppress(OSError, ValueError):
                if name.read_text().strip() == "long_term":
                    limit = name.with_name(name.name.replace("_name", "_power_limit_uw"))
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
        try:
            counter = find(
                device.type, range(ranks.size) if ranks.size > 1 else [device.index or 0]
            )
            before, started = counter.joules(), time.perf_counter()
            time.sleep(IDLE_SECONDS)
            idle = counter.since(before) / (time.perf_counter() - started)
        except NoCounter as error:
            ranks.total([0.0], device)
            return NotCounted(f"{NO_COUNTER} ({error})")
        (counting,) = ranks.total([1.0], device)
        every = counting == ranks.size
        return (
            Meter(counter, idle, device, ranks)
            if every
            else NotCounted(f"{NO_COUNTER} (of some ranks)")
        )

    def energy(self, runs: Callable[[], int]) -> Energy | NotCounted:
        """The energy of a run. runs() carries out one or more and returns their number; it is
        repeated until the counter was updated ENOUGH times."""
        repeats, spent, seconds, going = 0, 0.0, 0.0, True
        try:
            last, started = (
                self.counter.joules() if self.ranks.rank == 0 else [],
                time.perf_counter(),
            )
            while going:
                repeats += runs()
                if self.ranks.rank == 0:
                    spent += self.counter.since(last)  # run by run: a counter wraps once at most
                    last, seconds = self.counter.joules(), time.perf_counter() - started
                going = self._rank_0_says(seconds < ENOUGH * self.counter.interval)
        except NoCounter as error:
            self._rank_0_says(False)
            return NotCounted(f"{self.counter.name} stopped while it was read: {error}")
        if self.ranks.rank:
            return NotCounted("rank 0 counts the energy of all")
        if not spent:
            return NotCounted(f"{self.counter.name} does not move in {seconds:.0f} s")
        joules = max(0.0, spent - self.idle_watts * seconds) / repeats
        return Energy(
            self.counter.name, joules, spent / repeats, seconds / repeats, self.idle_watts, repeats,
            self.counter.interval / seconds,
        )  # fmt: skip

    def _rank_0_says(self, going: bool) -> bool:
        (said,) = self.ranks.first([float(going)], self.device)
        return said > 0


def pooled(energies: Sequence[Energy]) -> Energy:
    """The energy of a run that was counted several times: means over all repeats. The idle power is
    the mean of its readings, the resolution the coarsest."""
    repeats = [one.repeats for one in energies]
    means = {
        name: statistics.fmean([getattr(one, name) for one in energies], repeats)
        for name in ("joules", "joules_with_idle", "seconds")
    }
    idle = statistics.fmean(one.idle_watts for one in energies)
    resolution = max(one.resolution for one in energies)
    return replace(
        energies[0], **means, idle_watts=idle, repeats=sum(repeats), resolution=resolution
    )  # type: ignore[arg-type]


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
