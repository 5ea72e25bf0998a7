"""A model's description and weights as a GGUF file has them, which llama.cpp reads
(github.com/ggml-org/ggml, docs/gguf.md).

Llama models and Mixtrals are written as architecture "llama", Qwen3-MoE as "qwen3moe".
"""

import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantbench.models.config import ModelConfig
from quantbench.models.formats.names import hugging_face
from quantbench.models.llama import scaled
from quantbench.ops.formats import Packed
from quantbench.ops.packing import unpack

ELEMENTS_AT_ONCE = 1 << 17  # of a matrix: its float32 copies stay in the second-level cache
ROUTER, STACKED = "ffn_gate_inp", "_exps"  # in names of tensors
UNSUPPORTED = ("sliding_window", "qkv_bias", "attention_out_bias", "mlp_bias", "joint_qk_norm")


def not_written(architecture: ModelConfig) -> str | None:
    """A property of the model that the files' architectures lack, or None."""
    experts = architecture.mixture
    if architecture.architecture not in ("llama", "mixtral"):
        return f"architecture {architecture.architecture}"
    if part := architecture.beyond_llama():
        return part
    without_experts = () if experts else ("qk_norm",)
    in_qwen = ("rope_scaling",) if architecture.qk_norm else ()
    for name in UNSUPPORTED + without_experts + in_qwen:
        if getattr(architecture, name):
            return name
    if experts and (experts.shared_dim or experts.dense_layers or not experts.normalized):
        return "other experts than Mixtral"
    return None


def llama_cpp(architecture: ModelConfig) -> str:
    """llama.cpp's name of the architecture."""
    return "qwen3moe" if architecture.qk_norm else "llama"


def describe(writer: gguf.GGUFWriter, architecture: ModelConfig) -> None:
    """Everything but the tokenizer."""
    writer.add_name(architecture.name)
    writer.add_context_length(architecture.max_position)
    writer.add_embedding_length(architecture.dim)
    writer.add_block_count(architecture.num_layers)
    experts = architecture.mixture
    writer.add_feed_forward_length(experts.expert_dim if experts else architecture.ffn_dim)
    if experts:
        writer.add_expert_count(experts.num_experts)
        writer.add_expert_used_count(experts.experts_per_token)
        if architecture.qk_norm:  # Mixtral's files do without
            writer.add_expert_feed_forward_length(experts.expert_dim)
    writer.add_head_count(architecture.num_heads)
    writer.add_head_count_kv(architecture.num_kv_heads)
    writer.add_key_length(architecture.head_dim)
    writer.add_value_length(architecture.head_dim)
    writer.add_layer_norm_rms_eps(architecture.norm_eps)
    writer.add_rope_dimension_count(architecture.head_dim)
    writer.add_rope_freq_base(architecture.rope_theta)
    writer.add_vocab_size(architecture.vocab_size)


def rope_factors(architecture: ModelConfig) -> NDArray[np.float32] | None:
    """Divisors of each rotation's frequency, (E/2,) float32; None where no frequency is scaled."""
    if architecture.rope_scaling is None:
        return None
    exponents = torch.arange(0, architecture.head_dim, 2) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    return (frequencies / scaled(frequencies, architecture.rope_scaling)).numpy()


# ---------------------------------------------------------------------------------------- tensors


