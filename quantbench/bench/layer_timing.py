"""One linear layer's product under every scheme, timed as decode runs it; for recipes.

A product takes a few microseconds, as much as a call of a compiled function; in decoding, one call
covers the whole model. So one call here multiplies by a stack of copies of the layer, each at
another place in memory.
"""

import copy
import math

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.bench.answers import Product, ShapeTimings
from quantbench.cli import quiet
from quantbench.errors import KernelError
from quantbench.quantize.race import Timing, module_bytes, race
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse_scheme
from quantbench.run.bandwidth import BYTES, reader

STACK_BYTES = 32 << 20  # at least, of a stack's weights: about 0.5 ms a call
STACK_MOST = 16  # copies in a stack


class Stack(nn.Module):
    """Copies of a layer: from x (B, K) all their products side by side, (B, copies · N)."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(count - 1))])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.copies], -1)


@torch.no_grad()
def products(
    rows: int,
    columns: int,
    kernels: dict[str, list[str]],
    device: str,
    precision: str,
    batch_size: int,
) -> ShapeTimings:
    """Every scheme's product of (batch_size, columns) with a weight (rows, columns).

    kernels: by scheme, the names of those to time.
    """
    quiet(False)
    where, dtype, bandwidth = devices.resolve(device), getattr(torch, precision), reader(device)
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(columns, rows, bias=False, device=where, dtype=dtype)
    nn.init.normal_(plain.weight, std=0.02)
    x = torch.randn(batch_size, columns, generator=generator).to(where, dtype)
    pairs = [(scheme, kernel) for scheme, names in kernels.items() for kernel in names]
    stacks: dict[tuple[str, str], Stack] = {}
    refused: dict[tuple[str, str], str] = {}
    for pair in pairs:
        try:
            stacks[pair] = _stack(plain, *pair)
        except KernelError as error:
            refused[pair] = str(error)
    result = race(
        list(stacks.values()), x, compile=True, beside=lambda: BYTES / bandwidth.measure()
    )
    timed = dict(zip(stacks, result.timings, strict=True))
    assert result.beside
    return ShapeTimings(
        products=[
            _product(*pair, timed.get(pair, refused.get(pair, "")), stacks.get(pair))
            for pair in pairs
        ],
        bandwidth=BYTES / result.beside.seconds,
        bandwidth_probe=bandwidth.probe,
        bandwidth_caveat=bandwidth.caveat,
        rotated=result.rotated + BYTES,  # a round also reads the bandwidth probe
        cache=result.cache,
    )


def _stack(plain: nn.Linear, scheme: str, kernel: str) -> Stack:
    like = copy.deepcopy(plain)
    quantizer = Quantizer(parse_scheme(scheme), plain.weight.device, plain.weight.dtype, kernel)
    layer = quantizer("layer", like).requires_grad_(False)
    return Stack(layer, max(1, min(STACK_MOST, math.ceil(STACK_BYTES / module_bytes(layer)))))


def _product(scheme: str, kernel: str, timing: Timing | str, stack: Stack | None) -> Product:
    """timing: of the whole stack; or why there is none."""
    if isinstance(timing, str) or stack is None:
        return Product(scheme=scheme, kernel=kernel, why_not=str(timing))
    count = len(stack.copies)
    return Product(
        scheme=scheme,
        kernel=kernel,
        seconds=timing.seconds / count,
        seconds_low=timing.low / count,
        seconds_high=timing.high / count,
        rounds=timing.rounds,
        bytes=module_bytes(stack) // count,
    )
