"""autoquant: per shape of layer, the fastest scheme measured here that keeps --min_sqnr.

    choices = choose(samples, AutoQuant(), batch_size=1, min_sqnr=35.0)
    print(table(choices))
    model = load_model(path, transform=MixedQuantizer(by_shape(choices), device, dtype))

A candidate is a scheme and a kernel. To be chosen it has to be faster than full precision by more
than noise, and its output on real activations has to keep a signal-to-quantization-noise ratio
(SQNR) of min_sqnr decibels: 35 dB is noise of 1.8 % of the signal's size.
"""

import copy
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.errors import KernelError
from quantbench.quantize import race
from quantbench.quantize.grammar import Quantization
from quantbench.quantize.observe import decibels
from quantbench.quantize.race import Timing, attempt
from quantbench.quantize.registry import Quantizer, available, with_weight
from quantbench.quantize.spec import FullPrecision, Spec
from quantbench.text import aligned

SQNR_ROWS = 64  # activations per SQNR; more do not change it
# On the CPU at most this many weights of a layer are measured, in evenly spread rows: time is
# proportional to bytes, and an output layer of 128256 rows would take longer than all other layers.
MAX_WEIGHTS = 1 << 24
TOO_SLOW = 8.0  # times the fastest candidate's time: not worth 20 rounds
GAIN = 0.97  # of full precision's time, at most: the rest may be noise
# A kernel's output in decode's shape against its own for many rows. Both round differently, which
# keeps 40 dB and more; a broken kernel keeps none.
AGREEMENT = 30.0  # dB
HEADINGS = ("scheme", "kernel", "time (quartiles)", "weights", "reads", "SQNR", "verdict")


class LayerSample(NamedTuple):
    """A layer in full precision, on its device, and real inputs of it, (T, K)."""

    name: str
    layer: nn.Linear
    activations: Tensor


@dataclass
class Candidate:
    """A scheme and a kernel on one shape of layer; `reason`: why they were not measured."""

    spec: Spec
    kernel: str
    reason: str | None = None
    timing: Timing | None = None
    bytes: int = 0  # of the layer's weights
    sqnr: float = math.nan  # dB, the least of all layers of the shape
    verdict: str = ""

    def __str__(self) -> str:
        return f"{self.spec} ({self.kernel})"

    @property
    def seconds(self) -> float:
        return self.timing.seconds if self.timing else math.inf

    @property
    def in_full(self) -> bool:
        return isinstance(self.spec, FullPrecision)


class ShapeChoice(NamedTuple):
    shape: tuple[int, int]  # out_features, in_features
    layers: list[str]
    setting: str  # batch, dtype, compiled or not
    chosen: Candidate
    candidates: list[Candidate]  # fastest first


@torch.no_grad()
def choose(
    samples: Sequence[LayerSample],
    selection: Quantization,
    batch_size: int,
    min_sqnr: float,
    report: Callable[[int, int], None] = lambda done, total: None,
    compile: bool = False,
    kernel: str = "auto",
) -> list[ShapeChoice]:
    """One choice per distinct shape of the samples' layers, in their order.

    Products are timed on (batch_size, 1, K) inputs, compiled or not. `report` gets shapes done and
    in all. With a `kernel` other than "auto" only that kernel's candidates run against full
    precision.

    Raises KernelError if full precision itself cannot be timed, or no scheme has that kernel.
    """
    shapes: dict[tuple[int, int], list[LayerSample]] = {}
    for sample in samples:
        shapes.setdefault((sample.layer.out_features, sample.layer.in_features), []).append(sample)
    fields = [candidates(selection, alike[0].layer, kernel) for alike in shapes.values()]
    if samples and all(candidate.in_full for field in fields for candidate in field):
        raise KernelError(f"--kernel {kernel}: none of {selection}'s schemes has such a kernel")
    choices: list[ShapeChoice] = []
    for (shape, alike), field in zip(shapes.items(), fields, strict=True):
        parts = [sample._replace(layer=_part(sample.layer)) for sample in alike]
        rows, dtype = parts[0].layer.out_features, str(parts[0].layer.weight.dtype)[6:]
        _measure(field, parts, batch_size, compile)
        chosen, judged = decide(field, min_sqnr)
        setting = f"batch {batch_size}, {dtype}, {'' if compile else 'not '}compiled"
        setting += f", {rows} of its rows" * (rows < shape[0])
        choices.append(
            ShapeChoice(shape, [sample.name for sample in alike], setting, chosen, judged)
        )
        report(len(choices), len(shapes))
    return choices


def candidates(selection: Quantization, layer: nn.Linear, kernel: str = "auto") -> list[Candidate]:
    """Every candidate for a layer. A kernel that cannot run on this device, or only slowly, is
    listed with its `reason` where its scheme has no usable one."""
    device, dtype, field = layer.weight.device, layer.weight.dtype, []
    slow = ("reference", "triton") if device.type == "cpu" else ("reference",)
    for spec in (FullPrecision(), *selection.candidates):
        alike = [
            Candidate(spec, name, why or ("slow" if name in slow and kernel == "auto" else None))
            for name, why in available(spec, device, dtype).items()
            if kernel in ("auto", name) or isinstance(spec, FullPrecision)
        ]
        field += [candidate for candidate in alike if candidate.reason is None] or alike
    return field


