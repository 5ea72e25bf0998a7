"""autoquant: per shape of layer, the fastest scheme measured here that keeps --min_sqnr.

    choices = choose(samples, AutoQuant(), batch_size=1, min_sqnr=35.0, cache=default_cache())
    print(table(choices))
    model = load_model(path, transform=AutoQuantizer(choices, device, dtype))

A candidate is a scheme and a kernel. To be chosen it has to be faster than full precision by more
than noise, and its output on real activations has to keep a signal-to-quantization-noise ratio
(SQNR) of min_sqnr decibels: 35 dB is noise of 1.8 % of the signal's size.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench import devices, files
from quantbench.errors import CheckpointError, KernelError, QuantbenchError, UsageError
from quantbench.quantize.autoquant import race
from quantbench.quantize.autoquant.race import Timing, attempt
from quantbench.quantize.registry import SCHEMES, Quantizer, available, with_weight
from quantbench.quantize.scheme import rows_at_once
from quantbench.quantize.spec import FullPrecision, Quantization, Spec, parse
from quantbench.text import aligned
from quantbench.typed_json import from_json, parsed, to_json

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
PACKAGES = ("torch", "torchao", "triton", "quantbench")  # in which kernels are implemented


@dataclass(frozen=True)
class Sample:
    """A layer in full precision, on its device, and real inputs of it, (T, K)."""

    name: str
    layer: nn.Linear
    activations: Tensor


@dataclass(frozen=True)
class Candidate:
    spec: Spec
    kernel: str

    def __str__(self) -> str:
        return f"{self.spec} ({self.kernel})"


@dataclass(frozen=True)
class Measurement:
    """A candidate on one shape of layer, or the `reason` why it was not measured."""

    candidate: Candidate
    bytes: int = 0  # of the layer's weights
    timing: Timing | None = None
    sqnr: float = math.nan  # dB
    agreement: float = math.inf  # dB; see AGREEMENT
    reason: str | None = None
    verdict: str = ""

    @property
    def seconds(self) -> float:
        return self.timing.seconds if self.timing else math.inf

    @property
    def in_full(self) -> bool:
        return isinstance(self.candidate.spec, FullPrecision)


@dataclass(frozen=True)
class Timings:
    """What the cache stores for a shape: by candidate's name its timing and agreement."""

    of: dict[str, tuple[Timing, float]]
    warm: bool  # weights may have come from the cache: memory did not allow for enough copies


