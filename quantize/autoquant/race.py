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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.ops.cpu import build
from quantbench.quantize.kernel import fused_weight

WARM_UPS = 3
HEATS = 3  # rounds after which a layer that is too slow is dropped
ROUNDS, MAX_ROUNDS = 20, 200  # the minimum; further rounds while SECONDS have not passed
SECONDS = 1.0
DEVICE_COPIES = 8  # at least, outside the CPU: one product is too short to be timed there
MAX_COPY_BYTES = 1 << 30  # some virtual machines report caches of hundreds of megabytes
CACHE_IF_UNKNOWN = 32 << 20
LAUNCH_CYCLES = 200_000  # about 0.1 ms of a GPU: longer than launching a graph takes

Call = Callable[[nn.Module, Tensor], Tensor]
Run = Callable[[], float]  # -> seconds of one product


@dataclass(frozen=True)
class Timing:
    seconds: float  # of one product: the median over the rounds
    low: float  # quartiles
    high: float
    rounds: int

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.seconds <= self.high < math.inf:
            raise ValueError("a timing is three positive numbers in order")

    def times(self, factor: float) -> "Timing":
        return Timing(factor * self.seconds, factor * self.low, factor * self.high, self.rounds)


@dataclass(frozen=True)
class Race:
    timings: list[Timing | str]  # per layer; or why it could not be timed
    outputs: list[Tensor | None]  # per layer: its first product
    rotated: int  # bytes of weights read before a copy is read again; if less than
    cache: int  # bytes of the last-level cache, some weights may have come from it
    beside: Timing | None = None  # the extra measurement


@torch.no_grad()
def race(
    layers: Sequence[nn.Module],
    x: Tensor,
    compile: bool,
    beside: Callable[[], float] | None = None,
    too_slow: float = math.inf,
) -> Race:
    """Time layer(x) for every layer; a layer that cannot be compiled or run gets the reason.

    beside: an extra measurement in every round, in seconds. too_slow: a layer that takes this many
    times as long as the fastest gets HEATS rounds only. A layer that fused decoding takes over is
    one op, and is not compiled.
    """
    results: dict[int, Any] = {}
    outputs: list[Tensor | None] = [None] * len(layers)
    calls: dict[int, Call] = {}
    for i, layer in enumerate(layers):
        call = _compiled(x.device) if compile and fused_weight(layer) is None else _product
        results[i] = attempt(lambda: call(layer, x).clone())  # noqa: B023
        if isinstance(results[i], Tensor):
            calls[i], outputs[i] = call, results[i]
    if too_slow < math.inf:
        heats = interleaved({i: _run(calls[i], [layers[i]], x, compile) for i in calls}, HEATS)
        limit = too_slow * min((one.seconds for one in heats.values()), default=0.0)
        results |= heats
        calls = {i: call for i, call in calls.items() if heats[i].seconds <= limit}
    cache = devices.last_level_cache(x.device) or CACHE_IF_UNKNOWN
    size = sum(module_bytes(layers[i]) for i in calls)
    least = 1 if x.device.type == "cpu" else DEVICE_COPIES
    number = copies(size, cache, devices.free_memory(x.device) or MAX_COPY_BYTES, least)
    runs: dict[int, Run] = {}
    for i, call in calls.items():
        rotation = [layers[i], *(copy.deepcopy(layers[i]) for _ in range(number - 1))]
        results[i] = attempt(lambda: _run(call, rotation, x, compile))  # noqa: B023
        if callable(results[i]):
            runs[i] = results[i]
    if beside:
        runs[-1] = beside
    results |= interleaved(runs)
    timings = [results[i] for i in range(len(layers))]
    return Race(timings, outputs, number * size, cache, results.get(-1))


def interleaved(runs: Mapping[int, Run], rounds: int | None = None) -> dict[int, Timing]:
    """Call every run once a round, always in the same order; the first WARM_UPS do not count.

    rounds: that many, instead of ROUNDS and more while SECONDS have not passed.
    """
    seconds: dict[int, list[float]] = {i: [] for i in runs}
    least, most = (rounds, rounds) if rounds else (ROUNDS, MAX_ROUNDS)
    started, number = time.perf_counter(), -WARM_UPS
    while number < least or (number < most and time.perf_counter() - started < SECONDS):
        for i, run in runs.items():
            taken = run()
            if number >= 0:
                seconds[i].append(taken)
        number += 1
    timings = {}
    for i, measured in seconds.items():
        low, middle, high = statistics.quantiles(measured, n=4, method="inclusive")
        timings[i] = Timing(middle, low, high, len(measured))
    return timings


def attempt(action: Callable[[], Any]) -> Any:
    """The action's result, or the first line of its error: a candidate on which a compiler or a
    kernel fails is out of the race, and the others go on."""
    try:
        return action()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"


def _product(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _compiled(device: torch.device) -> Call:
    """A separately compiled _product: dynamo caches by code object. Copies of a layer share it,
    since weights are inputs of the compiled function."""
    own = types.FunctionType(_product.__code__.replace(), _product.__globals__, "product")
    # As the Generator compiles decode, without CUDA graphs: _run captures those.
    options = {"coordinate_descent_tuning": True} if device.type == "cuda" else {}
    if device.type == "cpu":
        options = build.options_of_inductor()
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def _run(call: Call, rotation: list[nn.Module], x: Tensor, compile: bool) -> Run:
    """Times all copies of a layer, as a mean. Compiled for CUDA they are one graph, as decode is:
    launches cost nothing."""

    def all_copies() -> float:
        devices.synchronize(x.device)
        started = time.perf_counter()
        for layer in rotation:
            call(layer, x)
        devices.synchronize(x.device)
        return (time.perf_counter() - started) / len(rotation)

    if x.device.type != "cuda" or not compile:
        return all_copies
    with torch.cuda.device(x.device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                call(rotation[0], x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer in rotation:
                call(layer, x)

    def one_graph() -> float:
        with torch.cuda.device(x.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LAUNCH_CYCLES)  # meanwhile the graph is launched
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(rotation)

    return one_graph


def copies(size: int, cache: int, free: int, least: int = 1) -> int:
    """How many copies of each layer to make: all together they fill the cache twice, since a round
    reads every copy once. size: bytes of one copy of each. At most a quarter of `free` bytes."""
    wanted = max(least, math.ceil(2 * cache / max(1, size)))
    return max(1, min(wanted, min(free // 4, least * MAX_COPY_BYTES) // max(1, size)))


def module_bytes(module: nn.Module) -> int:
    return sum(map(devices.stored_bytes, module.parameters()))