def _measure(
    field: Sequence[Candidate], samples: Sequence[LayerSample], batch_size: int, compile: bool
) -> None:
    """Fill in what the candidates do on layers of one shape: SQNR on each layer, speed on the
    first."""
    plain = [sample.layer for sample in samples]
    inputs = [_rows(sample.activations, max(SQNR_ROWS, batch_size)) for sample in samples]
    # Without 16-bit rounding: float32's is 120 dB away.
    exact = [
        copy.deepcopy(candidate).float()(x.float())
        for candidate, x in zip(plain, inputs, strict=True)
    ]
    raced: list[tuple[Candidate, nn.Module, Tensor]] = []

    def quality(candidate: Candidate) -> None:
        weight = plain[0].weight
        quantizer = Quantizer(candidate.spec, weight.device, weight.dtype, candidate.kernel)
        built = [quantizer("layer", with_weight(layer, layer.weight.data)) for layer in plain]
        outputs = [layer(x) for layer, x in zip(built, inputs, strict=True)]
        ratios = [decibels(*pair) for pair in zip(exact, outputs, strict=True)]
        candidate.sqnr = torch.tensor(ratios).min().item()  # NaN if one of them is
        candidate.bytes = race.module_bytes(built[0])
        raced.append((candidate, built[0], outputs[0][:batch_size]))

    for candidate in field:
        candidate.reason = candidate.reason or attempt(lambda: quality(candidate))  # noqa: B023
    x, layers = inputs[0][:batch_size], [layer for _, layer, _ in raced]
    limit = TOO_SLOW if x.device.type == "cpu" else math.inf
    with devices.returning_memory():
        times = race.race(layers, x, compile, too_slow=limit)
    for (candidate, _, batched), timing, y in zip(raced, times.timings, times.outputs, strict=True):
        if isinstance(timing, str) or y is None:
            candidate.reason = str(timing)
        elif (agreement := decibels(batched, y)) >= AGREEMENT:
            candidate.timing = timing
        else:
            candidate.reason = (
                f"wrong: decode's output is {agreement:.1f} dB from its batched output"
            )


def _part(layer: nn.Linear) -> nn.Linear:
    """The layer with at most MAX_WEIGHTS of its weights, without its hooks."""
    weight = layer.weight.data
    N, K = weight.shape
    rows = min(N, max(64, MAX_WEIGHTS // K // 64 * 64)) if weight.device.type == "cpu" else N
    chosen = torch.arange(rows, device=weight.device) * N // rows
    part = with_weight(layer, weight[chosen] if rows < N else weight)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.data[chosen], requires_grad=False)
    return part


def _rows(activations: Tensor, count: int) -> Tensor:
    """(count, 1, K): activations, evenly spread, or repeated if there are fewer."""
    total = len(activations)
    places = torch.arange(count, device=activations.device)
    return activations[places * total // count if count <= total else places % total][:, None]


def decide(field: Sequence[Candidate], min_sqnr: float) -> tuple[Candidate, list[Candidate]]:
    """The fastest allowed candidate, and all of them, fastest first, each with its verdict.

    Full precision, on the fastest of its kernels, wins if no candidate is allowed. Raises
    KernelError if it was not timed.
    """
    ordered = sorted(field, key=lambda candidate: candidate.seconds)
    full = next(candidate for candidate in ordered if candidate.in_full)
    if full.timing is None:
        raise KernelError(f"autoquant cannot time full precision: {full.reason}")
    limit = GAIN * full.seconds
    # NaN decibels compare as false, so they never pass.
    good = [
        candidate
        for candidate in ordered
        if candidate.timing and (candidate.in_full or candidate.sqnr >= min_sqnr)
    ]
    best = next((candidate for candidate in good if candidate.seconds <= limit), full)
    for candidate in ordered:
        if candidate.timing is None:
            candidate.verdict = candidate.reason or "not timed"
        elif candidate is best:
            candidate.verdict = (
                "chosen" if best is not full else "chosen: nothing allowed is faster"
            )
        elif candidate not in good:
            candidate.verdict = f"{candidate.sqnr:.1f} dB < {min_sqnr:g} dB"
        else:
            candidate.verdict = f"{candidate.seconds / best.seconds:.2f} × the chosen's time"
    return best, ordered


def table(choices: Sequence[ShapeChoice]) -> str:
    """The measurements and choices of every shape, fastest first."""
    parts = []
    for (N, K), layers, setting, best, field in choices:
        others = f" and {len(layers) - 1} more" * (len(layers) > 1)
        full = next(candidate for candidate in field if candidate.in_full)
        times = f": {full.seconds / best.seconds:.2f} × as fast as full precision"
        head = f"{N} × {K} ({layers[0]}{others}), {setting} → {best}" + times * (best is not full)
        rows = aligned([HEADINGS, *map(_row, field)], {0, 1, 6})
        parts.append(head + "\n" + textwrap.indent(rows, "  "))
    return "\n\n".join(parts)


def _row(candidate: Candidate) -> tuple[str, ...]:
    cells = ["-"] * 3
    if candidate.timing:
        time, low, high = (
            1e6 * t for t in (candidate.seconds, candidate.timing.low, candidate.timing.high)
        )
        cells[0] = f"{time:.1f} µs ({low:.1f} to {high:.1f})"
        cells[1:] = (
            f"{candidate.bytes / 1e6:.2f} MB",
            f"{candidate.bytes / candidate.seconds / 1e9:.1f} GB/s",
        )
    sqnr = {"nan": "-", "inf": "exact"}.get(str(candidate.sqnr), f"{candidate.sqnr:.1f} dB")
    return str(candidate.spec), candidate.kernel, *cells, sqnr, candidate.verdict


def by_shape(choices: Sequence[ShapeChoice]) -> dict[Any, tuple[Spec, str]]:
    """What MixedQuantizer takes: a scheme and a kernel by a layer's shape."""
    return {choice.shape: (choice.chosen.spec, choice.chosen.kernel) for choice in choices}
