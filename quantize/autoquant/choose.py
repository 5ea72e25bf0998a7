"""autoquant: per shape of layer, the fastest scheme measured here that keeps --min_sqnr.

    choices = choose(samples, AutoQuant(), batch_size=1, min_sqnr=35.0, cache=default_cache())
    print(table(choices))
    model = load_model(path, transform=AutoQuantizer(choices, device, dtype))

race.py times, cache.py keeps timings between runs, verdict.py decides and gives the reasons.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench import devices
from quantbench.errors import CheckpointError, KernelError, UsageError
from quantbench.quantize.autoquant import cache as kept
from quantbench.quantize.autoquant import race
from quantbench.quantize.autoquant.cache import Clock, default_cache
from quantbench.quantize.autoquant.race import attempt
from quantbench.quantize.autoquant.verdict import (
    Candidate,
    Choice,
    Measurement,
    decide,
    full_precision,
    table,
)
from quantbench.quantize.registry import SCHEMES, Quantizer, available, with_weight
from quantbench.quantize.scheme import rows_at_once
from quantbench.quantize.spec import FullPrecision, Quantization, Spec, parse

__all__ = ["AutoQuantizer", "Choice", "Sample", "choose", "default_cache", "table"]

SQNR_ROWS = 64  # activations per SQNR; with more of them it does not change
# On the CPU a larger layer is measured by so many weights of it, of rows that are evenly spread: a
# product takes as long as its weights take to read, and millions of them tell the SQNR. An output
# layer of 128256 rows would take longer than all the others.
MOST_WEIGHTS = 1 << 24
TOO_SLOW = 8.0  # times as long as the fastest: not worth the time that 20 rounds take


@dataclass(frozen=True)
class Sample:
    """A layer in full precision, on its device, and real inputs of it, (T, K)."""

    name: str
    layer: nn.Linear
    activations: Tensor


@torch.no_grad()
def choose(
    samples: Sequence[Sample],
    selection: Quantization,
    batch_size: int,
    min_sqnr: float,
    cache: Path | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    compile: bool = False,
    kernel: str = "auto",
) -> list[Choice]:
    """One choice per distinct shape of the samples' layers, in their order.

    Products are timed on (batch_size, 1, K) inputs, compiled or not. `cache` keeps the timings for
    the next run on such a device with such software; SQNR depends on the weights, and is measured
    each time. `report` gets candidates done and in all. With a `kernel` other than "auto" only that
    one's candidates run against full precision.

    Raises KernelError if full precision itself cannot be timed, or no scheme has that kernel.
    """
    shapes: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        shapes.setdefault((sample.layer.out_features, sample.layer.in_features), []).append(sample)
    fields = {
        shape: candidates(selection, alike[0].layer, kernel) for shape, alike in shapes.items()
    }
    if samples and all(_only_in_full(field) for field in fields.values()):
        raise KernelError(f"--kernel {kernel}: none of {selection}'s schemes has such a kernel")
    total, count = sum(map(len, fields.values())), 0

    def done() -> None:
        nonlocal count
        count += 1
        report(count, total)

    choices = []
    hopeless: dict[Candidate, str] = {}  # candidates not tried on another shape, and why
    for shape, alike in shapes.items():
        key = kept.key(alike[0].layer, batch_size, compile)
        measure = _Measuring(alike, batch_size, compile, done)
        field = [
            dataclasses.replace(one, reason=one.reason or hopeless.get(one.candidate))
            for one in fields[shape]
        ]
        measurements, clock, known = measure.field(field, cache, key)
        for one in measurements:
            few = one.timing is not None and one.timing.rounds <= race.HEATS
            if few and not isinstance(one.candidate.spec, FullPrecision):
                hopeless[one.candidate] = f"far too slow on {shape[0]} × {shape[1]}"
        chosen, judged = decide(measurements, min_sqnr)
        names = tuple(sample.name for sample in alike)
        setting = f"batch {batch_size}, {key['dtype']}, {'' if compile else 'not '}compiled"
        if measure.rows < shape[0]:
            setting += f", measured on {measure.rows} of its rows"
        sizes = clock.rotated, clock.cache
        choices.append(
            Choice(shape, names, setting, min_sqnr, chosen, tuple(judged), *sizes, known)
        )
    return choices


def candidates(
    selection: Quantization, layer: nn.Linear, kernel: str = "auto"
) -> list[Measurement]:
    """Every candidate for a layer, to be measured; with a `reason` those that refuse its shape.

    What cannot run on the device at all is listed only where its scheme has nothing else; and the
    reference takes part only there, too: it is never fast.
    """
    weight = layer.weight
    N, K = weight.shape
    in_full = _loaded(FullPrecision(), weight)
    field = [Measurement(full_precision(name)) for name, reason in in_full.items() if not reason]
    for spec in selection.candidates:
        scheme, running, refused, absent = SCHEMES[type(spec)], [], [], []
        whole = scheme.refuses(spec, K)
        for name, why in _loaded(spec, weight).items():
            if kernel not in ("auto", name):
                continue
            refusal = whole or scheme.kernels[name].refuses(spec, weight.device, K, N)
            entry = Measurement(Candidate(spec, name), reason=why or refusal)
            (absent if why else refused if refusal else running).append(entry)
        if kernel == "auto":
            fast = [m for m in running if not _is_slow(m.candidate.kernel, weight.device)]
            running = fast or running[-1:]
        field += running + refused[: 1 if whole else None] or absent
    return field


def _loaded(spec: Spec, weight: Tensor) -> dict[str, str | None]:
    """Why each of the scheme's kernels cannot run here, or None, after loading those that
    registry.available allows."""
    reasons = available(spec, weight.device, weight.dtype)
    for name, reason in reasons.items():
        if reason is None:
            try:
                SCHEMES[type(spec)].kernels[name].prepare()
            except KernelError as error:
                reasons[name] = str(error)
    return reasons


def _only_in_full(field: Sequence[Measurement]) -> bool:
    return all(isinstance(one.candidate.spec, FullPrecision) for one in field)


def _is_slow(kernel: str, device: torch.device) -> bool:
    """Whether the kernel is too slow to be worth timing, as Triton's interpreter is on the CPU."""
    return kernel == "reference" or (kernel == "triton" and device.type == "cpu")


