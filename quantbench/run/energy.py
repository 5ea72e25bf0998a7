"""The energy of a run: RAPL's counters (Linux's powercap) of processors, NVIDIA's of its cards.

counter = meter(device, ranks)          # reads the idle machine
energy = counter.energy(runs, again)    # of each run since then, without the idle machine's
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench import host
from quantbench.log.record import NO_COUNTER

if TYPE_CHECKING:
    import torch

    from quantbench.ops.ranks import Ranks

POWERCAP = "sys/class/powercap"
IDLE_SECONDS = 1.0  # for which the idle machine is read; only where there is a counter
LEAST_SECONDS = {"cpu": 0.05, "cuda": 5.0}  # 50 updates of the counter


@dataclass(frozen=True)
class Energy:
    """The energy of one run; where it was repeated, the mean of the repeats."""

    counter: str
    joules: float  # without the idle machine's
    seconds: float
    idle_watts: float
    repeats: int


@dataclass(frozen=True)
class NotCounted:
    why_not: str

    def energy(self, runs: int, again: Callable[[], object]) -> "NotCounted":
        """As `Meter.energy`: itself, and no further run."""
        return self


def pooled(energies: Sequence[Energy]) -> Energy:
    """The energy of a run that several processes have counted: the mean."""
    joules, seconds, idle = (
        statistics.fmean(getattr(energy, name) for energy in energies)
        for name in ("joules", "seconds", "idle_watts")
    )
    return Energy(energies[0].counter, joules, seconds, idle, sum(e.repeats for e in energies))


def sentence(joules: float | None, idle_watts: float | None, why_not: str | None) -> str:
    """Joules of a new token, or why they are not known; "" without a counter."""
    if joules is not None:
        idle = "" if idle_watts is None else f", {idle_watts:.3g} W"
        return f"{joules:.3g} J a new token, without the idle machine's{idle}"
    if why_not is not None and not why_not.startswith(NO_COUNTER):
        return f"joules of a new token are not known: {why_not}"
    return ""


# ---------------------------------------------------------------------------------- counters


def zones() -> list[Path]:
    """RAPL's processor packages, and memory where it is counted apart from them. Cores lie within
    their package's figure, and the MMIO driver lists the same packages again."""
    names = sorted((host.ROOT / POWERCAP).glob("intel-rapl:*/name"))
    return [file.parent for file in names if file.read_text().startswith(("package", "dram"))]


def power_limit() -> float | None:
    """Watts to which the firmware holds the processor packages in the long term; None where nothing
    tells. Anyone may read it, unlike the counters on most systems."""
    limits = [zone / "constraint_0_power_limit_uw" for zone in zones()]
    return sum(int(file.read_text()) for file in limits if file.exists()) / 1e6 or None


def reader(device: "torch.device", ranks: int) -> tuple[str, Callable[[], float]]:
    """The counter's name, and what reads its joules since some time: of all packages, or of the
    cards of a run. Raises whatever a file, a library or a driver does."""
    if device.type == "cpu":
        if not (folders := zones()):
            raise LookupError(f"there is no RAPL counter in {host.ROOT / POWERCAP}")
        return "RAPL", lambda: sum(int((f / "energy_uj").read_text()) for f in folders) / 1e6
    if device.type != "cuda":
        raise LookupError(f"there is no counter of energy for {device.type}")
    import pynvml as nvml
    import torch

    nvml.nvmlInit()
    indices = range(ranks) if ranks > 1 else [device.index or 0]
    # NVML numbers cards otherwise than CUDA, which may hide some.
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indices]
    cards = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return "NVML", lambda: sum(map(nvml.nvmlDeviceGetTotalEnergyConsumption, cards)) / 1e3


class Meter:
    """A counter that was read while the machine was idle, and is read again after a run."""

    def __init__(self, device: "torch.device", ranks: "Ranks") -> None:
        """Raises what `reader` does."""
        self.device, self.ranks = device, ranks
        self.name, self.joules = reader(device, ranks.size)
        first, started = self.joules(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        self.before, self.begun = self.joules(), time.perf_counter()
        self.watts = (self.before - first) / (self.begun - started)

    def energy(self, runs: int, again: Callable[[], object]) -> Energy | NotCounted:
        """The energy of a run, of which there were `runs` since the meter was made; `again` carries
        out another one, until rank 0 has measured for LEAST_SECONDS."""
        while True:
            seconds = time.perf_counter() - self.begun
            too_few = not runs or seconds < LEAST_SECONDS[self.device.type]
            if not self.ranks.first([float(too_few)], self.device)[0]:
                break
            again()
            runs += 1
        try:
            spent = self.joules() - self.before
        except Exception as error:
            return NotCounted(f"{self.name} stopped while it was read: {error}")
        if spent <= 0 or self.watts < 0:
            why = f"does not move in {seconds:.1f} s, or started again at 0"
            return NotCounted(f"{self.name} {why}")
        net = max(0.0, spent - self.watts * seconds)
        return Energy(self.name, net / runs, seconds / runs, self.watts, runs)


def meter(device: "torch.device", ranks: "Ranks") -> Meter | NotCounted:
    """What counts the energy of the next runs, or why nothing does. The ranks of a run call this,
    and `energy`, together."""
    counter, why = None, "of some ranks"
    try:
        counter = Meter(device, ranks)
    except ImportError:
        why = "NVIDIA's counter needs a package: pip install nvidia-ml-py"
    except Exception as error:  # whatever a file or a driver raises, the run goes on without it
        why = str(error)
    lacking = ranks.total([float(counter is None)], device)[0]
    return NotCounted(f"{NO_COUNTER} ({why})") if counter is None or lacking else counter