def as_hugging_face(name: str, weight: Any, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """A module's weight under Hugging Face's names; fused projections are taken apart."""
    parts = hugging_face(f"{name}.weight")
    rows = weight.shape[0] // len(parts)
    kv_rows = config.num_kv_heads * config.head_dim
    sizes = [weight.shape[0] - 2 * kv_rows, kv_rows, kv_rows] if len(parts) == 3 else rows
    pieces: Any = weight.split(sizes)
    return zip(parts, pieces, strict=True)


class Tensors:
    """The file's tensors, from the model's modules in order. Weights may be quantized."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH.QWEN3MOE if config.qk_norm else gguf.MODEL_ARCH.LLAMA,
            config.num_layers,
        )
        self.experts: dict[str, list[Tensor]] = {}  # of a layer, by the tensor that they make

    def of(self, name: str, module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
        """The tensors that this module completes: one matrix or norm, or a layer's experts."""
        if name == "output" and self.config.tie_embeddings and type(module.weight.data) is Tensor:
            return
        for part, tensor in as_hugging_face(name, module.weight, self.config):
            merged = re.sub(r"\.experts\.\d+", ".experts", part)
            key = self.names.get_name(merged, try_suffixes=(".weight",))
            if key is None:
                raise ValueError(f"the gguf package has no name for {part}")
            if self.config.mixture and STACKED in key:
                stack = self.experts.setdefault(key, [])
                stack.append(tensor)
                if len(stack) == self.config.mixture.num_experts:
                    yield key, self.experts.pop(key)
            elif llama_cpp(self.config) == "llama" and re.search(r"\.attn_[qk]\.", key):
                yield key, [tensor.index_select(0, _neighbours(tensor, self.config.head_dim))]
            else:
                yield key, [tensor]


def _neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """The order of rows in which rotary pairs (i, i + E/2) are (2i, 2i + 1): in the architecture
    "llama" llama.cpp rotates neighbours."""
    rows = torch.arange(weight.shape[0], device=weight.device)
    return rows.reshape(-1, 2, head_dim // 2).transpose(1, 2).flatten()


# ----------------------------------------------------------------------------------------- formats


def float_type(name: str, tensor: Tensor, type: str) -> gguf.GGMLQuantizationType:
    """`type`, but for norms and routers."""
    return gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 or ROUTER in name else type]


def encoded(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """A tensor (…, K) of floats in the file's bytes, (rows, bytes of a row)."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    some = torch.split(rows, max(1, ELEMENTS_AT_ONCE // rows.shape[1]))
    quantize = q6_k if kind.name == "Q6_K" else lambda x: gguf.quants.quantize(x, kind)
    return np.concatenate([quantize(part.float().numpy()) for part in some])


def blocks(weight: Packed) -> tuple[Tensor, gguf.GGMLQuantizationType]:
    """A symmetric weight (N, K) of 4 or 8 bits in groups of 32 as Q4_0 or Q8_0, with its own
    numbers: uint8 (N, bytes of a row).

    Raises ValueError where float16 does not hold a scale.
    """
    if weight.bits == 8:
        codes = weight.planes[0].view(torch.uint8).unflatten(-1, (-1, 32))
        used, kind = codes.any(-1), gguf.GGMLQuantizationType.Q8_0
    else:
        unpacked = unpack(weight.planes, 4).unflatten(-1, (-1, 2, 16))
        codes, used = unpacked[..., 0, :] | unpacked[..., 1, :] << 4, (unpacked != 8).any((-1, -2))
        kind = gguf.GGMLQuantizationType.Q4_0
    scale = weight.scale.half()
    if (used & (scale.float() != weight.scale.float())).any():
        raise ValueError("float16 does not hold its scales")
    return torch.cat((scale[..., None].view(torch.uint8), codes), -1).flatten(1), kind


def q6_k(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """float32 (N, K), K a multiple of 256, as Q6_K: bytes (N, K / 256 · 210). The gguf package
    reads this format, and does not write it.

    256 weights lie together: the lower four bits of each, the upper two, an int8 scale for every
    16, and a float16 by which these are multiplied. The weight of a group that is farthest from 0
    becomes -32, so that its neighbours' range is used whole.
    """
    groups = rows.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
    wanted = largest / -32
    d = (np.abs(wanted).max(-1, keepdims=True) / 127).astype(np.float16)
    step = d.astype(np.float32)
    scales = np.round(np.divide(wanted, step, out=np.zeros_like(wanted), where=step != 0))
    scales = scales.clip(-128, 127)
    step = (step * scales)[..., None]
    codes = np.round(np.divide(groups, step, out=np.zeros_like(groups), where=step != 0))
    codes = (codes.clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lower = low[:, :, :2] | low[:, :, 2:] << 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (lower, upper, scales.astype(np.int8).view(np.uint8), d.view(np.uint8))
    blocks = np.concatenate([part.reshape(len(groups), -1) for part in parts], axis=1)
    return blocks.reshape(len(rows), -1)