# --------------------------------------------------------------------------------------- measuring


class _Measuring:
    """Measures candidates on layers of one shape: quality on each, speed on the first."""

    def __init__(
        self, alike: Sequence[Sample], batch_size: int, compile: bool, done: Callable[[], None]
    ) -> None:
        self.batch_size, self.compile, self.done = batch_size, compile, done
        self.rows = rows_to_measure(alike[0].layer)
        self.times = alike[0].layer.out_features / self.rows  # as many as in what is measured
        self.alike = [_part(sample, self.rows) for sample in alike]
        self.inputs = [_rows(s.activations, max(SQNR_ROWS, batch_size)) for s in alike]
        self.exact = [
            exact_product(sample.layer, x)
            for sample, x in zip(self.alike, self.inputs, strict=True)
        ]

    def field(
        self, field: Sequence[Measurement], cache: Path | None, key: Mapping[str, Any]
    ) -> tuple[list[Measurement], Clock, bool]:
        """All measured; the clock, and whether it was kept from an earlier run."""
        names = [str(one.candidate) for one in field if one.reason is None]
        clock = kept.read(cache, key, names)
        layers: dict[str, nn.Module] = {}
        outputs: dict[str, Tensor] = {}
        measured = []
        for one in field:
            result = one.reason or attempt(lambda: self.quality(one.candidate))  # noqa: B023
            if isinstance(result, str):
                measured.append(dataclasses.replace(one, reason=result))
            else:
                layer, output, sqnr = result
                size = round(race.module_bytes(layer) * self.times)
                measured.append(dataclasses.replace(one, bytes=size, sqnr=sqnr))
                if clock is None:
                    layers[str(one.candidate)], outputs[str(one.candidate)] = layer, output
            if clock is not None or isinstance(result, str):
                self.done()
        reasons: dict[str, str] = {}
        ran = clock
        if ran is None:
            ran, reasons = self.clocked(layers, outputs)
            if len(ran.timings) == len(names):  # what failed once may have lacked memory
                kept.write(cache, key, ran)
        timed = [_with_timing(m, ran, reasons.get(str(m.candidate))) for m in measured]
        return timed, ran, clock is not None

    def quality(self, candidate: Candidate) -> tuple[nn.Module, Tensor, float]:
        """The first layer as the candidate has it, its output, and the least SQNR of all."""
        layer = _as(candidate, self.alike[0])
        output = layer(self.inputs[0])
        sqnr = decibels(self.exact[0], output)
        for sample, x, exact in zip(self.alike[1:], self.inputs[1:], self.exact[1:], strict=True):
            other = decibels(exact, _as(candidate, sample)(x))
            sqnr = sqnr if sqnr <= other or math.isnan(sqnr) else other
        return layer, output, sqnr

    def clocked(
        self, layers: Mapping[str, nn.Module], outputs: Mapping[str, Tensor]
    ) -> tuple[Clock, dict[str, str]]:
        """The layers' timings, and for those that could not be timed the reasons."""
        x = self.inputs[0][: self.batch_size]
        with devices.returning_memory():
            limit = TOO_SLOW if x.device.type == "cpu" else math.inf
            result = race.race(list(layers.values()), x, self.compile, self.done, too_slow=limit)
        timings, reasons = {}, {}
        for name, taken, output in zip(layers, result.timings, result.outputs, strict=True):
            if isinstance(taken, str) or output is None:
                reasons[name] = str(taken)
            else:
                agreement = decibels(outputs[name][: self.batch_size], output)
                timings[name] = taken.times(self.times), agreement
        return Clock(timings, result.rotated, result.cache), reasons


