"""One linear layer's product under every scheme, timed as decode runs it; for `compare roofline`.

A product of a few microseconds would be timed together with the call of the compiled function
around it, which in decode is one for the whole model. So a layer is a stack of copies that lie
elsewhere in memory each, multiplied one after the other in one call.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import devices
from errors import KernelError
from models.checkpoints.load import load_config
from quantize.autoquant.race import Timing, module_bytes, race
from quantize.registry import Quantizer, kernels_for
from quantize.spec import parse_scheme
from run.bandwidth import BYTES, Bandwidth

STOCK = ("torchao", "torch")  # kernels that others wrote
STACK_BYTES, STACK_MOST = 32 << 20, 16  # of a stack: some 0.5 ms; and how many copies at most


class Stack(nn.Module):
    """Copies of a layer: from x (B, K) all their products side by side, (B, copies · N)."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(count - 1))])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.copies], -1)


def kernels(schemes: list[str], device: str, precision: str) -> dict[str, list[str]]:
    """By scheme, the kernels to time: the one that auto takes, then any stock one.

    Raises KernelError for a scheme that has none here.
    """
    found: dict[str, list[str]] = {}
    where, dtype = devices.resolve(device), getattr(torch, precision)
    for name in schemes:
        running = kernels_for(parse_scheme(name), "auto", where, dtype)
        stock = [kernel for kernel in running if kernel in STOCK]
        found[name] = list(dict.fromkeys([running[0], *stock]))
    return found


def shapes(checkpoint_path: str) -> list[dict[str, Any]]:
    """Every distinct shape among the model's linear layers: names, rows (outputs), columns
    (inputs), and how many layers have it."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for name, (rows, columns) in load_config(checkpoint_path).linear_shapes().items():
        short = name.split(".", 2)[-1].split(".")[-1]
        row = found.setdefault((rows, columns), {"names": [], "count": 0})
        row |= {"rows": rows, "columns": columns, "count": row["count"] + 1}
        if short not in row["names"]:
            row["names"].append(short)
    return list(found.values())


class Products:
    """Times layers of one device and dtype."""

    def __init__(self, device: str, precision: str) -> None:
        self.device, self.dtype = devices.resolve(device), getattr(torch, precision)
        self.bandwidth = Bandwidth(self.device)

    @torch.no_grad()
    def measure(
        self, rows: int, columns: int, kernels: dict[str, list[str]], batch_size: int
    ) -> dict[str, Any]:
        """Every scheme's product of (batch_size, columns) with a weight (rows, columns).

        products: by scheme and kernel its seconds, quartiles and bytes, or why there is none
        bandwidth: bytes per second, read in the same rounds
        bandwidth_probe, bandwidth_caveat: of run.bandwidth.Bandwidth
        rotated, cache: bytes that are read before any weight is read again, and bytes of the
            last-level cache
        """
        generator = torch.Generator().manual_seed(0)
        plain = nn.Linear(columns, rows, bias=False, device=self.device, dtype=self.dtype)
        nn.init.normal_(plain.weight, std=0.02)
        x = torch.randn(batch_size, columns, generator=generator).to(self.device, self.dtype)
        names = [(scheme, kernel) for scheme, found in kernels.items() for kernel in found]
        stacks: dict[tuple[str, str], Stack] = {}
        refused: dict[tuple[str, str], str] = {}
        for name in names:
            try:
                stacks[name] = self._stack(plain, *name)
            except KernelError as error:
                refused[name] = str(error)
        result = race(
            list(stacks.values()), x, compile=True, beside=lambda: BYTES / self.bandwidth.measure()
        )
        timed = dict(zip(stacks, result.timings, strict=True))
        assert result.beside
        return {
            "products": [
                {"scheme": name[0], "kernel": name[1]}
                | (figures(timed[name], stacks[name]) if name in stacks else _why(refused[name]))
                for name in names
            ],
            "bandwidth": BYTES / result.beside.seconds,
            "bandwidth_probe": self.bandwidth.probe,
            "bandwidth_caveat": self.bandwidth.caveat,
            # With two copies of each there is a round, and its reading, between two uses of one.
            "rotated": result.rotated + BYTES * (result.least_copies > 1),
            "cache": result.cache,
        }

    def _stack(self, plain: nn.Linear, scheme: str, kernel: str) -> Stack:
        like = copy.deepcopy(plain)
        quantizer = Quantizer(parse_scheme(scheme), self.device, self.dtype, kernel)
        layer = quantizer("layer", like).requires_grad_(False)
        return Stack(layer, max(1, min(STACK_MOST, math.ceil(STACK_BYTES / module_bytes(layer)))))


def figures(timing: Timing | str, stack: Stack) -> dict[str, Any]:
    """Of one product: seconds with their quartiles, the bytes of its weights."""
    if isinstance(timing, str):
        return _why(timing)
    count = len(stack.copies)
    return {
        "seconds": timing.seconds / count,
        "seconds_low": timing.low / count,
        "seconds_high": timing.high / count,
        "rounds": timing.rounds,
        "bytes": module_bytes(stack) // count,
    }


def _why(reason: str) -> dict[str, Any]:
    return {"why_not": reason}
