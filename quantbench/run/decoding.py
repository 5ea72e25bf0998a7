"""How a decoding step is carried out: by the model's modules, or by a C++ op that fuses them.

cpu-step     the whole step in one op, embeddings to logits (run/cpu_step.py)
modules      the readable model, compiled or not

decoder = choose("auto", model, caches, rows=1)
logits = decoder.step(tokens, position)     # (B, 1), (1,) -> (B, V)
decoder.name, decoder.reason                # "modules", "the model is on cuda, …"
"""

import itertools
import os
import platform
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from quantbench import devices
from quantbench.errors import KernelError
from quantbench.kv_cache.base import KVCache, LayerMemory
from quantbench.log.config import DECODERS
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Block, Transformer
from quantbench.ops import attention

FUSED, MODULES = DECODERS[1:]  # fastest first; before them is auto


class Decoder(Protocol):
    """One decoding step of a model over its caches."""

    name: str  # a key of DECODERS
    reason: str | None  # why it is not cpu-step; None if it is

    def takes(self, tokens: Tensor) -> bool:
        """Whether tokens (B, S) are few enough for a step; of each row one always is."""

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits (B, V) of the next tokens, after tokens (B, 1) at position (1,); both int64. After
        tokens (B, S), the first of them at that position, (B, S, V)."""


def choose(
    name: str, model: Transformer, caches: Sequence[LayerMemory], rows: int, compiled: bool = False
) -> Decoder:
    """The decoder of that name; "auto": the fastest that supports the model, the caches and `rows`.

    rows: the batch size. compiled: whether torch.compile will compile the step. Raises KernelError,
    with the reason, for a decoder that does not support them.
    """
    picked, reason = name_of(name, model, caches, rows)
    if picked == MODULES:
        return Modules(model, list(caches), reason, compiled)
    from quantbench.run import cpu_step  # the C++ kernels, which other devices never read

    return cpu_step.CpuStep(model, cast("list[KVCache]", caches))


def name_of(
    name: str, model: Transformer, caches: Sequence[LayerMemory], rows: int
) -> tuple[str, str | None]:
    """The name of the decoder that `choose` makes, and why the model cannot have cpu-step. The
    model and the caches may be on the meta device, where they stand for a model on the CPU."""
    if name not in DECODERS:
        raise KernelError(f"--decoder {name}: there are {', '.join(DECODERS)}")
    from quantbench.run import cpu_step

    refusal = cpu_step.why_not_fused(model, caches, rows)
    if refusal and name == FUSED:
        raise KernelError(f"--decoder {name}: {refusal}; auto takes what can run")
    return MODULES if refusal or name == MODULES else FUSED, refusal


class Modules:
    """The model's own modules. If `compiled`, one layer is compiled and called for every layer."""

    name = MODULES

    def __init__(
        self, model: Transformer, caches: list[LayerMemory], reason: str | None, compiled: bool
    ) -> None:
        """reason: why the decoder is not cpu-step. compiled: torch.compile will have the step."""
        self.model, self.caches, self.reason = model, caches, reason
        if compiled:
            model.prepare_to_compile()
        self.nested = compiled and all(map(_is_plain, model.layers.parameters()))

    def takes(self, tokens: Tensor) -> bool:
        return tokens.shape[1] == 1

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        model = self.model
        if not self.nested or type(model).hidden is not Transformer.hidden:
            logits: Tensor = model(tokens, position, self.caches)
            return logits[:, -1]
        x = model.embed(tokens)
        beside = model.beside(tokens, x, position)
        for layer, more, cache in zip(model.layers, beside, self.caches, strict=True):
            x = block_region(cast("Block", layer), x, more, position, cache)
        return model.logits(x)[:, -1]


