"""The machine that an estimate is for: this one, whose speed is read at once, or a card.

machine = here(devices.resolve("auto"))     # about a second, and 1 GiB for a moment
machine = card("NVIDIA L4")
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from quantbench import devices
from quantbench.errors import MemoryShortage
from quantbench.estimate import efficiency
from quantbench.estimate.datasheets import Link, find
from quantbench.estimate.predict import Machine
from quantbench.run import energy
from quantbench.run.bandwidth import BYTES, Bandwidth
from quantbench.text import size

PRODUCT = (256, 2048, 2048)  # rows, inner, outer of the product by which arithmetic is read
ENOUGH = 0.1  # seconds of products
# Between ranks on one CPU, through shared memory or gloo. Assumed; nothing recorded it.
SHARED_MEMORY = Link("shared memory", 4e9, nvlink=False)


@dataclass(frozen=True)
class Speed:
    """How fast a device is at this moment."""

    read: float  # bytes per second, of memory
    multiply: float  # operations per second, of an unquantized product


def read_speed(
    device: torch.device, precision: torch.dtype, bandwidth: Bandwidth | None = None
) -> Speed:
    """The speed of memory and of a product. bandwidth: a reader that is there already. Raises
    MemoryShortage where the block that is read would not fit."""
    if bandwidth is None:
        free = devices.free_memory(device)
        if free is not None and free < 2 * BYTES:
            raise MemoryShortage(
                f"reading the memory's speed takes {size(BYTES)}, and {size(free)} are free"
            )
        bandwidth = Bandwidth(device)
    # On processors without instructions for bfloat16 torch multiplies it ten times as slowly as
    # float32, in which our kernels multiply there.
    dtypes = {precision, torch.float32} if device.type == "cpu" else {precision}
    return Speed(bandwidth.measure(), max(_multiply(device, dtype) for dtype in dtypes))


def _multiply(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a product; the fastest of several, others were interrupted."""
    rows, inner, outer = PRODUCT
    x = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(outer, inner, device=device).to(dtype)
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < ENOUGH:
        devices.synchronize(device)
        started = time.perf_counter()
        nn.functional.linear(x, weight)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * outer / min(seconds)


def here(
    device: torch.device, precision: torch.dtype = torch.bfloat16, speed: Speed | None = None
) -> Machine:
    """This machine. speed: as it was read already. Raises MemoryShortage as `read_speed` does."""
    speed = speed or read_speed(device, precision)
    name = str(devices.describe(device)["name"])
    return Machine(
        name,
        f"{name}, measured now: memory {speed.read / 1e9:.1f} GB/s, a product "
        f"{speed.multiply / 1e9:.0f} Gflop/s",
        device,
        lambda dtype: speed.multiply,
        speed.read,
        efficiency.of_cpu,
        lambda ranks: SHARED_MEMORY,
        energy.power_limit() if device.type == "cpu" else None,
        devices.free_memory(device),
    )


def card(name: str) -> Machine:
    """A card by its data sheet. Raises UsageError for one that has none here."""
    sheet = find(name)
    reached = efficiency.of_card(sheet)
    return Machine(
        sheet.name,
        f"not measured: data sheet ({sheet.source})",
        torch.device("cuda"),
        sheet.peak,
        sheet.bandwidth,
        lambda scheme: reached,
        sheet.link_among,
        sheet.power,
        sheet.memory,
    )
