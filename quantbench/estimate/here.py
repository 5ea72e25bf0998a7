"""Seconds of a run on this machine, measured on the first layers of its model.

    machine = Here(device, generator_of)
    machine.phases(request)         # loads a few layers with random weights, and times them

Shapes, kernels, batch and depth are those of the run, and the machine is in the state of this
moment. A pass through L layers takes a + b · L seconds; a is what embedding, output and sampling
take. Two models, of few and of many layers, take turns of about 0.1 s: few, many, many, few, so
that a state of the machine that lasts a second slows both.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantbench import devices
from quantbench.errors import UsageError
from quantbench.estimate.predict import Machine, Phase, Request
from quantbench.log.config import RunConfig
from quantbench.models import build
from quantbench.models.formats.dummy import Dummy
from quantbench.models.llama import Transformer
from quantbench.progress import progress, say
from quantbench.quantize.spec import parse_scheme
from quantbench.run import energy
from quantbench.run.loading import Loading
from quantbench.run.sizes import check_memory, size_of

if TYPE_CHECKING:
    from quantbench.generate import Generator

SECONDS = 6.0  # of turns
TURN_SECONDS, MAX_STEPS = 0.1, 64  # of a turn of decoding steps
MIN_CYCLES = 3  # of each kind of turn, however long a prompt takes
RUN_DEVIATION = 0.03  # of log(estimated ÷ measured), assumed: the run starts a moment later
MEDIAN_ERROR = 1.2533 * 1.4826  # standard error of a median · √n ÷ median absolute deviation

GeneratorOf = Callable[[Transformer, Request], "Generator"]


def depths(one: float, two: float, total: int, cache: int) -> tuple[int, ...]:
    """How many layers the two models have: 2 and 4, or as many as it takes for the layers to
    outweigh the rest, and for both models to exceed the last-level cache twice, as the whole does.
    (total,) if that is more than the model has, which is then measured as it is.

    one, two: bytes that a step of a model of so many layers reads. cache: bytes.
    """
    few, layer, rest = 2, two - one, 2 * one - two
    while 2 * few < total and (few * layer + rest < 2 * cache or 2 * few * layer < rest):
        few += 2
    return (few, 2 * few) if 2 * few < total else (total,)


def cut(model: Transformer, count: int) -> Transformer:
    """The model with only its first `count` layers, which share their weights with it."""
    with torch.device("meta"):
        few = build(model.config.with_layers(count))
    for name, module in model.named_children():
        setattr(few, name, module)
    few.layers = nn.ModuleList(list(model.layers)[:count])
    return few


def phase_along(layers: tuple[int, ...], cycles: Sequence[tuple[float, ...]], total: int) -> Phase:
    """Seconds of a pass through all `total` layers, from turns that were taken in pairs: the median
    over cycles of what each extrapolates to, at least what the many layers take, below which noise
    could bring it.

    layers: of the models, few and many; or of one alone, all of whose seconds are its layers'.
    cycles: seconds of a pass through each.
    """
    few, many = layers if len(layers) == 2 else (0, *layers)
    each = [(cycle[-1] - (cycle[0] if few else 0.0)) / (many - few) for cycle in cycles]
    seconds = [cycle[-1] + (total - many) * b for cycle, b in zip(cycles, each, strict=True)]
    value = max(statistics.median(seconds), statistics.median(c[-1] for c in cycles))
    scatter = statistics.median(abs(one - value) for one in seconds)
    error = MEDIAN_ERROR * scatter / math.sqrt(len(seconds)) / value
    in_layers = min(max(0.0, total * statistics.median(each)), value)
    names = " and ".join(map(str, layers))
    return Phase(
        {"layers": in_layers, "embedding and output": value - in_layers},
        f"{names} of {total} layers, measured",
        f"measured now on {names} of {total} layers, {len(seconds)} turns each",
        math.hypot(error, RUN_DEVIATION),
    )


def timed(
    chosen: tuple[int, ...], request: Request, model: Transformer, generator_of: GeneratorOf,
    seconds: float,
) -> tuple[Phase, Phase]:  # fmt: skip
    """A prompt and a step of the request's model, from turns of the first `chosen` layers of
    `model`, fewest first.

    The kind of turn that took less time so far is next. A step's first turn refills the caches of
    the processor, so that it is not counted.
    """
    assert not isinstance(request.config, str)
    generators = [generator_of(cut(model, count), request) for count in chosen]
    weight = generators[0].model.tok_embeddings.weight
    shape = request.batch, request.prompt
    ids = torch.randint(weight.shape[0], shape, device=weight.device)

    def prompt(generator: "Generator") -> float:
        return generator.generate(ids, 1, request.depth).prefill_seconds

    def steps(generator: "Generator", count: int) -> float:
        middle = request.depth + request.prompt + (request.new_tokens - count) // 2
        start = max(0, min(middle, request.positions - count - 1))
        return generator.generate(ids[:, -1:], count + 1, start).decode_seconds / count

    room = max(1, min(MAX_STEPS, request.positions - 2))
    for generator in generators:  # warms up; compiles if --compile was given
        prompt(generator)
        steps(generator, min(4, room))
    step = steps(generators[0], min(4, room))
    count = max(1, min(room, round(TURN_SECONDS / step)))
    kinds: list[Callable[[Generator], float]] = [prompt, lambda generator: steps(generator, count)]
    cycles: list[list[tuple[float, ...]]] = [[], []]
    spent = [0.0, 0.0]
    while sum(spent) < seconds or min(map(len, cycles)) < MIN_CYCLES:
        kind = min((0, 1), key=lambda kind: (len(cycles[kind]) >= MIN_CYCLES, spent[kind]))
        started = time.perf_counter()
        order = 1 if len(cycles[kind]) % 2 == 0 else -1
        taken = [kinds[kind](generator) for generator in generators[::order]][::order]
        spent[kind] += time.perf_counter() - started
        cycles[kind].append(tuple(taken))
    total = request.config.num_layers
    of_prompt, of_step = (phase_along(chosen, each, total) for each in cycles)
    return of_prompt, of_step


@dataclass(frozen=True)
class Here(Machine):
    """This machine. generator_of(model, request) makes the Generator of a run."""

    generator_of: GeneratorOf | None = None
    measured: dict[Request, tuple[Phase, Phase]] = field(default_factory=dict)

    def phases(self, request: Request) -> tuple[Phase, Phase]:
        """Loads the first layers with random weights, in about ten seconds, and times them. Raises
        MemoryShortage where they do not fit, KernelError for a scheme that does not take them."""
        if request not in self.measured:
            self.measured[request] = self._measure(request)
        return self.measured[request]

    def _measure(self, request: Request) -> tuple[Phase, Phase]:
        config = request.config
        if isinstance(config, str) or request.tp > 1:
            what = "a model of transformers" if isinstance(config, str) else f"--tp {request.tp}"
            raise UsageError(
                f"{what} is not estimated on this machine, where one process runs a model of ours: "
                "give the name of a card as --device"
            )
        spec, precision = parse_scheme(request.scheme), getattr(torch, request.precision)
        one, two = (
            size_of(config.with_layers(n), spec, self.device, precision).model_bytes
            for n in (1, min(2, config.num_layers))
        )
        cache = devices.last_level_cache(self.device) or 0
        chosen = depths(one, two, config.num_layers, cache)
        few = config.with_layers(chosen[-1])
        run = RunConfig(
            quantization=request.scheme, precision=request.precision, device=str(self.device),
            batch_size=request.batch, kv_cache=request.kv_cache,
        )  # fmt: skip
        free = devices.free_memory(self.device)
        check_memory(run, few, spec, self.device, request.positions, free)
        counts = " and ".join(map(str, chosen))
        with progress(f"Timing {counts} of {config.num_layers} layers as {spec}") as report:
            loading = Loading(run, spec, self.device, Dummy.of(few))
            assert self.generator_of is not None
            model = loading.load(report, say)
            return timed(chosen, request, model, self.generator_of, SECONDS)


def here(generator_of: GeneratorOf | None = None, device: torch.device | str = "auto") -> Here:
    """This machine as it is now: its name, free memory and power limit."""
    device = devices.resolve(str(device))
    name = str(devices.describe(device)["name"])
    power = energy.power_limit() if device.type == "cpu" else None
    return Here(name, "measured now", device, power, devices.free_memory(device),
                generator_of=generator_of)  # fmt: skip
