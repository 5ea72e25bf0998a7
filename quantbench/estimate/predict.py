"""What a run will take, before it: seconds, memory, energy and tokens per second, with sources.

    request = Request(config, "int4wo-128", batch=4, prompt=1024, new_tokens=128)
    estimate = predict(request, Calibrated(calibration))        # this machine
    estimate = predict(request, FromDatasheet(sheet, efficiency))   # one that nobody has at hand
    estimate.token_seconds.value, estimate.token_seconds.bound

Every figure says where it comes from, what bounds it, and how sure it is: the interval is that of
the calibration's own residuals, on models that its fit had left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from quantbench.devices import prefill_chunk
from quantbench.errors import UsageError
from quantbench.estimate.calibration import Calibration, Speed
from quantbench.estimate.counting import Count, Logits, count_model
from quantbench.estimate.counting_configs import count_config
from quantbench.estimate.datasheets import Datasheet, find
from quantbench.estimate.exchanges import Exchanges, ring_seconds
from quantbench.estimate.memory import CUBLAS_WORKSPACE
from quantbench.estimate.passes import CalibratedMachine, Parts, scatter
from quantbench.models.config import ModelConfig
from quantbench.ops.ranks import Ranks
from quantbench.quantize.spec import parse_scheme
from quantbench.run.cutting import split_for
from quantbench.run.energy import NO_COUNTER
from quantbench.text import size
from quantbench.typed_json import omitted

COVERED = 1.645  # standard deviations on either side that 90 % of a normal distribution lie within
EXCHANGE = "what the ranks exchange"
NO_POWER = "no counter, and this device's power limit is not known"
TILE = 256  # columns of a matrix that cards multiply together
ALIKE = 0.15  # cards whose peaks per watt differ by less are limited by power alike


@dataclass(frozen=True)
class Request:
    """A run: a prompt of `prompt` positions in each of `batch` sequences, then new tokens."""

    config: ModelConfig | str  # or the path of a config.json that transformers understands
    scheme: str = "none"
    kv_cache: str = "dense"
    batch: int = 1
    prompt: int = 128
    new_tokens: int = 128  # 0: the prompt's pass alone; figures per token are of its tokens then
    tp: int = 1
    depth: int = 0  # positions in the cache before the prompt
    precision: str = "bfloat16"
    chunk: int | None = None  # positions of a prompt per pass; None: the device's own
    cache_size: int | None = None  # positions; None: as many as the run needs
    logits: Logits = "last"  # of the prompt: of its last position, or of all

    @property
    def positions(self) -> int:
        return self.cache_size or self.depth + self.prompt + self.new_tokens

    @property
    def tokens(self) -> int:
        """That seconds and joules are divided by: new ones, or those of a pass alone."""
        return self.batch * (self.new_tokens or self.prompt)


@dataclass(frozen=True)
class Figure:
    """One estimate. low and high: where nine in ten such estimates of the calibration lay."""

    value: float
    source: str
    bound: str  # what sets it
    low: float | None = omitted()
    high: float | None = omitted()


@dataclass(frozen=True)
class Unknown:
    """A figure that nothing here estimates. Its JSON has the keys of a Figure."""

    value: None
    source: str  # why there is none
    bound: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of one phase."""

    weights: int
    kv_cache: int
    activations: int  # alive when they are most; on a processor with what prompts leave behind
    workspace: int  # of the runtime: the process itself on a CPU, the product library on a GPU

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.workspace

    def times(self, count: int) -> "Memory":
        return Memory(*(count * part for part in vars(self).values()))


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run. Seconds of a token are those of a step of all sequences together."""

    device: str
    scheme: str
    kv_cache: str
    prompt_seconds: Figure  # up to the first new token
    token_seconds: Figure  # of each new token but the first, at half of the depth reached
    tokens_per_second: Figure  # new tokens of all sequences ÷ seconds, prompt included
    peak_memory_bytes: Figure  # of one device
    joules_per_token: Figure | Unknown  # of a new token, prompt included
    memory: dict[str, Memory]  # by phase: prompt, token
    parts: dict[str, dict[str, float]]  # seconds by phase and by what they are spent on
    interval: str  # what low and high are
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Phase:
    """Seconds of one phase, by what they are spent on, and what bounds it."""

    parts: dict[str, float]
    bound: str
    deviation: float | None = None  # standard deviation of log(estimated ÷ measured)
    source: str | None = None  # None: the machine's

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Machine(Protocol):
    """What predicts the phases of a request."""

    name: str
    source: str
    warnings: list[str]
    device: torch.device  # decides how kernels store weights, and how prompts are cut into passes
    workspace: int  # bytes of the runtime
    schemes: Sequence[str]  # that were calibrated; empty where any can be predicted
    interval: str  # what the interval of a figure is

    def prompt(self, request: Request) -> Phase: ...
    def token(self, request: Request, depth: int) -> Phase: ...
    def memory(self, request: Request, phase: str) -> Memory: ...
    def joules(self, request: Request, prompt: float, steps: float) -> tuple[float, str] | None:
        """Joules of a run, all devices together, and where they come from; None where nothing says.

        prompt, steps: seconds of the prompt, and of all decoding steps together.
        """


def predict(request: Request, machine: Machine) -> Estimate:
    """Raises UsageError or KernelError for what the model or the machine does not take."""
    middle = request.depth + request.prompt + request.new_tokens // 2
    prompt, token = machine.prompt(request), machine.token(request, middle)
    steps = max(0, request.new_tokens - 1)
    seconds = prompt.seconds + steps * token.seconds
    rate = request.tokens / seconds
    phases = ("prompt", "token") if request.new_tokens else ("prompt",)
    memory = {phase: machine.memory(request, phase) for phase in phases}
    peak = max(memory, key=lambda phase: memory[phase].total)
    longer = token if steps * token.seconds > prompt.seconds else prompt
    return Estimate(
        device=machine.name,
        scheme=request.scheme,
        kv_cache=request.kv_cache,
        prompt_seconds=_figure(prompt.seconds, prompt, machine.source),
        token_seconds=_figure(token.seconds, token, machine.source),
        tokens_per_second=_figure(rate, longer, machine.source),
        peak_memory_bytes=Figure(
            memory[peak].total,
            "shapes: weights as the kernel stores them, cache, tensors alive at the peak",
            f"the {peak}: {_largest(memory[peak])}",
        ),
        joules_per_token=_joules(request, machine, prompt.seconds, seconds, longer),
        memory=memory,
        parts={"prompt": prompt.parts, "token": token.parts},
        interval=machine.interval,
        warnings=machine.warnings,
    )


def _figure(value: float, phase: Phase, source: str) -> Figure:
    source = phase.source or source
    if phase.deviation is None:
        return Figure(value, source, phase.bound)
    times = math.exp(COVERED * phase.deviation)
    return Figure(value, source, phase.bound, value / times, value * times)


def _joules(
    request: Request, machine: Machine, prompt: float, seconds: float, phase: Phase
) -> Figure | Unknown:
    known = machine.joules(request, prompt, seconds - prompt)
    if known is None:
        return Unknown(None, NO_POWER)
    joules, source = known
    return Figure(joules / request.tokens, source, phase.bound)


def _largest(memory: Memory) -> str:
    each = {
        "weights": memory.weights,
        "the KV cache": memory.kv_cache,
        "activations": memory.activations,
        "the runtime": memory.workspace,
    }
    name = max(each, key=lambda key: each[key])
    return f"mostly {name}, {size(each[name])}"


def counted(request: Request, machine: Machine, phase: str) -> Count:
    """The count of a phase: of the prompt, or of the last step."""
    prompt = phase == "prompt"
    tokens, depth = (request.prompt, request.depth) if prompt else (1, request.positions - 1)
    return pass_of(request, machine, tokens, depth, request.positions)


def pass_of(
    request: Request, machine: Machine, tokens: int, depth: int, cache_size: int | None = None
) -> Count:
    """The count of `tokens` positions after `depth`, on one rank."""
    precision: torch.dtype = getattr(torch, request.precision)
    logits = request.logits if tokens > 1 else "last"
    if isinstance(request.config, str):
        if request.scheme != "none" or request.kv_cache != "dense" or request.tp > 1:
            raise UsageError(
                f"{request.config}: models of transformers are estimated unquantized, with a dense "
                "cache, on one device: leave out --quantization, --kv_cache, --tp, --all_schemes "
                "and --what_fits"
            )
        return count_config(request.config, request.batch, tokens, depth, logits, precision)
    return count_model(
        request.config,
        request.scheme,
        request.kv_cache,
        request.batch,
        tokens,
        depth,
        request.tp,
        logits,
        precision,
        device=machine.device,
        chunk=request.chunk or prefill_chunk(machine.device, request.batch),
        cache_size=cache_size,
    )


def memory_of(request: Request, machine: Machine, phase: str) -> Memory:
    """What a phase takes, from shapes. Of a prompt in several passes the deepest whole one is
    counted, and the last, which has the logits: none before them has more alive."""
    if phase == "prompt" and not isinstance(request.config, str):
        chunk = request.chunk or prefill_chunk(machine.device, request.batch)
        last = (request.prompt - 1) % chunk + 1
        tokens = min(request.prompt, last if last == chunk else chunk + last)
        before = request.depth + request.prompt - tokens
        count = pass_of(request, machine, tokens, before, request.positions)
    else:
        count = counted(request, machine, phase)
    return Memory(
        count.weight_bytes, count.kv_cache_bytes, count.peak_activation_bytes, machine.workspace
    )


# ----------------------------------------------------------------------------- calibrated machines


NINE_IN_TEN = "nine in ten"
OF_THE_FIT = "fit's scatter"  # on what was measured; of another device nobody knows


class Calibrated:
    """A machine that `calibrate` has measured. now: how fast it is at this moment, if it was read;
    otherwise it is taken to be as fast as then."""

    interval = NINE_IN_TEN

    def __init__(
        self, calibration: Calibration, warnings: Sequence[str] = (), now: Speed | None = None
    ) -> None:
        """Raises UsageError where no curves can be laid through what was measured."""
        self.calibration, self.now, self.warnings = calibration, now, list(warnings)
        try:
            self.machine = CalibratedMachine(calibration)
            self.deviation = scatter(calibration)
        except (ValueError, LookupError, ArithmeticError, RuntimeError) as error:
            raise UsageError(
                f"the calibration of {calibration.name}, {calibration.date[:10]}: no estimate can "
                f"be made of its points ({' '.join(str(error).split())}); calibrate again"
            ) from error
        self.schemes: Sequence[str] = self.machine.curves.schemes
        self.exchanges = Exchanges(calibration.exchanges)
        self.name = calibration.name
        self.source = f"calibration of {calibration.name}, {calibration.date[:10]}"
        if now is not None:
            was = calibration.speed.read / 1e9
            self.source += f", at {now.read / 1e9:.0f} GB/s as read now ({was:.0f} then)"
        self.device = torch.device(str(calibration.device["type"]))
        self.workspace = calibration.base_bytes

    def prompt(self, request: Request) -> Phase:
        how = self._how(request)
        chunk = request.chunk or prefill_chunk(self.device, request.batch)
        parts = self.machine.prompt(*how, request.prompt, chunk, depth=request.depth)
        exchange = 0.0
        if request.tp > 1:
            parts = parts.of_ranks(self._taking_turns(request.tp))
            exchange = self._exchange(request, counted(request, self, "prompt"))
        arithmetic = max(parts.products, parts.attention, parts.rest)
        bound = {
            parts.products: "arithmetic of the products",
            parts.attention: "attention of the prompt to itself",
            parts.rest: "norms, rotation and gates",
        }[arithmetic]
        rows = request.batch * min(request.prompt, chunk)
        named = self._at_now(parts, request.scheme, rows, step=False)
        if exchange:
            named["exchange"] = exchange
        if exchange > arithmetic:
            bound = EXCHANGE
        return Phase(named, bound, self.deviation["prompt"])

    def token(self, request: Request, depth: int) -> Phase:
        parts = self.machine.step(*self._how(request), depth)
        exchange = 0.0
        if request.tp > 1:
            parts = parts.of_ranks(self._taking_turns(request.tp))
            exchange = self._exchange(request, pass_of(request, self, 1, depth))
        largest = max(parts.named, key=lambda name: parts.named[name])
        bound = {
            "products": "reading weights from memory",
            "attention": "reading the KV cache",
            "rest": "the draw of a token",
            "fixed": "the cost of each layer's calls",
        }[largest]
        named = self._at_now(parts, request.scheme, request.batch, step=True)
        if exchange:
            named["exchange"] = exchange
        if exchange > parts.named[largest]:
            bound = EXCHANGE
        return Phase(named, bound, self.deviation["token"])

    def memory(self, request: Request, phase: str) -> Memory:
        """The memory of one device. A processor holds all ranks, so there it is their sum."""
        one = memory_of(request, self, phase)
        if phase == "prompt" and self.device.type == "cpu":
            chunk = request.chunk or prefill_chunk(self.device, request.batch)
            passes = math.ceil(request.prompt / chunk)
            more = self.calibration.left_behind.bytes(one.activations, passes)
            one = replace(one, activations=one.activations + more)
        return one.times(self._taking_turns(request.tp))

    def joules(self, request: Request, prompt: float, steps: float) -> tuple[float, str] | None:
        """By the power that was counted while calibrating; or, at most, by the power limit. The
        counters of a processor are of all of its cores, those of a card of one device."""
        power, devices = self.calibration.power, request.tp // self._taking_turns(request.tp)
        if power is None:
            return None
        if power.prompt is not None and power.step is not None:
            joules = power.prompt * prompt + power.step * steps
            return devices * joules, f"{power.counter} while calibrating, the idle machine left out"
        if power.limit is not None:
            return devices * power.limit * (prompt + steps), NO_COUNTER
        return None

    def _taking_turns(self, ranks: int) -> int:
        """Ranks that share one device: on a processor all of them, which share its cores."""
        return ranks if self.device.type == "cpu" else 1

    def _exchange(self, request: Request, count: Count) -> float:
        """Seconds of the sums and gathers of one rank's pass."""
        return sum(
            one.calls * self.exchanges.seconds(one.kind, one.bytes, request.tp)
            for one in count.collectives
        )

    def _how(self, request: Request) -> tuple[ModelConfig, str, str, int]:
        if request.precision != self.calibration.precision:
            raise UsageError(
                f"--precision {request.precision}: the calibration is of "
                f"{self.calibration.precision}; `calibrate --precision` measures another"
            )
        if isinstance(request.config, str):
            raise UsageError(
                f"{request.config}: a calibration is of our own models, and this architecture is "
                "none of them; give --device the name of a card"
            )
        config = request.config
        if request.tp > 1:
            config = split_for(config, Ranks(0, request.tp), parse_scheme(request.scheme)).config
        return config, request.scheme, request.kv_cache, request.batch

    def _at_now(self, parts: Parts, scheme: str, rows: int, step: bool) -> dict[str, float]:
        if self.now is None:
            return parts.named
        return self.machine.at_speed(parts, self.now, scheme, rows, step).named


