"""Layers timed against each other: in turn, compiled as decode is, their weights from memory.

    result = race([layer, other], x, compile=True)
    result.timings[0].seconds       # the median of one product, and its quartiles

A layer that has just been multiplied lies in the processor's cache, and in a model it never does:
so each layer has copies, as many as it takes for a copy to have left the cache before its turn
comes again. In turn, because clocks and neighbours change from second to second: what slows one
layer slows the others too.
"""

import copy
import math
import random
import statistics
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.ops.cpu import build
from quantbench.quantize.kernel import fused_weight

WARM_UPS = 3
HEATS = 3  # rounds of a layer that turns out to be too slow to take part in the others
ROUNDS, MAX_ROUNDS = 20, 200  # at least so many; more, while they take less than SECONDS in all
SECONDS = 1.0
TURNS = WARM_UPS + MAX_ROUNDS
MOST_BYTES = 1 << 30  # of copies: some virtual machines claim caches of hundreds of megabytes
CACHE_IF_UNKNOWN = 32 << 20
# What generate.Generator compiles decode with, but for CUDA graphs: those are captured here.
COMPILE_OPTIONS = {"cuda": {"coordinate_descent_tuning": True}}

Call = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Timing:
    """Seconds of one product: median and quartiles over so many rounds."""

    seconds: float
    low: float
    high: float
    rounds: int

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.seconds <= self.high < math.inf:
            raise ValueError("a timing is three positive numbers in order")

    def times(self, factor: float) -> "Timing":
        """The timing of something that takes `factor` times as long."""
        quartiles = (factor * seconds for seconds in (self.seconds, self.low, self.high))
        return Timing(*quartiles, self.rounds)


@dataclass(frozen=True)
class Race:
    """What came out, layer by layer: a timing, or why there is none; the first product, or None.

    rotated: bytes of weights that are read before any weight is read again; cache: bytes of the
    last-level cache. Where rotated < cache, some weights may have come from the cache. beside: what
    else was timed in every round. least_copies: of any layer, so many.
    """

    timings: list[Timing | str]
    outputs: list[Tensor | None]
    rotated: int
    cache: int
    beside: Timing | None = None
    least_copies: int = 1


@torch.no_grad()
def race(
    layers: Sequence[nn.Module],
    x: Tensor,
    compile: bool,
    done: Callable[[], None] = lambda: None,
    beside: Callable[[], float] | None = None,
    too_slow: float = math.inf,
) -> Race:
    """Time layer(x) for every layer; `done` is called as each is compiled. `beside` times something
    else, in seconds, once a round. A layer that takes `too_slow` times as long as the fastest is
    timed HEATS times only.

    A layer that cannot be compiled or run is left out, with the reason. One that a fused decoding
    step takes over is a single op, and is not compiled.
    """
    opaque = [fused_weight(layer) is not None for layer in layers]
    calls = [_compiled(x.device) if compile and not one else _product for one in opaque]
    firsts: list[Tensor | str] = []
    for call, layer in zip(calls, layers, strict=True):
        firsts.append(attempt(lambda: call(layer, x).clone()))  # noqa: B023
        done()
    running = [i for i, first in enumerate(firsts) if isinstance(first, Tensor)]
    slow: dict[int, Timing] = {}
    if too_slow < math.inf:
        slow = _heats([(i, calls[i], layers[i]) for i in running], x, too_slow)
    running = [i for i in running if i not in slow]
    sizes = [module_bytes(layers[i]) for i in running]
    cache, whole = last_level_cache(x.device), x.device.type != "cpu"
    numbers = copies(sizes, cache, _budget(x.device), whole)
    prepare = _preparation(x.device, compile)
    results: dict[int, Timing | str] = {i: str(first) for i, first in enumerate(firsts)} | slow
    runs: dict[int, Callable[[int], float]] = {}
    for i, number in zip(running, numbers, strict=True):
        rotation = [layers[i], *(copy.deepcopy(layers[i]) for _ in range(number - 1))]
        run = attempt(lambda: prepare(calls[i], rotation, x))  # noqa: B023
        if isinstance(run, str):
            results[i] = run
        else:
            runs[i] = run
    if not whole:
        torch.ones(
            min(cache, MOST_BYTES), dtype=torch.uint8
        )  # evicts the copies from the last-level cache
    if beside:
        runs[-1] = lambda turn: beside()
    timed = interleaved(runs)
    results |= timed
    return Race(
        [results[i] for i in range(len(layers))],
        [first if isinstance(first, Tensor) else None for first in firsts],
        rotated(sizes, numbers, cache, whole),
        cache,
        timed.get(-1),
        min(numbers, default=1),
    )


def _heats(
    entries: Sequence[tuple[int, Call, nn.Module]], x: Tensor, too_slow: float
) -> dict[int, Timing]:
    """The timings of those that take `too_slow` times as long as the fastest. Their weights may
    come from the cache, so in the other rounds they would be slower still."""
    seconds: dict[int, list[float]] = {i: [] for i, *_ in entries}
    for _ in range(HEATS):
        for i, call, layer in entries:
            devices.synchronize(x.device)
            started = time.perf_counter()
            call(layer, x)
            devices.synchronize(x.device)
            seconds[i].append(time.perf_counter() - started)
    best = min((min(taken) for taken in seconds.values()), default=0.0)
    return {i: _summary(taken) for i, taken in seconds.items() if min(taken) > too_slow * best}


