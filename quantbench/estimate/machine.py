"""Measure this machine, so that runs can be predicted: what `quantbench calibrate` does.

    calibration = measure(settings, make_generator, say)

The models of MODELS exist only here: their widths are those of no published model, so that nothing
that is predicted later was calibrated on. Measured are

- what parts take alone (estimate/alone.py): each shape's product by each scheme's kernel, over the
  rows of x; attention over each kind of cache, of a step and of a prompt; a prompt's layer without
  products and attention; memory, over the size of a block, and products and attention over stacks
  of as many bytes; the draw of a token; the call of an op;
- whole steps and prompts: what they take beyond these parts is the cost of a layer and of a step.

Whole models, stacks and attention are measured in ROUNDS, minutes apart where they can be, and the
median counts. A machine that is slow for half a minute is slow for one round of each; and what a
last-level cache holds depends on the host's other guests, which no reading of memory shows.

Each measurement takes some hundredths of a second, and before and after each stands a reading of
memory and of arithmetic (estimate/probe.py), so that a machine that drifts can be corrected for it.
"""

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.estimate import alone
from quantbench.estimate.calibration import (
    AttentionPoint,
    Calibration,
    ProductPoint,
    Speed,
    StackPoint,
    WholePoint,
)
from quantbench.estimate.calibration_models import ALONE, DEEP, MODELS
from quantbench.estimate.probe import LONG, Probe, Settings
from quantbench.log.origin import versions
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse_scheme
from quantbench.run.generation import Generates

ROUNDS = 3  # in each, steps of whole models are measured before and after their prompts
STEP_BATCHES = (1, 4, 16)
STEP_DEPTHS = (0, 8192)  # of whole steps
STEPS = {1: 4, 4: 4, 16: 2}  # that are timed at once, by batch
LONGEST_PASS = 512  # positions of all sequences of a prompt that is one pass
AT_LEAST_STEPS, AT_LEAST_PROMPTS = 0.2, 0.3  # seconds of a sample, of which the median counts
# Before a sample of steps: a reading of memory has displaced the model from the caches, and it
# takes so many steps, or seconds, until they hold as much of it as they will (docs/LOG.md).
SETTLING_STEPS, SETTLING_SECONDS = 16, 0.25

Say = Callable[[str], None]
MakeGenerator = Callable[[Transformer, int, int, str], Generates]  # model, batch, cache, kind


def measure(settings: Settings, make_generator: MakeGenerator, say: Say) -> Calibration:
    """Calibrate the device. make_generator: (model, batch_size, cache_size, kv_cache) ->
    generate.Generator. base_bytes is the caller's to add. Raises UsageError or KernelError for a
    scheme that has no kernel there."""
    started = time.perf_counter()
    for name in settings.schemes:
        Quantizer(parse_scheme(name), settings.device, settings.precision)
    probe = Probe(settings.device, settings.precision)
    say("Memory, the rest of a layer, and draws …")
    measured = of_every_scheme(settings, probe)
    for number, scheme in enumerate(settings.schemes, 1):
        say(f"Scheme {number} of {len(settings.schemes)}: {scheme} …")
        part = of_scheme(scheme, settings, make_generator, probe)
        measured.products.extend(part.products)
        measured.attention.extend(part.attention)
        measured.weight_stacks.extend(part.weight_stacks)
        measured.cache_stacks.extend(part.cache_stacks)
        measured.wholes.extend(part.wholes)
    return replace(measured, seconds=time.perf_counter() - started)


@torch.no_grad()
def of_every_scheme(settings: Settings, probe: Probe) -> Calibration:
    """What does not depend on the scheme and is measured once: a calibration without products,
    attention and whole models."""
    device = settings.device
    return Calibration(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        device={"type": device.type, **devices.describe(device)},
        precision=str(settings.precision).removeprefix("torch."),
        versions=versions(),
        bandwidth=list(alone.bandwidth(probe)),
        products=[],
        attention=[],
        rest=list(alone.rest(settings, probe)),
        draws=list(alone.draws(settings)),
        wholes=[],
        call_seconds=alone.call_seconds(device),
        memory_bytes=devices.free_memory(device),
    )


