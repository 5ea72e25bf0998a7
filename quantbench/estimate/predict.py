"""What a run will take, before it: seconds, memory, energy and tokens per second, with sources.

    request = Request(config, "int4wo-128", batch=4, prompt=1024, new_tokens=128)
    estimate = predict(request, cards.card("NVIDIA L4"))
    estimate.token_seconds.value, estimate.token_seconds.source

Memory is counted from shapes. Seconds are those of the machine's phases: measured on a few layers
(estimate/here.py), or a card's roofline (estimate/cards.py).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from quantbench.devices import prefill_chunk
from quantbench.errors import UsageError
from quantbench.estimate.counting import Count
from quantbench.estimate.counting_configs import count_config
from quantbench.estimate.counting_models import count_model
from quantbench.log.config import RunConfig
from quantbench.log.record import NO_COUNTER
from quantbench.models.config import ModelConfig
from quantbench.text import size
from quantbench.typed_json import omitted

COVERED = 1.645  # standard deviations on either side that 90 % of a normal distribution lie within
NO_POWER = "no counter, and this device's power limit is not known"
# torch keeps a workspace for cuBLAS from the first product on: two blocks of 4096 KiB and eight of
# 16 KiB (at::cuda::getChosenWorkspaceSize).
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) << 10
# Assumed of a process on the CPU, as calibrations of an EPYC and a Xeon had it on 2026-11-23: bytes
# without the model (433 and 425 MB), and what prompts of one pass, or of more, leave behind of as
# many bytes as are alive at their peak (1.1 and 1.0, or 1.7 and 2.0 times).
PROCESS = 430_000_000
LEFT_BEHIND = (1.0, 2.0)


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

    @staticmethod
    def of(
        run: RunConfig, config: ModelConfig | str, scheme: str, prompt: int, **more: Any
    ) -> "Request":
        """What a run of generate.py asks for. prompt: tokens of a row; more: other fields."""
        given: dict[str, Any] = {
            "kv_cache": run.kv_cache,
            "batch": run.batch_size,
            "new_tokens": run.max_new_tokens,
            "tp": run.tp,
            "depth": run.context_depth,
            "precision": run.precision,
        }
        return Request(config, scheme, prompt=prompt, **(given | more))

    @property
    def positions(self) -> int:
        return self.cache_size or self.depth + self.prompt + self.new_tokens

    @property
    def tokens(self) -> int:
        """That seconds and joules are divided by: new ones, or those of a pass alone."""
        return self.batch * (self.new_tokens or self.prompt)


@dataclass(frozen=True)
class Figure:
    """One estimate. low and high: where nine in ten measurements are assumed to lie."""

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
    activations: int  # alive when they are most; on a CPU with what prompts leave behind
    workspace: int  # of the runtime: the process itself on a CPU, the product library on a GPU

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.workspace


@dataclass(frozen=True)
class RunEstimate:
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
    """Seconds of one phase, by what they are spent on."""

    parts: dict[str, float]
    bound: str  # what sets them
    source: str
    deviation: float  # of log(estimated ÷ measured)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Machine(ABC):
    """What seconds, memory and energy of a request are predicted from."""

    name: str
    source: str  # of its speeds
    device: torch.device  # decides how kernels store weights, and how prompts are cut into passes
    power: float | None  # watts at most, of one device
    memory_bytes: float | None  # of one device; None: not known
    warnings: list[str] = field(default_factory=list, kw_only=True)

    @abstractmethod
    def phases(self, request: Request) -> tuple[Phase, Phase]:
        """The prompt, and a step in the middle of the new tokens."""

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    def memory(self, request: Request, phase: str) -> Memory:
        """Bytes of a phase on one device; on a CPU those of all ranks. Of a prompt in several
        passes the deepest whole one and the last, which has the logits, are counted."""
        chunk = request.chunk or prefill_chunk(self.device, request.batch)
        tokens, before = request.prompt, request.depth
        if phase != "prompt":
            tokens, before = 1, request.positions - 1
        elif not isinstance(request.config, str):
            last = (request.prompt - 1) % chunk + 1
            tokens = min(request.prompt, last if last == chunk else chunk + last)
            before += request.prompt - tokens
        count = pass_of(request, self.device, tokens, before, request.positions)
        if not self.is_cpu:
            return Memory(count.block_bytes, count.kv_cache_bytes, count.peak_activation_bytes,
                          CUBLAS_WORKSPACE)  # fmt: skip
        left = 0.0 if phase != "prompt" else LEFT_BEHIND[request.prompt > chunk]
        activations = round((1 + left) * count.peak_activation_bytes)
        parts = count.weight_bytes, count.kv_cache_bytes, activations, PROCESS
        return Memory(*(request.tp * part for part in parts))

    def memories(self, request: Request) -> dict[str, Memory]:
        """By phase."""
        phases = ("prompt", "token") if request.new_tokens else ("prompt",)
        return {phase: self.memory(request, phase) for phase in phases}


def predict(request: Request, machine: Machine) -> RunEstimate:
    """Raises UsageError or KernelError for what the model or the machine does not take."""
    memory = machine.memories(request)
    peak = max(memory, key=lambda phase: memory[phase].total)
    prompt, token = machine.phases(request)
    steps = max(0, request.new_tokens - 1)
    seconds = prompt.seconds + steps * token.seconds
    longer = token if steps * token.seconds > prompt.seconds else prompt

    def figure(value: float, phase: Phase) -> Figure:
        times = math.exp(COVERED * phase.deviation)
        return Figure(value, phase.source, phase.bound, value / times, value * times)

    joules: Figure | Unknown = Unknown(None, NO_POWER)
    if machine.power is not None:
        devices = 1 if machine.is_cpu else request.tp
        most = devices * machine.power * seconds / request.tokens
        joules = Figure(most, NO_COUNTER, longer.bound)
    return RunEstimate(
        device=machine.name,
        scheme=request.scheme,
        kv_cache=request.kv_cache,
        prompt_seconds=figure(prompt.seconds, prompt),
        token_seconds=figure(token.seconds, token),
        tokens_per_second=figure(request.tokens / seconds, longer),
        peak_memory_bytes=Figure(
            memory[peak].total,
            "shapes: weights as the kernel stores them, cache, tensors alive at the peak",
            f"the {peak}: {_largest(memory[peak])}",
        ),
        joules_per_token=joules,
        memory=memory,
        parts={"prompt": prompt.parts, "token": token.parts},
        interval="nine in ten",
        warnings=machine.warnings,
    )


def _largest(memory: Memory) -> str:
    names = ("weights", "the KV cache", "activations", "the runtime")
    most, name = max(zip(vars(memory).values(), names, strict=True))
    return f"mostly {name}, {size(most)}"


def pass_of(
    request: Request, device: torch.device, tokens: int, depth: int, cache_size: int | None = None
) -> Count:
    """The count of `tokens` positions after `depth`, on one rank."""
    if not isinstance(request.config, str):
        return count_model(request, device, tokens, depth, cache_size)
    if request.scheme != "none" or request.kv_cache != "dense" or request.tp > 1:
        raise UsageError(
            f"{request.config}: models of transformers are estimated unquantized, with a dense "
            "cache, on one device: leave out --quantization, --kv_cache, --tp, --all_schemes and "
            "--what_fits"
        )
    precision: torch.dtype = getattr(torch, request.precision)
    return count_config(request.config, request.batch, tokens, depth, precision)