@dataclass(frozen=True)
class Choice:
    shape: tuple[int, int]  # out_features, in_features
    layers: tuple[str, ...]
    setting: str  # batch, dtype, compiled or not
    chosen: Candidate
    measurements: tuple[Measurement, ...]  # fastest first
    warm: bool = False  # as in Timings
    kept: bool = False  # the timings are an earlier run's

    def of(self, candidate: Candidate) -> Measurement:
        return next(m for m in self.measurements if m.candidate == candidate)


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

    Products are timed on (batch_size, 1, K) inputs, compiled or not. `cache`: the file in which
    timings are stored; SQNR depends on the weights and is measured each time. `report` gets
    shapes done and in all. With a `kernel` other than "auto" only that kernel's candidates run
    against full precision.

    Raises KernelError if full precision itself cannot be timed, or no scheme has that kernel.
    """
    shapes: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        shapes.setdefault((sample.layer.out_features, sample.layer.in_features), []).append(sample)
    fields = [candidates(selection, alike[0].layer, kernel) for alike in shapes.values()]
    if samples and all(one.in_full for field in fields for one in field):
        raise KernelError(f"--kernel {kernel}: none of {selection}'s schemes has such a kernel")
    choices: list[Choice] = []
    for (shape, alike), field in zip(shapes.items(), fields, strict=True):
        parts = [_part(sample) for sample in alike]
        key = cache_key(parts[0].layer, batch_size, compile)
        names = [str(one.candidate) for one in field if one.reason is None]
        timings = read(cache, key, names)
        measured, raced = _measured(parts, field, batch_size, compile, timings)
        if len(raced.of) == len(names):  # a candidate that failed may have lacked memory
            write(cache, key, raced)
        chosen, judged = decide(measured, min_sqnr)
        setting = f"batch {batch_size}, {key['dtype']}, {'' if compile else 'not '}compiled"
        if (rows := parts[0].layer.weight.shape[0]) < shape[0]:
            setting += f", {rows} of its rows"
        layers = tuple(sample.name for sample in alike)
        kept = timings is not None
        choices.append(Choice(shape, layers, setting, chosen, tuple(judged), raced.warm, kept))
        report(len(choices), len(shapes))
    return choices


def candidates(
    selection: Quantization, layer: nn.Linear, kernel: str = "auto"
) -> list[Measurement]:
    """Every candidate for a layer; with a `reason` those that refuse its shape.

    A kernel that cannot run on this device is listed only where its scheme has no usable one; the
    slow ones (the reference; Triton's interpreter on the CPU) take part only there, too.
    """
    weight, field = layer.weight, []
    N, K = weight.shape
    for spec in (FullPrecision(), *selection.candidates):
        scheme, running, refused, absent = SCHEMES[type(spec)], [], [], []
        whole = scheme.refuses(spec, K)
        for name, why in available(spec, weight.device, weight.dtype).items():
            if kernel not in ("auto", name) and not isinstance(spec, FullPrecision):
                continue
            if why is None and isinstance(failed := attempt(scheme.kernels[name].prepare), str):
                why = failed.removeprefix("KernelError: ")
            refusal = whole or scheme.kernels[name].refuses(spec, weight.device, K, N)
            entry = Measurement(Candidate(spec, name), reason=why or refusal)
            (absent if why else refused if refusal else running).append(entry)
        if kernel == "auto":
            slow = ("reference", "triton") if weight.device.type == "cpu" else ("reference",)
            running = [m for m in running if m.candidate.kernel not in slow] or running[-1:]
        field += running + refused[: 1 if whole else None] or absent
    return field


# --------------------------------------------------------------------------------------- measuring


def _measured(
    alike: Sequence[Sample],
    field: Sequence[Measurement],
    batch_size: int,
    compile: bool,
    timings: Timings | None,
) -> tuple[list[Measurement], Timings]:
    """The candidates on layers of one shape: quality on each layer, speed on the first, unless the
    timings are known."""
    inputs = [_rows(sample.activations, max(SQNR_ROWS, batch_size)) for sample in alike]
    exact = [exact_product(one.layer, x) for one, x in zip(alike, inputs, strict=True)]

    def quality(candidate: Candidate) -> tuple[nn.Module, Tensor, float]:
        """The first layer, its output, and the least SQNR of all layers."""
        layers = [quantized(candidate, sample) for sample in alike]
        outputs = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        ratios = [decibels(*pair) for pair in zip(exact, outputs, strict=True)]
        least = math.nan if any(map(math.isnan, ratios)) else min(ratios)
        return layers[0], outputs[0], least

    results: dict[str, tuple[nn.Module, Tensor, float]] = {}
    reasons: dict[str, str] = {}
    for one in field:
        name = str(one.candidate)
        result = one.reason or attempt(lambda: quality(one.candidate))  # noqa: B023
        if isinstance(result, str):
            reasons[name] = result
        else:
            results[name] = result
    if timings is None:
        x = inputs[0][:batch_size]
        limit = TOO_SLOW if x.device.type == "cpu" else math.inf
        with devices.returning_memory():
            layers = [layer for layer, *_ in results.values()]
            raced = race.race(layers, x, compile, too_slow=limit)
        timings = Timings({}, raced.rotated < raced.cache)
        for name, timing, output in zip(results, raced.timings, raced.outputs, strict=True):
            if isinstance(timing, str) or output is None:
                reasons[name] = str(timing)
            else:
                agreement = decibels(results[name][1][:batch_size], output)
                timings.of[name] = timing, agreement
    measured = []
    for one in field:
        name = str(one.candidate)
        if name in results:
            layer, _, sqnr = results[name]
            one = dataclasses.replace(one, bytes=race.module_bytes(layer), sqnr=sqnr)
        if name in reasons:
            one = dataclasses.replace(one, reason=reasons[name])
        else:
            timing, agreement = timings.of[name]
            one = dataclasses.replace(one, timing=timing, agreement=agreement)
        measured.append(one)
    return measured, timings


def _part(sample: Sample) -> Sample:
    """The sample with at most MAX_WEIGHTS of its layer's weights, without the layer's hooks."""
    weight, bias = sample.layer.weight.data, sample.layer.bias
    N, K = weight.shape
    rows = min(N, max(64, MAX_WEIGHTS // K // 64 * 64)) if weight.device.type == "cpu" else N
    chosen = torch.arange(rows, device=weight.device) * N // rows
    part = nn.Linear(K, rows, False, "meta")
    part.weight = nn.Parameter(weight[chosen] if rows < N else weight, requires_grad=False)
    part.bias = None if bias is None else nn.Parameter(bias.data[chosen], requires_grad=False)
    return dataclasses.replace(sample, layer=part)


def decibels(exact: Tensor, y: Tensor) -> float:
    """10 log10 of Σ exact² / Σ (y - exact)²: infinite if they are equal, NaN if y has one."""
    exact, y = exact.to(_widest(exact)), y.to(_widest(exact))
    signal, noise = exact.square().sum().item(), (y - exact).square().sum().item()
    if math.isnan(noise) or noise == 0:
        return math.nan if noise else math.inf
    return 10 * math.log10(signal / noise) if 0 < signal and noise < math.inf else -math.inf


def exact_product(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) without rounding, some rows of the weight at a time."""
    wide, bias = _widest(x), layer.bias
    blocks = layer.weight.data.split(rows_at_once(layer.weight))
    y = torch.cat([F.linear(x.to(wide), w.to(wide)) for w in blocks], -1)
    return y if bias is None else y + bias.to(wide)


def _widest(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _rows(activations: Tensor, count: int) -> Tensor:
    """(count, 1, K): activations, evenly spread, or repeated if there are fewer."""
    total = len(activations)
    places = torch.arange(count, device=activations.device)
    return activations[places * total // count if count <= total else places % total][:, None]


def quantized(candidate: Candidate, sample: Sample) -> nn.Module:
    weight = sample.layer.weight.data
    quantizer = Quantizer(candidate.spec, weight.device, weight.dtype, candidate.kernel)
    return quantizer(sample.name, with_weight(sample.layer, weight))


# ----------------------------------------------------------------------------------------- verdict


def decide(
    measurements: Iterable[Measurement], min_sqnr: float
) -> tuple[Candidate, list[Measurement]]:
    """The fastest allowed candidate, and all of them, fastest first, each with its verdict.

    Full precision, on the fastest of its kernels, wins if no candidate is allowed. Raises
    KernelError if it was not timed.
    """
    ordered = sorted(measurements, key=lambda m: m.seconds)
    full = next(m for m in ordered if m.in_full)
    if full.timing is None:
        raise KernelError(f"autoquant cannot time full precision: {full.reason}")
    objections = [_objection(m, full, min_sqnr) for m in ordered]
    best = next((m for m, why in zip(ordered, objections, strict=True) if not why), full)
    judged = []
    for one, objection in zip(ordered, objections, strict=True):
        if one is best:
            verdict = "chosen" if best is not full else "chosen: nothing faster was allowed"
        elif one is full or not objection:
            verdict = f"slower: {one.seconds / best.seconds:.2f} × the chosen"
        else:
            verdict = objection
        judged.append(dataclasses.replace(one, verdict=verdict))
    return best.candidate, judged


def _objection(one: Measurement, full: Measurement, min_sqnr: float) -> str | None:
    """Why a candidate may not be chosen, or None. NaN compares as false, so it never passes."""
    if one.timing is None:
        return one.reason or "not timed"
    if not one.agreement >= AGREEMENT:
        return f"wrong: batch-1 output differs from its batched output ({one.agreement:.1f} dB)"
    if one is not full and not one.sqnr >= min_sqnr:
        return f"{one.sqnr:.1f} dB < {min_sqnr:g} dB"
    ratio = one.seconds / full.seconds
    if ratio > 1:
        return f"slower than full precision: {ratio:.2f} × its time"
    if ratio > GAIN:
        return f"no faster than full precision beyond noise: {ratio:.2f} × its time"
    return None


def table(choices: Sequence[Choice]) -> str:
    """The measurements and choices of every shape, fastest first, and the caveats."""
    parts = []
    for choice in choices:
        others = f" and {len(choice.layers) - 1} more" * (len(choice.layers) > 1)
        best, full = choice.of(choice.chosen), next(m for m in choice.measurements if m.in_full)
        times = f": {full.seconds / best.seconds:.2f} × as fast as full precision"
        N, K = choice.shape
        head = f"{N} × {K} ({choice.layers[0]}{others}), {choice.setting} → {choice.chosen}"
        rows = aligned([HEADINGS, *map(_row, choice.measurements)], {0, 1, 6})
        parts.append(head + times * (best is not full) + "\n" + textwrap.indent(rows, "  "))
    if kept := sum(choice.kept for choice in choices):
        parts.append(f"Timings of {kept} of {len(choices)} shapes are kept from an earlier run.")
    if warm := sum(choice.warm for choice in choices):
        parts.append(
            f"In {warm} of {len(choices)} shapes weights may have come from the last-level cache: "
            "memory did not allow for enough copies."
        )
    return "\n\n".join(parts)


def _row(one: Measurement) -> tuple[str, ...]:
    sqnr = (
        "-" if math.isnan(one.sqnr) else "exact" if one.sqnr == math.inf else f"{one.sqnr:.1f} dB"
    )
    cells = ["-"] * 3
    if one.timing:
        time, low, high = (1e6 * t for t in (one.seconds, one.timing.low, one.timing.high))
        cells[0] = f"{time:.1f} µs ({low:.1f} to {high:.1f})"
        cells[1:] = f"{one.bytes / 1e6:.2f} MB", f"{one.bytes / one.seconds / 1e9:.1f} GB/s"
    sqnr = "exact" if one.sqnr == math.inf else sqnr
    return str(one.candidate.spec), one.candidate.kernel, *cells, sqnr, one.verdict


# ------------------------------------------------------------------------------------------- cache


def default_cache() -> Path:
    return files.cache_folder() / "autoquant.json"


def cache_key(layer: nn.Linear, batch_size: int, compile: bool) -> dict[str, Any]:
    """Everything that a product's time depends on, except for the candidate."""
    device = layer.weight.device
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for folder in ("ops", "quantize"):  # our kernels' sources change between versions
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return {
        "device": {"type": device.type, **devices.describe(device)},
        "instructions": torch.backends.cpu.get_cpu_capability() * (device.type == "cpu"),
        "versions": versions,
        "sources": digest.hexdigest()[:16],
        "shape": list(layer.weight.shape),
        "bias": layer.bias is not None,
        "dtype": str(layer.weight.dtype)[6:],
        "batch_size": batch_size,
        "compile": compile,
    }


def read(path: Path | None, key: Mapping[str, Any], names: Sequence[str]) -> Timings | None:
    """The timings stored under the key, if they cover all the names."""
    try:
        timings = from_json(Timings, _entries(path)[json.dumps(key, sort_keys=True)])
    except (ValueError, KeyError):
        return None
    return timings if timings.of.keys() >= set(names) else None


def write(path: Path | None, key: Mapping[str, Any], timings: Timings) -> None:
    """Add an entry under a lock. In a folder that cannot be written to nothing is stored."""
    if path is None:
        return
    with suppress(OSError, QuantbenchError):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            files.lock(folder)
            entries = _entries(path) | {json.dumps(key, sort_keys=True): to_json(timings)}
            files.write_text("", path, json.dumps({"timings": entries}, indent=1))
        finally:
            os.close(folder)


def _entries(path: Path | None) -> dict[str, Any]:
    try:
        entries = parsed(path.read_bytes())["timings"] if path else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


# ---------------------------------------------------------------------------------------- applying


class AutoQuantizer:
    """(name, module) -> module, as registry.Quantizer: the chosen scheme for each layer's shape."""

    def __init__(
        self,
        choices: Sequence[Choice],
        device: torch.device,
        dtype: torch.dtype,
        layers: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`layers`: the (scheme, kernel) by layer's name of a saved model, instead of by shape. A
        kernel that cannot run here is replaced by the best that can; see `ran`.

        Raises CheckpointError for a scheme that does not exist, KernelError if none of its kernels
        runs.
        """
        self.ran: Counter[str] = Counter()  # how many layers each kernel got
        self.layers: dict[str, tuple[str, str]] = {}  # (scheme, kernel) of each layer built
        chosen: dict[Any, Candidate] = {choice.shape: choice.chosen for choice in choices}
        for name, (given, kernel) in (layers or {}).items():
            spec = _saved(name, given)
            runs = available(spec, device, dtype).get(kernel, "unknown") is None
            chosen[name] = Candidate(spec, kernel if runs else "auto")
        made = {c: Quantizer(c.spec, device, dtype, c.kernel) for c in set(chosen.values())}
        self._quantizers = {key: made[candidate] for key, candidate in chosen.items()}

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        return self.built(name, self.quantized(name, module))

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with its scheme's numbers; KernelError, naming the layer, without a choice."""
        return self._of(name, module).quantized(name, module) if self.takes(module) else module

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer in its kernel's form."""
        if not self.takes(layer):
            return layer
        quantizer = self._of(name, layer)
        built = quantizer.built(name, layer)
        kernel = quantizer.kernel_for(name, layer)  # the one built: those that failed are gone
        self.ran[kernel] += 1
        self.layers[name] = str(quantizer.spec), kernel
        return built

    def _of(self, name: str, layer: nn.Module) -> Quantizer:
        N, K = layer.out_features, layer.in_features
        quantizer = self._quantizers.get(name) or self._quantizers.get((N, K))
        if quantizer is None:
            raise KernelError(f"{name} is {N} by {K}, and autoquant has chosen nothing for that")
        return quantizer


def _saved(name: str, given: str) -> Spec:
    try:
        spec = parse(given).scheme
    except UsageError as error:
        raise CheckpointError(f"{name} was saved as {given!r}: {error}") from None
    if spec is None:
        raise CheckpointError(f"{name} was saved as {given!r}, which is no scheme")
    return spec
