"""Time layers against each other: interleaved, compiled as decode is, their weights from memory.

    race([layer, other], x, compile=True).timings[0].seconds    # the median of one product

A model's weights are never in the processor's cache when a layer is multiplied, so each layer has
enough copies for a copy to be evicted before it is used again. Layers are interleaved because
clocks and neighbours change within seconds: what slows one layer then slows the others too.
"""

import copy
import math
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.errors import QuantbenchError
from quantbench.ops.cpu import compiling
from quantbench.quantize.kernel import fused_weight

WARM_UPS = 3  # rounds that do not count
ROUNDS, MAX_ROUNDS = 20, 200  # the minimum; further rounds while SECONDS have not passed
SECONDS = 1.0
DEVICE_COPIES = 8  # at least, outside the CPU: one product is too short to be timed there
GRAPH_PASSES = 16  # over all copies in a CUDA graph: 128 products, against a launch of some 10 µs
MAX_COPY_BYTES = 1 << 30  # some virtual machines report caches of hundreds of megabytes
CACHE_IF_UNKNOWN = 32 << 20
# As many layers alike as the largest Llama has: where these fit into the cache, so do the model's.
MOST_COPIES = 128

Call = Callable[[nn.Module, Tensor], Tensor]
Run = Callable[[], float]  # -> seconds of one product


class Timing(NamedTuple):
    seconds: float  # of one product: the median over the rounds
    low: float  # quartiles
    high: float
    rounds: int


class Race(NamedTuple):
    timings: list[Timing | str]  # per layer; or why it could not be timed
    outputs: list[Tensor | None]  # per layer: its first product
    rotated: int  # bytes of weights read before a copy is read again
    cache: int  # bytes of the last-level cache
    beside: Timing | None = None  # the extra measurement


@torch.no_grad()
def race(
    layers: Sequence[nn.Module],
    x: Tensor,
    compile: bool,
    beside: Run | None = None,
    too_slow: float = math.inf,
) -> Race:
    """Time layer(x) for every layer; a layer that cannot be compiled or run gets the reason.

    beside: an extra measurement in every round. too_slow: a layer that takes this many times as
    long as the fastest gets WARM_UPS rounds only. A layer that fused decoding takes over is one
    op, and is not compiled.
    """
    compiled = [compile and fused_weight(layer) is None for layer in layers]
    calls = [_compiled(x.device) if each else nn.Module.__call__ for each in compiled]
    first = [attempt(lambda i=i: calls[i](layers[i], x).clone()) for i in range(len(layers))]
    outputs = [y if isinstance(y, Tensor) else None for y in first]
    size = sum(
        module_bytes(layer) for layer, y in zip(layers, outputs, strict=True) if y is not None
    )
    cache = devices.last_level_cache(x.device) or CACHE_IF_UNKNOWN
    least = 1 if x.device.type == "cpu" else DEVICE_COPIES
    number = copies(size, cache, devices.free_memory(x.device) or MAX_COPY_BYTES, least)
    results: dict[int, Any] = dict(enumerate(first))
    runs: dict[int, Run] = {} if beside is None else {-1: beside}
    for i, y in enumerate(outputs):
        if y is not None:
            rotation = [layers[i], *(copy.deepcopy(layers[i]) for _ in range(number - 1))]
            results[i] = attempt(lambda: _run(calls[i], rotation, x, compile))  # noqa: B023
            if callable(results[i]):
                runs[i] = results[i]
    results |= interleaved(runs, too_slow)
    timings = [results[i] for i in range(len(layers))]
    return Race(timings, outputs, number * size, cache, results.get(-1))


def interleaved(runs: Mapping[int, Run], too_slow: float = math.inf) -> dict[int, Timing]:
    """Call every run once a round, always in the same order. The first WARM_UPS do not count, but
    for a run that takes `too_slow` times as long as the fastest: it gets no more."""
    seconds: dict[int, list[float]] = {i: [] for i in runs}
    started, number = time.perf_counter(), -WARM_UPS
    while number < ROUNDS or (number < MAX_ROUNDS and time.perf_counter() - started < SECONDS):
        if number == 0:
            limit = too_slow * min(map(min, seconds.values()), default=0.0)
            runs = {i: run for i, run in runs.items() if min(seconds[i]) <= limit}
            seconds |= {i: [] for i in runs}
        for i, run in runs.items():
            seconds[i].append(run())
        number += 1
    timings = {}
    for i, each in seconds.items():
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        timings[i] = Timing(middle, low, high, len(each))
    return timings


def attempt(action: Callable[[], Any]) -> Any:
    """The action's result, or the first line of its error: a candidate on which a compiler or a
    kernel fails is out of the race, and the others go on."""
    try:
        return action()
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return first if isinstance(error, QuantbenchError) else f"{type(error).__name__}: {first}"


def _compiled(device: torch.device) -> Call:
    """layer(x), compiled separately: dynamo caches by code object. Copies of a layer share it,
    since weights are inputs of the compiled function."""

    def product(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    separate = types.FunctionType(product.__code__.replace(), globals(), "product")
    # As the Generator compiles decode, without CUDA graphs: _run captures those.
    cuda = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
    options = compiling.options_of_inductor() if device.type == "cpu" else cuda
    return torch.compile(separate, fullgraph=True, dynamic=False, options=options)


def _run(call: Call, rotation: list[nn.Module], x: Tensor, compile: bool) -> Run:
    """Times all copies of a layer, as a mean. Compiled for CUDA they are one graph, as decode is,
    long enough that its launch takes no share of the time."""

    def multiply(passes: int = 1) -> None:
        for layer in rotation * passes:
            call(layer, x)

    products, begin = len(rotation), multiply
    if x.device.type == "cuda" and compile:
        with torch.cuda.device(x.device):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    call(rotation[0], x)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                multiply(GRAPH_PASSES)
        products, begin = GRAPH_PASSES * len(rotation), graph.replay

    def run() -> float:
        devices.synchronize(x.device)
        started = time.perf_counter()
        begin()
        devices.synchronize(x.device)
        return (time.perf_counter() - started) / products

    return run


def copies(size: int, cache: int, free: int, least: int = 1) -> int:
    """How many copies of each layer to make: all together they fill the cache twice, since a round
    reads every copy once, unless that takes more than MOST_COPIES or a quarter of `free` bytes.
    size: bytes of one copy of each."""
    wanted = max(least, math.ceil(2 * cache / max(1, size)))
    room = min(free // 4, least * MAX_COPY_BYTES) // max(1, size)
    return max(1, min(wanted, room, MOST_COPIES))


def module_bytes(module: nn.Module) -> int:
    return sum(map(devices.stored_bytes, module.parameters()))