@dataclass(frozen=True)
class Part:
    """What one scheme adds to a calibration; and attention, which is the same in each of them, but
    is measured between them for its rounds to be minutes apart."""

    products: list[ProductPoint] = field(default_factory=list)
    attention: list[AttentionPoint] = field(default_factory=list)
    weight_stacks: list[StackPoint] = field(default_factory=list)
    cache_stacks: list[StackPoint] = field(default_factory=list)
    wholes: list[WholePoint] = field(default_factory=list)


@torch.no_grad()
def of_scheme(
    scheme: str,
    settings: Settings,
    make_generator: MakeGenerator,
    probe: Probe,
    after_round: Callable[[], object] = lambda: None,
) -> Part:
    """The scheme's products, and the steps and prompts of the calibration models in it.

    after_round: called after each round of these.
    """
    # The scheme before left models and caches in cycles, and run/environment.py lets those lie: six
    # schemes in one process came to more than 24 GB.
    gc.collect()
    part = Part()
    for _ in range(rounds_of_attention(settings.schemes.index(scheme), len(settings.schemes))):
        part.attention.extend(alone.attention_of_steps(settings, probe))
        part.attention.extend(alone.attention_of_prompts(settings, probe))
        part.cache_stacks.extend(alone.cache_stacks(settings, probe))
    models = {}
    table = embedding(MODELS.values(), settings)
    for name, config in MODELS.items():
        models[name], kernels = random_model(config, scheme, settings, table)
        if name in ALONE:
            part.products.extend(alone.products(models[name], scheme, kernels, settings, probe))
    rounds = Rounds(models, scheme, make_generator, probe)
    for number in range(ROUNDS):
        caches = settings.caches if number == 0 else settings.caches[:1]
        for name in ALONE:
            part.weight_stacks.extend(alone.weight_stacks(models[name], scheme, settings, probe))
        part.wholes.extend(_round(scheme, settings, caches, rounds))
        after_round()
    return part


def rounds_of_attention(number: int, schemes: int) -> int:
    """How many of the ROUNDS are measured before the scheme of this number, from 0."""
    return math.ceil((number + 1) * ROUNDS / schemes) - math.ceil(number * ROUNDS / schemes)


def embedding(configs: Iterable[ModelConfig], settings: Settings) -> Tensor:
    """Numbers for the embedding of any of these models."""
    most = max(config.vocab_size * config.dim for config in configs)
    return torch.full((most,), 0.02, dtype=settings.precision, device=settings.device)


