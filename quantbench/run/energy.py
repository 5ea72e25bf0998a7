"""The energy of a run: RAPL's counters (Linux's powercap) of processors, NVIDIA's of its cards.

energy = energy_of(runs, device, ranks)     # of one run, without the idle machine's
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.log.record import NO_COUNTER

if TYPE_CHECKING:
    import torch

    from quantbench.ops.ranks import Ranks

POWERCAP = Path("/sys/class/powercap")
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


def pooled(energies: Sequence[Energy]) -> Energy:
    """The energy of a run that several processes have counted: the mean."""
    joules, seconds, idle = (
        statistics.fmean(getattr(energy, name) for energy in energies)
        for name in ("joules", "seconds", "idle_watts")
    )
    return Energy(energies[0].counter, joules, seconds, idle, sum(e.repeats for e in energies))


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


# ---------------------------------------------------------------------------------- counters


def zones() -> list[Path]:
    """RAPL's processor packages, and memory where it is counted apart from them. Cores lie within
    their package's figure, and the MMIO driver lists the same packages again."""
    names = sorted(POWERCAP.glob("intel-rapl:*/name"))
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
            raise LookupError(f"there is no RAPL counter in {POWERCAP}")
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


def energy_of(
    runs: Callable[[], int], device: "torch.device", ranks: "Ranks"
) -> Energy | NotCounted:
    """The energy of a run, or why it is not known. The ranks of a run call this together.

    runs() carries out one run or more, and returns their number. It is repeated until rank 0 has
    measured for LEAST_SECONDS; where nothing counts it is not called.
    """
    why, repeats, more = None, 0, 1.0
    try:
        name, joules = reader(device, ranks.size)
        first, started = joules(), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        before, begun = joules(), time.perf_counter()
    except ImportError:
        why = "NVIDIA's counter needs a package: pip install nvidia-ml-py"
    except Exception as error:  # whatever a file or a driver raises, the run goes on without it
        why = str(error)
    if ranks.total([float(why is not None)], device)[0]:
        return NotCounted(f"{NO_COUNTER} ({why or 'of some ranks'})")
    while more:
        repeats += runs()
        seconds = time.perf_counter() - begun
        (more,) = ranks.first([float(seconds < LEAST_SECONDS[device.type])], device)
    try:
        spent = joules() - before
    except Exception as error:
        return NotCounted(f"{name} stopped while it was read: {error}")
    if spent <= 0 or before < first:
        return NotCounted(f"{name} does not move in {seconds:.1f} s, or started again at 0")
    watts = (before - first) / (begun - started)
    net = max(0.0, spent - watts * seconds)
    return Energy(name, net / repeats, seconds / repeats, watts, repeats)