@torch.compiler.nested_compile_region
def block_region(
    layer: Block, x: Tensor, more: tuple[Any, ...], positions: Tensor, cache: LayerMemory
) -> Tensor:
    """A layer as a nested compile region: compiled once, called for every layer."""
    y: Tensor = layer(x, *more, positions, cache)
    return y


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a nested compile region accepts this weight: it does not accept tensor subclasses."""
    return type(parameter) is nn.Parameter and type(parameter.data) is Tensor


# ---------------------------------------------------------------------------------- its caches


def attention_of(
    kind: type[KVCache], config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> attention.AttentionKernel:
    """The kernel for a model's attention over such caches, and why it is no faster one."""
    kinds = {(spec.head_dim, config.num_heads // spec.kv_heads) for spec in config.layers}
    narrow, *wide = (
        attention.choose(device, width, group, dtype, kind.format) for width, group in sorted(kinds)
    )
    reasons = (kernel.reason for kernel in (narrow, *wide) if kernel.reason)
    return attention.AttentionKernel(narrow.name, next(reasons, None))


def caches_of(
    kind: type[KVCache],
    config: ModelConfig,
    rows: int,
    positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kernel: str,
    layers: int | None = None,
) -> list[LayerMemory]:
    """An empty memory for each layer. kernel: a name of `attention_of`. layers: all if not
    given."""
    memories: list[LayerMemory] = []
    for number, spec in enumerate(config.layers[: layers or config.num_layers]):
        if spec.recurrent:
            memories.append(state_of(spec.recurrent, config.dim, rows, dtype, device))
            continue
        if spec.shared:
            from quantbench.kv_cache import shared

            source = memories[shared.source_of(config.layers, number)]
            memories.append(shared.SharedKVCache(cast("KVCache", source)))
            continue
        shape = rows, spec.kv_heads, positions, spec.head_dim
        taken = kernel if spec.head_dim <= attention.HEAD_DIM else "torch"
        memories.append(kind(*shape, dtype, device, spec.window, taken))
    return memories


def state_of(recurrent: Any, dim: int, *place: Any) -> LayerMemory:
    """The memory of a layer without attention, dim wide. place: rows, dtype and device."""
    from quantbench.kv_cache import state

    kind = state.DeltaState if recurrent.is_delta else state.Columns
    return kind(recurrent, dim, *place)


# ---------------------------------------------------------------------------------- compiling


def compile_options(device: torch.device) -> dict[str, Any]:
    """The `options` of torch.compile for a decoding step on `device`."""
    chosen = dict(devices.KINDS[device.type].compile_options)
    if device.type != "cpu":
        return chosen
    from quantbench.ops.cpu import build, compiling

    # No worker processes for Triton kernels: they would take the cores from the C++ compiler.
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    chosen |= compiling.options_of_inductor()
    # For each instruction set of the CPU, inductor compiles a file to see whether the compiler
    # supports it: 8 s on two cores. The compiler that built the C++ kernels supports them all.
    if platform.machine() == "x86_64" and build.refusal() is None:
        chosen["cpp.vec_isa_ok"] = True
    return chosen


_numbers = itertools.count()  # of the names below


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own, for torch.compile: by that it keeps what it
    compiled, eight times at most, and by its name which sizes varied from call to call."""
    name = f"{function.__name__}_{next(_numbers)}"
    code, closure = function.__code__.replace(co_name=name), function.__closure__
    copied = types.FunctionType(code, function.__globals__, name, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def compiled(
    function: Callable[..., Any], device: torch.device, length: bool = False, rows: bool = False
) -> Callable[..., Any]:
    """The function (model, tokens (B, S), positions, …), compiled as one graph. What is compiled
    serves every other S (length), or every other B above 1 (rows); B = 1 has code of its own."""
    # CUDA graphs have one length, prompts many.
    options = {} if length and device.type != "cpu" else compile_options(device)
    graph = torch.compile(with_own_code(function), fullgraph=True, options=options)

    def call(model: object, tokens: Tensor, positions: Tensor, *rest: Any) -> Any:
        if length:
            torch._dynamo.maybe_mark_dynamic(tokens, 1)
            torch._dynamo.maybe_mark_dynamic(positions, 0)
        if rows and tokens.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tokens, 0)
        return graph(model, tokens, positions, *rest)

    return call if length or rows else graph
