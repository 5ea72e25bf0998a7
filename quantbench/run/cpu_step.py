"""Decoder cpu-step: a whole step, embeddings to logits, in one C++ op (ops/cpu/step.py).

The op implements models/llama.py, gemma.py and mixtral.py a second time. So it refuses a model with
any part that it does not know (`why_not_fused`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantbench.kv_cache import CACHES
from quantbench.kv_cache.base import KVCache, LayerMemory
from quantbench.models.config import ModelConfig
from quantbench.models.gemma import OffsetNorm, gelu
from quantbench.models.llama import (
    Attention,
    Block,
    FeedForward,
    JointNorm,
    Transformer,
    frequencies,
    rotation_factors,
)
from quantbench.models.registry import FUSED
from quantbench.ops.cpu import build, step
from quantbench.ops.kv import WRITTEN_BY_STEPS
from quantbench.quantize.activation import RoundedAcross
from quantbench.quantize.cpu import PackedLinear
from quantbench.quantize.kernel import fused_weight

if TYPE_CHECKING:
    from quantbench.experts.fused import Fused
    from quantbench.experts.layer import TieredLayer
    from quantbench.models.mixtral import MixtureOfExperts

# The fields of ModelConfig that the C++ op implements. It refuses a model in which any other field
# differs from its default.
UNDERSTOOD = {
    *("name", "architecture", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("ffn_dim", "vocab_size", "max_position", "norm_eps", "rope_theta", "rope_scaling"),
    *("sliding_window", "tie_embeddings", "qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm"),
    *("joint_qk_norm", "mixture", "rotary_dim", "full_layers", "window_rope_theta"),
    *("attention_scale", "attention_softcap", "logit_softcap", "pre_norms", "post_norms"),
    *("no_rope_layers", "squared_relu", "embedding_multiplier", "residual_multiplier"),
    "logits_divisor",
}
GATES = (F.silu, gelu, None)  # in the order of `Gate` in step/rows.h; None: no gate, relu(x)²


class CpuStep:
    """A decoding step, embeddings to logits, in one op. `model` must not be refused."""

    name = "cpu-step"
    reason: str | None = None

    def __init__(self, model: Transformer, caches: list[KVCache]) -> None:
        layers = cast("list[Block]", list(model.layers))
        self.model, experts = model, _tiered(model)
        # What brings experts into fast memory while a step runs; None: all of them stay there.
        self.moving = experts.store.fused if experts else None
        self.wraps = any(cache.wraps for cache in caches)
        rotations, tables = rotations_of(model)
        split, config = model.split, model.config
        self.op = step.Step(
            # Tables of experts hold addresses of weights, which `model` keeps valid; where experts
            # are in two tiers, `moving` does.
            parts=[part for layer in layers for part in parts_of(layer, self.moving)],
            caches=[buffer for cache in caches for buffer in cache.buffers()],
            format=caches[0].format,
            hows=torch.tensor([*map(_settings, layers, caches, tables)], dtype=torch.float64),
            rotations=rotations,
            norm=cast("Tensor", _norm(model.norm)),
            output=_linear(model.output),
            vocabularies=split.widths("output") if split else [model.output.out_features],
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            width=config.ffn_dim,
            epsilon=config.norm_eps,
            ranks=split.ranks.memory if split else 0,
        )

    def takes(self, tokens: Tensor) -> bool:
        several = tokens.shape[1] > 1  # of a row: a sliding window's cache would wrap
        return tokens.numel() <= step.MAX_FUSED_ROWS and not (several and self.wraps)

    def step(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits (B, V) after tokens (B, 1) at `position`, (B,) or (1,) int64; (B, S, V) after
        S > 1 tokens of each row, the first at `position`. B · S is MAX_FUSED_ROWS at most."""
        rows, count = tokens.shape
        positions = position
        if count > 1:
            positions = (position[:, None] + torch.arange(count)).expand(rows, count).flatten()
        with self.moving.stepping() if self.moving else nullcontext():
            logits = self.op(self.model.embed(tokens).flatten(0, 1), positions, rows)
        logits = self.model.bounded(logits)
        return logits if count == 1 else logits.view(rows, count, -1)


# ---------------------------------------------------------------------------------- what refuses


def why_not_fused(model: Transformer, caches: Sequence[LayerMemory], rows: int) -> str | None:
    """The first reason why the step cannot be one op (cpu-step), or None if it can."""
    return next(_reasons(model, caches, rows), None)