def interleaved(runs: Mapping[int, Callable[[int], float]]) -> dict[int, Timing]:
    """Call run(round) -> seconds of every run in every round, each round in another order."""
    seconds: dict[int, list[float]] = {i: [] for i in runs}
    order, shuffler = list(runs), random.Random(0)
    started, rounds = time.perf_counter(), -WARM_UPS
    while rounds < ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() - started < SECONDS):
        shuffler.shuffle(order)
        for i in order:
            taken = runs[i](rounds + WARM_UPS)
            if rounds >= 0:
                seconds[i].append(taken)
        rounds += 1
    return {i: _summary(taken) for i, taken in seconds.items()}


def _summary(seconds: list[float]) -> Timing:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(middle, low, high, len(seconds))


def attempt(action: Callable[[], Any]) -> Any:
    """What the action returns, or the first line of what it raised: a candidate that a compiler or
    a kernel chokes on is out of the race, and the others go on."""
    try:
        return action()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"


def _product(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _compiled(device: torch.device) -> Call:
    """_product, compiled apart from every other: dynamo keeps what it compiled by code object.

    A layer's weights are inputs of what is compiled, so its copies share it.
    """
    own = types.FunctionType(_product.__code__.replace(), _product.__globals__, "product")
    options = COMPILE_OPTIONS.get(device.type, {})
    if device.type == "cpu":
        options = build.options_of_inductor()
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def _preparation(
    device: torch.device, compile: bool
) -> Callable[[Call, list[nn.Module], Tensor], Callable[[int], float]]:
    """How a layer is timed: from (call, copies, x), run(round) -> seconds of one product."""
    if device.type == "cpu":
        return _one_a_round
    return _captured if device.type == "cuda" and compile else _all_a_round


def _one_a_round(call: Call, rotation: list[nn.Module], x: Tensor) -> Callable[[int], float]:
    def run(turn: int) -> float:
        layer = rotation[turn % len(rotation)]
        started = time.perf_counter()
        call(layer, x)
        return time.perf_counter() - started

    return run


def _all_a_round(call: Call, rotation: list[nn.Module], x: Tensor) -> Callable[[int], float]:
    """All copies at once: devices work behind. Not compiled, launching a kernel has its cost."""

    def run(turn: int) -> float:
        devices.synchronize(x.device)
        started = time.perf_counter()
        for layer in rotation:
            call(layer, x)
        devices.synchronize(x.device)
        return (time.perf_counter() - started) / len(rotation)

    return run


def _captured(call: Call, rotation: list[nn.Module], x: Tensor) -> Callable[[int], float]:
    """A CUDA graph over all copies: decode is one graph, so launching costs it nothing."""
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

    def run(turn: int) -> float:
        with torch.cuda.device(x.device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # while it runs the next one is launched, so no launch is timed
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(rotation)

    return run


# ----------------------------------------------------------------------------------------- memory


def copies(sizes: Sequence[int], cache: int, budget: int, whole: bool) -> list[int]:
    """How many copies of layers of so many bytes are needed, and the budget allows; at least one.

    `whole`: a layer's turn goes through all its copies, which have to fill the cache by themselves,
    twice over. Otherwise a turn takes one copy, and the other layers' turns come between: before
    it is used again, all rounds but one go by, whatever their order, and the copy itself. There
    are no more copies than turns.
    """
    if not sizes:
        return []
    if whole:
        wanted = [math.ceil(2 * cache / max(1, size)) for size in sizes]
    else:
        missing = max(0, cache - min(sizes))
        rounds = 1 + math.ceil(missing / max(1, sum(sizes)))
        wanted = [min(rounds, TURNS)] * len(sizes)
    total = sum(map(int.__mul__, sizes, wanted))
    share = min(1.0, budget / max(1, total))
    return [max(1, int(number * share)) for number in wanted]


def rotated(sizes: Sequence[int], numbers: Sequence[int], cache: int, whole: bool) -> int:
    """Bytes that are read before any copy is read again, at the least; as many as the cache holds
    where no copy is."""
    if not sizes:
        return 0
    if whole:
        return min(map(int.__mul__, sizes, numbers))
    between = (min(numbers) - 1) * sum(sizes) + min(sizes)
    return max(between, cache) if min(numbers) >= TURNS else between


def module_bytes(module: nn.Module) -> int:
    return sum(map(devices.stored_bytes, module.parameters()))


def last_level_cache(device: torch.device, root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of the device's largest cache, as it says itself; CACHE_IF_UNKNOWN if it does not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = []
    if device.type == "cpu":
        units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
        for path in root.glob("cpu0/cache/index*/size"):
            size = path.read_text().strip()
            if size[:-1].isdigit() and size[-1] in units:
                sizes.append(int(size[:-1]) * units[size[-1]])
    return max(sizes, default=CACHE_IF_UNKNOWN)


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        return min(torch.cuda.mem_get_info(device)[0] // 4, 4 * MOST_BYTES)
    free = devices.free_memory(device)
    return min((MOST_BYTES if free is None else free) // 4, MOST_BYTES)
