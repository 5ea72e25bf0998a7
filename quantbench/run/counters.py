"""Counters of energy: Linux's powercap and NVIDIA's driver.

meter = Meter.find(device, ranks)           # NotCounted, with the reason, where nothing counts
energy = meter.energy(runs)                 # of one run; idle power is subtracted
"""

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.log.record import NO_COUNTER
from quantbench.run.energy import Energy, NotCounted
from quantbench.text import counted

if TYPE_CHECKING:
    import torch

    from quantbench.ops.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")
IDLE_SECONDS = 1.0  # for which the idle machine is read; only where there is a counter
UPDATES = 50  # of the counter that a measurement spans: one of them is 2 %


class NoCounter(Exception):
    """There is no counter of energy; the message says why, in a few words."""


@dataclass(frozen=True)
class Counter:
    """Counters of energy that are read together."""

    name: str  # "RAPL (package-0, dram)", "NVML (2 GPUs)"
    read: Callable[[], list[float]]  # joules since some time, a counter each; raises NoCounter
    ends: Sequence[float]  # joules at which each counter starts again from zero
    interval: float  # seconds between updates

    def between(self, before: Sequence[float], after: Sequence[float]) -> float:
        """Joules between two readings; a counter that is lower than before wrapped once."""
        each = zip(before, after, self.ends, strict=True)
        return sum(now - was + (end if now < was else 0.0) for was, now, end in each)


def zones(root: Path) -> list[tuple[str, Path]]:
    """RAPL's processor packages, and memory where it is counted apart from them: name and folder.
    Cores lie within their package's figure, and the MMIO driver lists the same packages again."""
    folders = [path.parent for path in sorted(root.glob("intel-rapl:*/name"))]
    named = [((folder / "name").read_text().strip(), folder) for folder in folders]
    return [(name, folder) for name, folder in named if name.startswith(("package", "dram"))]


def rapl(root: Path = POWERCAP) -> Counter:
    """The counters of all packages. Raises NoCounter if there are none, as reading them may."""
    if not (found := zones(root)):
        raise NoCounter(f"there is no RAPL counter in {root}")

    def read(file: str = "energy_uj") -> list[float]:
        try:
            return [int((folder / file).read_text()) / 1e6 for _, folder in found]
        except OSError as error:
            raise NoCounter(f"the RAPL counter cannot be read: {error.strerror}") from None

    names = ", ".join(name for name, _ in found)
    return Counter(f"RAPL ({names})", read, read("max_energy_range_uj"), 1e-3)


def nvml(indices: Sequence[int]) -> Counter:
    """The counters of CUDA's devices of these numbers, found by their UUID: NVML numbers cards
    otherwise. Raises NoCounter."""
    import torch

    try:
        nvml = importlib.import_module("pynvml")
        uuids = [torch.cuda.get_device_properties(index).uuid for index in indices]
    except ImportError:
        raise NoCounter("NVIDIA's counter needs a package: pip install nvidia-ml-py") from None
    except (AssertionError, AttributeError, RuntimeError):  # torch's, of a number without a card
        raise NoCounter(f"CUDA has no device {max(indices)} here, or hides its UUID") from None

    def read() -> list[float]:
        try:
            nvml.nvmlInit()
            cards = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            return [nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3 for card in cards]
        except nvml.NVMLError as error:
            raise NoCounter(f"NVIDIA's driver counts no energy here: {error}") from None

    return Counter(f"NVML ({counted(len(uuids), 'GPU')})", read, [math.inf] * len(uuids), 0.1)


def find(device_type: str, indices: Sequence[int] = (0,)) -> Counter:
    """The counter of a device. Raises NoCounter if there is none."""
    if device_type not in ("cuda", "cpu"):
        raise NoCounter(f"there is no counter of energy for {device_type}")
    return nvml(indices) if device_type == "cuda" else rapl()


def power_limit(root: Path = POWERCAP) -> float | None:
    """Watts to which the firmware holds the processor packages in the long term; None where nothing
    tells. Anyone may read it, unlike the counters on most systems."""
    files = [file for _, zone in zones(root) for file in zone.glob("constraint_*_name")]
    limits = [
        int(file.with_name(file.name.replace("_name", "_power_limit_uw")).read_text())
        for file in files
        if file.read_text().strip() == "long_term"
    ]
    return sum(limits) / 1e6 or None


@dataclass(frozen=True)
class Meter:
    """A counter of a run's devices, and the idle machine's power. The ranks of a run call its
    methods together; each reads the counters of all, and rank 0 says when they are enough."""

    counter: Counter
    idle_watts: float
    device: "torch.device"
    ranks: "Ranks"

    @staticmethod
    def find(device: "torch.device", ranks: "Ranks") -> "Meter | NotCounted":
        """The meter, or why there is none. Where there is a counter it takes IDLE_SECONDS."""
        cards = range(ranks.size) if ranks.size > 1 else [device.index or 0]
        why = None
        try:
            counter = find(device.type, cards)
            before, started = counter.read(), time.perf_counter()
            time.sleep(IDLE_SECONDS)
            idle = counter.between(before, counter.read()) / (time.perf_counter() - started)
        except NoCounter as error:
            why = str(error)
        if ranks.total([float(why is not None)], device)[0]:
            return NotCounted(f"{NO_COUNTER} ({why or 'of some ranks'})")
        return Meter(counter, idle, device, ranks)

    def energy(self, runs: Callable[[], int]) -> Energy | NotCounted:
        """The energy of a run. runs() carries out one or more and returns their number; it is
        repeated until the counter was updated UPDATES times."""
        counter, going, lost = self.counter, 1.0, None
        repeats, spent, seconds, started = 0, 0.0, 0.0, time.perf_counter()
        last = counter.read()
        while going:
            repeats += runs()
            try:  # run by run: a counter wraps once at most
                now, seconds = counter.read(), time.perf_counter() - started
                spent, last = spent + counter.between(last, now), now
            except NoCounter as error:
                lost = f"stopped while it was read: {error}"
            more = lost is None and seconds < UPDATES * counter.interval
            (going,) = self.ranks.first([float(more)], self.device)
        if lost or not spent:
            return NotCounted(f"{counter.name} {lost or f'does not move in {seconds:.1f} s'}")
        net = max(0.0, spent - self.idle_watts * seconds)
        return Energy(counter.name, net / repeats, seconds / repeats, self.idle_watts, repeats)