def _reasons(model: Transformer, caches: Sequence[LayerMemory], rows: int) -> Iterator[str]:
    """Each reason holds for a model that all before it have not refused."""
    split = getattr(model, "split", None)
    if split is not None and not split.ranks.memory:
        yield "the ranks share no memory, and the op sums through it"
    device = model.tok_embeddings.weight.device.type
    if device not in ("cpu", "meta"):  # meta: shapes of weights on the CPU
        yield f"the model is on {device}, and the op is C++ for the CPU"
    # On the meta device a run is only planned, and nothing is built.
    if reason := build.refusal() if device == "cpu" else build.unavailable():
        yield reason
    if _class_of(model) not in FUSED:
        yield f"the model is a {type(model).__name__}, and the op computes a Transformer"
    if rows > step.MAX_FUSED_ROWS:
        yield f"there are {rows} rows, and the op is for {step.MAX_FUSED_ROWS} at most"
    yield from _unknown_fields(model.config)
    for number, layer in enumerate(model.layers):
        for reason in _unknown_parts(layer, model.config.norm_eps):
            yield f"layers.{number}{reason}"
    if reason := _not_this_norm(model.norm, model.config.norm_eps):
        yield f"norm{reason}"
    if fused_weight(model.output) is None:
        yield f"output{_not_in_cpp(model.output)}"
    for cache in cast("Sequence[KVCache]", caches):  # of a Transformer, which has no other memory
        if cache.kernel != "cpu":
            yield f"attention over the KV cache runs on {cache.kernel}, not on the C++ kernel"
        # A contributed class may encode differently, whatever the format in which it is read.
        known = cache.format in WRITTEN_BY_STEPS and type(cache) is CACHES.get(cache.format)
        if not known or cache.format != caches[0].format:
            yield f"the KV cache is a {type(cache).__name__}, which the op cannot write"


def _unknown_fields(config: ModelConfig) -> Iterator[str]:
    for field in dataclasses.fields(config):
        if field.name not in UNDERSTOOD and getattr(config, field.name) != field.default:
            yield f"the op does not know what {field.name} means, which the model has"
    scaling = config.rope_scaling
    if scaling is not None and not scaling.is_table:
        yield f"the op does not know the model's rotary scaling, {scaling.kind}"


def _unknown_parts(layer: nn.Module, epsilon: float) -> Iterator[str]:
    """The parts of a layer that are not as in models/llama.py: their names, and what they are."""
    if type(layer) is not Block:
        yield f" is a {type(layer).__name__}, no Block"
        return
    if type(layer.attention) is not Attention:
        yield f".attention is a {type(layer.attention).__name__}, no Attention"
    ffn: nn.Module = layer.feed_forward
    if _is_mixture(ffn):
        for unknown in _unknown_experts(ffn):
            yield f".feed_forward{unknown}"
    elif type(ffn) is not FeedForward:
        yield f".feed_forward is a {type(ffn).__name__}, no FeedForward"
    elif _activation(ffn) not in GATES:
        name = getattr(ffn.activation, "__name__", ffn.activation)
        yield f".feed_forward goes through {name}, which the op does not know"
    for name, norm in layer.named_modules():
        absent = not name.endswith("norm") or type(norm) is nn.Identity
        joint = isinstance(norm, JointNorm) and norm.ranks.size == 1 and norm.epsilon == epsilon
        if not absent and not joint and (reason := _not_this_norm(norm, epsilon)):
            yield f".{name}{reason}"
    networks = [f"feed_forward.experts.{i}" for i in range(len(getattr(ffn, "experts", ())))]
    networks += ["feed_forward.shared"] if hasattr(ffn, "shared") else []
    networks = networks or ["feed_forward"]
    matrices = [f"{network}.{name}" for network in networks for name in ("w13", "w2")]
    for name in ("attention.wqkv", "attention.wo", *matrices):
        linear = layer.get_submodule(name)
        if fused_weight(linear) is None:
            yield f".{name}{_not_in_cpp(linear)}"


def _unknown_experts(mixture: "MixtureOfExperts") -> Iterator[str]:
    if {_activation(cast("FeedForward", expert)) for expert in mixture.experts} != {F.silu}:
        yield ".experts have another gate than SiLU, which the op does not know"
    if mixture.router.bias is not None:
        yield ".router has a bias, and the op adds none"
    for matrix in ("w13", "w2"):
        layers = [expert.get_submodule(matrix) for expert in mixture.experts]
        shared = [mixture.shared.get_submodule(matrix)] if hasattr(mixture, "shared") else []
        if any(getattr(layer, "bias", None) is not None for layer in (*layers, *shared)):
            yield ".experts have biases, and the op adds none"
        weights = [fused_weight(layer) for layer in layers]
        if len({(w.dtype, w.numel()) for w in weights if w is not None}) > 1:
            yield ".experts are stored in different ways, and the op reads one"


def _not_this_norm(norm: nn.Module, epsilon: float) -> str | None:
    if isinstance(norm, JointNorm):
        return " is of the heads of all ranks, which the op does not sum"
    if type(norm) not in (nn.RMSNorm, OffsetNorm):
        return f" is a {type(norm).__name__}, no RMSNorm"
    return f" adds {norm.eps}, and the others {epsilon}" if norm.eps != epsilon else None