# ----------------------------------------------------------------------------- other machines


@dataclass(frozen=True)
class Efficiency:
    """What share of a datasheet's peaks a device reaches, from a relative that was measured."""

    arithmetic: float  # of the dense peak, in products of many rows
    memory: float  # of the bandwidth, in reading weights
    call_seconds: float  # of each operation, where nothing hides it
    source: str
    deviation: float | None = None  # of log(estimated ÷ measured) on what it was fitted to


class FromDatasheet:
    """A device that nobody has at hand: every operation takes the longer of its arithmetic and its
    bytes, at the share of the peaks that a measured relative reaches."""

    workspace = CUBLAS_WORKSPACE
    device = torch.device("cuda")
    interval = OF_THE_FIT

    def __init__(
        self, sheet: Datasheet, efficiency: Efficiency, warnings: Sequence[str] = ()
    ) -> None:
        self.sheet, self.efficiency, self.name = sheet, efficiency, sheet.name
        self.source = f"not measured: datasheet ({sheet.source}), efficiency of {efficiency.source}"
        self.warnings = list(warnings)
        self.schemes: Sequence[str] = ()

    def prompt(self, request: Request) -> Phase:
        return self._phase(request, counted(request, self, "prompt"))

    def token(self, request: Request, depth: int) -> Phase:
        return self._phase(request, pass_of(request, self, 1, depth))

    def _phase(self, request: Request, count: Count) -> Phase:
        """Products take the longer of their arithmetic, at the peak of the numbers that the scheme
        multiplies, and their bytes; attention, which is not fused with anything, both one after the
        other; everything else its bytes."""
        spec = parse_scheme(request.scheme)
        bandwidth = self.sheet.bandwidth * self.efficiency.memory
        parts = {"linear": 0.0, "attention": 0.0, "rest": 0.0, "links": 0.0}
        bounds = {"arithmetic": 0.0, "memory's bandwidth": 0.0, "the links between devices": 0.0}
        for work in count.works:
            tiled = in_tiles(work.outer) if work.kind == "linear" else 1.0
            numbers = spec.multiplied if work.format == str(spec) else None
            peak = self.sheet.peak(numbers or request.precision) * self.efficiency.arithmetic
            arithmetic = work.flops * tiled / peak
            memory = (work.bytes_read + work.bytes_written) / bandwidth
            longer = arithmetic + memory if work.kind == "attention" else max(arithmetic, memory)
            seconds = max(longer, work.calls * self.efficiency.call_seconds)
            parts[work.kind] += seconds
            bounds["arithmetic" if arithmetic > memory else "memory's bandwidth"] += seconds
        link = self.sheet.link_among(request.tp)
        for one in count.collectives:
            seconds = one.calls * ring_seconds(one.kind, one.bytes, request.tp, link)
            parts["links"] += seconds
            bounds["the links between devices"] += seconds
        bound = max(bounds, key=lambda name: bounds[name])
        if not parts["links"]:
            parts.pop("links")
        return Phase(parts, bound, self.efficiency.deviation)

    def memory(self, request: Request, phase: str) -> Memory:
        return memory_of(request, self, phase)

    def joules(self, request: Request, prompt: float, steps: float) -> tuple[float, str] | None:
        return request.tp * self.sheet.power * (prompt + steps), NO_COUNTER