def random_model(
    config: ModelConfig, scheme: str, settings: Settings, table: Tensor | None = None
) -> tuple[Transformer, dict[str, str]]:
    """A model of random weights, quantized; and the kernel of each of its layers.

    table: numbers that serve as the embedding of any model that needs no more of them, for a pass
    reads next to none.
    """
    with torch.device("meta"):
        model = build(config).to(settings.precision)
    noise = torch.randn(1 << 18, device=settings.device).mul_(0.02).to(settings.precision)
    quantizer = Quantizer(parse_scheme(scheme), settings.device, settings.precision)
    kernels = {}
    for name in [name for name, module in model.named_modules() if module._parameters]:
        module = model.get_submodule(name)
        for kind, parameter in list(module.named_parameters(recurse=False)):
            count = parameter.numel()
            if isinstance(module, nn.Embedding) and table is not None and len(table) >= count:
                weight = table[:count]
            else:
                weight = noise.repeat(-(-count // len(noise)))[:count]
            weight = weight.view(parameter.shape)
            setattr(module, kind, nn.Parameter(weight, requires_grad=False))
        before = dict(quantizer.ran)
        model.set_submodule(name, quantizer(name, module))
        ran = [kernel for kernel, n in quantizer.ran.items() if n > before.get(kernel, 0)]
        kernels[name] = ran[0] if ran else "torch"
    return model.eval().requires_grad_(False), kernels


# ---------------------------------------------------------------------------------- whole models


def passes() -> list[tuple[int, int]]:
    """(batch, positions) of the prompts that are measured, each of one pass."""
    many = max(STEP_BATCHES)
    return [(1, 32), (1, 128), (1, LONGEST_PASS), (many, LONGEST_PASS // many)]


def _round(
    scheme: str, settings: Settings, caches: Sequence[str], rounds: "Rounds"
) -> Iterator[WholePoint]:
    """Each step and prompt, that of one model next to those of the others."""
    if scheme != settings.schemes[0]:  # what another kind of cache costs does not depend on it
        caches = caches[:1]
    yield from _steps(caches, rounds)
    for B, S in passes():
        for name in rounds.models:
            yield rounds.prompt(name, B, S)
    yield from _steps(caches[:1], rounds)


def _steps(caches: Sequence[str], rounds: "Rounds") -> Iterator[WholePoint]:
    for B, depth, kind in itertools.product(STEP_BATCHES, STEP_DEPTHS, caches):
        plain = depth == 0 and kind == caches[0]
        for name in rounds.models:
            if plain or name in DEEP:
                yield rounds.step(name, B, depth, kind)


class Rounds:
    """The steps and prompts of some models in one scheme. What they need is kept from round to
    round, and warmed up when it is made."""

    def __init__(
        self,
        models: Mapping[str, Transformer],
        scheme: str,
        make_generator: MakeGenerator,
        probe: Probe,
    ) -> None:
        self.models, self.scheme, self.probe = models, scheme, probe
        self.make_generator = make_generator
        self.generators: dict[object, Generates] = {}
        self.warm: set[object] = set()

    def step(self, name: str, batch: int, depth: int, kind: str = "dense") -> WholePoint:
        """Decoding steps after `depth` positions; the point's depth is that of the middle one.

        Deep caches are shared: fewer sequences are the first ones of the largest batch.
        """
        steps = STEPS[batch]
        rows = max(STEP_BATCHES) if depth else batch
        generator = self._generator(name, rows, depth + max(STEPS.values()) + 2, kind)
        token = torch.zeros(batch, 1, dtype=torch.long, device=self.probe.device)

        def seconds() -> float:
            return generator.generate(token, steps + 1, depth).decode_seconds / steps

        def settle() -> None:
            started = time.perf_counter()
            for _ in range(0, SETTLING_STEPS, steps):
                seconds()
                if time.perf_counter() - started > SETTLING_SECONDS:
                    break

        work = (name, batch, depth, kind)
        speed, each = self._timed(work, seconds, AT_LEAST_STEPS / steps, settle)
        at = depth + 1 + steps // 2
        decoder = generator.decoder.name
        return WholePoint(self.scheme, name, kind, decoder, batch, 1, at, each, speed)

    def prompt(self, name: str, batch: int, tokens: int) -> WholePoint:
        """A prompt, up to its new token."""
        generator = self._generator(name, batch, tokens + 1, "dense")
        vocabulary = self.models[name].config.vocab_size
        prompt = torch.randint(vocabulary, (batch, tokens), device=self.probe.device)
        speed, seconds = self._timed(
            (name, batch, tokens),
            lambda: generator.generate(prompt, 1).prefill_seconds,
            AT_LEAST_PROMPTS,
        )
        decoder = generator.decoder.name
        return WholePoint(self.scheme, name, "dense", decoder, batch, tokens, 0, seconds, speed)

    def _timed(
        self,
        work: object,
        seconds: Callable[[], float],
        least: float,
        settle: Callable[[], None] = lambda: None,
    ) -> tuple[Speed, float]:
        """The median of seconds(), as often as takes `least` of them, and the speed around."""

        def some() -> float:
            settle()
            taken = [seconds()]
            while sum(taken) < least:
                taken.append(seconds())
            return statistics.median(taken)

        if work not in self.warm:
            self.warm.add(work)
            speed, first = self.probe.around(seconds)
            if first > LONG:  # it needs no first time to be warm
                return speed, first
        return self.probe.around(some)

    def _generator(self, name: str, batch: int, size: int, kind: str) -> Generates:
        key = (name, batch, size, kind)
        if key not in self.generators:
            generator = self.make_generator(self.models[name], batch, size, kind)
            for cache in generator.caches:
                alone.write(cache)
            self.generators[key] = generator
        return self.generators[key]