def rows_to_measure(layer: nn.Linear) -> int:
    """How many rows of a layer's weight are measured: all of them, but for large layers on the
    CPU."""
    if layer.weight.device.type != "cpu":
        return layer.out_features
    return min(layer.out_features, max(64, MOST_WEIGHTS // layer.in_features // 64 * 64))


def _part(sample: Sample, rows: int) -> Sample:
    """The sample with so many rows of its layer, evenly spread."""
    layer = sample.layer
    if rows == layer.out_features:
        return sample
    chosen = torch.arange(rows, device=layer.weight.device) * layer.out_features // rows
    part = nn.Linear(layer.in_features, rows, False, "meta")
    part.weight = nn.Parameter(layer.weight.data[chosen], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.data[chosen], requires_grad=False)
    return dataclasses.replace(sample, layer=part)


def decibels(exact: Tensor, y: Tensor) -> float:
    """10 log10 of Σ exact² / Σ (y - exact)²: infinite if they are equal, NaN if y has one."""
    exact, y = exact.to(_widest(exact)), y.to(_widest(exact))
    signal, noise = exact.square().sum().item(), (y - exact).square().sum().item()
    if math.isnan(noise) or noise == 0:
        return math.nan if noise else math.inf
    return 10 * math.log10(signal / noise) if 0 < signal and noise < math.inf else -math.inf


def exact_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) of the weights as they are, without rounding, some rows of them at a time."""
    wide, bias = _widest(x), layer.bias
    blocks = layer.weight.data.split(rows_at_once(layer.weight))
    y = torch.cat([F.linear(x.to(wide), w.to(wide)) for w in blocks], -1)
    return y if bias is None else y + bias.to(wide)


def _widest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _rows(activations: Tensor, count: int) -> Tensor:
    """(count, 1, K): so many of the activations, evenly spread, from the start again if too few."""
    total = len(activations)
    places = torch.arange(count, device=activations.device)
    chosen = places * total // count if count <= total else places % total
    return activations[chosen][:, None]


def _as(candidate: Candidate, sample: Sample) -> nn.Module:
    """The layer as the candidate has it, without the hooks that may have recorded its inputs."""
    weight = sample.layer.weight.data
    layer = with_weight(sample.layer, weight)
    quantizer = Quantizer(candidate.spec, weight.device, weight.dtype, candidate.kernel)
    return quantizer(sample.name, layer)


def _with_timing(one: Measurement, clock: Clock, reason: str | None) -> Measurement:
    if one.reason or reason:
        return dataclasses.replace(one, reason=one.reason or reason)
    timed, agreement = clock.timings[str(one.candidate)]
    return dataclasses.replace(one, timing=timed, agreement=agreement)


# ----------------------------------------------------------------------------------------- applying


class AutoQuantizer:
    """(name, module) -> module, as registry.Quantizer: every layer as was chosen for its shape."""

    def __init__(
        self,
        choices: Sequence[Choice],
        device: torch.device,
        dtype: torch.dtype,
        layers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`layers`: what was chosen when a model was saved, (scheme, kernel) by name, instead of
        by shape. A kernel that cannot run here is replaced by the best that can, and `ran` tells.

        Raises CheckpointError for a scheme that does not exist, KernelError if none of its kernels
        runs.
        """
        self.device, self.dtype = device, dtype
        self.ran: Counter[str] = Counter()  # how many layers each kernel got
        self.layers: dict[str, tuple[str, str]] = {}  # (scheme, kernel) of each layer built
        self._made: dict[Candidate, Quantizer] = {}
        self._by_shape = {choice.shape: self._quantizer(choice.chosen) for choice in choices}
        self._by_name = {
            name: self._quantizer(self._saved(name, *how)) for name, how in (layers or {}).items()
        }

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        return self.built(name, self.quantized(name, module))

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with the numbers of its scheme; KernelError, naming it, if none was chosen."""
        return self._of(name, module).quantized(name, module) if self.takes(module) else module

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer in the form its kernel takes."""
        if not self.takes(layer):
            return layer
        quantizer = self._of(name, layer)
        built = quantizer.built(name, layer)
        kernel = quantizer.kernel_for(name, layer)  # the one that was built: what failed is gone
        self.ran[kernel] += 1
        self.layers[name] = str(quantizer.spec), kernel
        return built

    def _saved(self, name: str, given: str, kernel: str) -> Candidate:
        try:
            spec = parse(given).scheme
        except UsageError as error:
            raise CheckpointError(f"{name} was saved as {given!r}: {error}") from None
        if spec is None:
            raise CheckpointError(f"{name} was saved as {given!r}, which is no scheme")
        runs = available(spec, self.device, self.dtype).get(kernel, "unknown") is None
        return Candidate(spec, kernel if runs else "auto")

    def _quantizer(self, candidate: Candidate) -> Quantizer:
        if candidate not in self._made:
            made = Quantizer(candidate.spec, self.device, self.dtype, candidate.kernel)
            self._made[candidate] = made
        return self._made[candidate]

    def _of(self, name: str, layer: nn.Module) -> Quantizer:
        shape = layer.out_features, layer.in_features
        quantizer = self._by_name.get(name) or self._by_shape.get(shape)
        if quantizer is None:
            size = f"{shape[0]} by {shape[1]}"
            raise KernelError(f"{name} is {size}, and autoquant has chosen nothing for that")
        return quantizer