# Of an NVIDIA RTX A5000: 74.2 of 111.1 Tflop/s, and 548 of 768 GB/s. Two constants, seconds per
# operation of products and attention and seconds per byte of everything else, were fitted by least
# squares of relative errors to six measured forward passes of 16 × 1024 tokens in float16 that were
# published of that card: 693.77 ms (facebook/opt-1.3b), 3275.30 (opt-6.7b), 121.46
# (AICrossSim/clm-60m), 241.97 (clm-200m), 380.49 (clm-400m) and 747.17 (clm-1.1b).
A5000 = Efficiency(
    0.6682, 0.7135, 0.0, "an NVIDIA RTX A5000, fitted to six published passes", 0.0144
)


def in_tiles(outer: int) -> float:
    """Columns in whole tiles ÷ columns, for a tile that is not full takes as long as a full one; 1
    for a product that has no such columns."""
    return -(-outer // TILE) * TILE / outer if outer else 1.0


def efficiency_by_a5000(sheet: Datasheet) -> Efficiency:
    """What share of its datasheet a card is taken to reach of which nothing was measured.

    As an A5000; but where its power limit has grown less than its peak, and both have about the
    same peak per watt, products go by the limit: then the cards are made alike, and the limit sets
    the clock at which products run.
    """
    own = find("NVIDIA RTX A5000")
    peaks, watts = sheet.peak("float16") / own.peak("float16"), sheet.power / own.power
    if watts >= peaks or abs(peaks / watts - 1) >= ALIKE:
        return A5000
    return replace(
        A5000,
        arithmetic=A5000.arithmetic * watts / peaks,
        source=f"{A5000.source}, products by the ratio of the power limits",
    )


def efficiency_of(calibration: Calibration, sheet: Datasheet) -> Efficiency:
    """What a calibrated card reaches of its own datasheet."""
    machine = CalibratedMachine(calibration)
    return Efficiency(
        calibration.speed.multiply / sheet.peak(calibration.precision),
        machine.curves.weight_rate("none", 1) / sheet.bandwidth,
        calibration.call_seconds,
        f"{calibration.name}, calibrated {calibration.date[:10]}",
        scatter(calibration)["token"],
    )