def _not_in_cpp(linear: nn.Module) -> str:
    if isinstance(linear, PackedLinear) and linear.rounds_before:
        return f" rounds activations to {linear.rounds_before} outside of its C++ kernel"
    if isinstance(linear, RoundedAcross):
        return (
            f" rounds activations ({linear.rounding}) by the columns of all ranks, which the op "
            "does not"
        )
    return f" is a {type(linear).__name__}, which has no C++ kernel"


def _class_of(model: Transformer) -> str:
    """The model's own class, shared among ranks or not, as models/registry.py names it."""
    kind: type[nn.Module] = type(model)
    if getattr(model, "split", None) is not None:
        from quantbench.models.split import kind_of

        kind = kind_of(model)
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_mixture(network: nn.Module) -> "TypeGuard[MixtureOfExperts]":
    if not hasattr(network, "experts"):
        return False
    from quantbench.models.mixtral import MixtureOfExperts

    return isinstance(network, MixtureOfExperts)


def _tiered(model: Transformer) -> "TieredLayer | None":
    """What computes experts that are in two tiers of memory; None if all are in one."""
    if model.config.mixture is None:
        return None
    from quantbench.models.mixtral import elsewhere_of

    return cast("TieredLayer | None", elsewhere_of(model))


# ---------------------------------------------------------------------------------- its arguments


def parts_of(layer: Block, moving: "Fused | None") -> list[Tensor]:
    """A layer's tensors in the order of `Part` in step/step.h; an empty one for each that is
    missing. The layer must be one that the op does not refuse.

    moving: where the model's experts are in two tiers of memory.
    """
    attention, ffn = layer.attention, layer.feed_forward
    if _is_mixture(ffn):
        w13, w2 = _mixture(ffn, moving)
    else:
        w13, w2 = _linear(ffn.w13), _linear(ffn.w2)
    parts = (
        *(_norm(layer.attention_norm), *_linear(attention.wqkv)),
        *(_norm(attention.q_norm), _norm(attention.k_norm)),
        *(*_linear(attention.wo), _norm(layer.attention_post_norm)),
        *(_norm(layer.ffn_norm), *w13, *w2, _norm(layer.ffn_post_norm)),
    )
    return [torch.empty(0) if part is None else part for part in parts]


def _settings(layer: Block, cache: KVCache, rotation: int) -> step.LayerSettings:
    scale, softcap, _ = layer.attention.scoring
    scale = layer.attention.head_dim**-0.5 if scale is None else scale
    ffn: nn.Module = layer.feed_forward
    activation = F.silu if _is_mixture(ffn) else _activation(layer.feed_forward)
    gate = GATES.index(activation)
    return step.LayerSettings(
        cache.wraps, rotation, gate, scale, softcap or 0.0, layer.residual_multiplier
    )


def _activation(network: FeedForward) -> object:
    return network.activation if network.gated else None


def rotations_of(model: Transformer) -> tuple[Tensor, list[int]]:
    """The tables of `Step.rotations`, and which of them each layer rotates by."""
    layers, device = sorted(set(model.rotated_as)), model.tok_embeddings.weight.device
    tables = [
        torch.stack([part(model.config, device, i) for i in layers])
        for part in (frequencies, rotation_factors)
    ]
    return torch.stack(tables), [layers.index(i) for i in model.rotated_as]


def _mixture(
    mixture: "MixtureOfExperts", moving: "Fused | None"
) -> tuple[step.Linear, step.Linear]:
    """The router and the table of the experts, in the places of w13 and w2."""
    routing, layer, shared = mixture.router.mixture, mixture.elsewhere, hasattr(mixture, "shared")
    every = _networks(cast("list[FeedForward]", list(mixture.experts)))
    experts = step.Experts(
        mixture.router.weight,
        every,
        routing.experts_per_token,
        routing.normalized,
        _networks([mixture.shared] if shared else []),
        mixture.shared_gate.weight.flatten() if shared else None,
    )
    if moving and layer is not None:
        table = moving.table(cast("TieredLayer", layer), experts)
    else:
        table = experts.table()
    return step.Linear(experts.router, experts.shared_gate), step.Linear(table, None)


def _networks(networks: Sequence[FeedForward]) -> step.Networks:
    return step.Networks(
        [_linear(network.w13).weight for network in networks],
        [_linear(network.w2).weight for network in networks],
        networks[0].w2.in_features if networks else 0,
    )


def _norm(norm: nn.Module) -> Tensor | None:
    """What an RMS norm multiplies by, float32; None if there is no norm."""
    if isinstance(norm, nn.Identity):
        return None
    weight = norm.get_parameter("weight").data.float()
    return 1 + weight if isinstance(norm, OffsetNorm) else weight


def _linear(layer: nn.Linear) -> step.Linear:
    weight = fused_weight(layer)
    assert weight is not None
    return step.Linear(weight, layer.bias)
