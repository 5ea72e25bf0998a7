"""A model as a GGUF file, the form that llama.cpp reads (github.com/ggml-org/ggml, docs/gguf.md).

    write(Path("model.gguf"), "dummy:TinyLlama-1.1B-Chat-v1.0", "Q8_0")

Llama models and Mixtrals are written as architecture "llama", Qwen3-MoE as "qwen3moe". The weights
are those that generate.py loads from the same checkpoint. Every matrix has the one format, the
output and the embedding too, as every linear layer has in a scheme of ours; norms and routers stay
in float32. A layer's experts are three tensors, each of all experts' matrices one
behind the other. There is no vocabulary: tokens are given as ids.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantbench.errors import LogError, UsageError
from quantbench.models import build
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer, scaled
from quantbench.models.loading import load_config, load_model

FORMATS = ("BF16", "Q8_0", "Q6_K", "Q4_0")
ELEMENTS_AT_ONCE = 1 << 17  # of a matrix: its float32 copies stay in the second-level cache
ROUTER, STACKED = "ffn_gate_inp", "_exps"  # in names of tensors
Array = np.ndarray


def check(architecture: ModelConfig, format: str) -> None:
    """UsageError unless the model can be written in the format."""
    import gguf

    if format not in FORMATS:
        raise UsageError(f"{format!r} is no format; there are {', '.join(FORMATS)}")
    if strange := _not_written(architecture):
        raise UsageError(
            f"{architecture.name} has {strange}; only plain Llama models, Mixtrals and Qwen3-MoEs "
            "are compared"
        )
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[format]]
    widths = {columns for _, columns in architecture.linear_shapes().values()}
    if wrong := sorted(width for width in widths if width % block):
        raise UsageError(
            f"{format} takes rows of a multiple of {block}; {architecture.name} has {wrong[0]}"
        )


def _not_written(architecture: ModelConfig) -> str | None:
    """What a model has that the files' architectures have not, or None."""
    experts = architecture.mixture
    if architecture.architecture not in ("llama", "mixtral"):
        return f"architecture {architecture.architecture}"
    if part := architecture.beyond_llama():
        return part
    others = ["sliding_window", "qkv_bias", "attention_out_bias", "mlp_bias", "joint_qk_norm"]
    if not experts:
        others.append("qk_norm")
    if architecture.qk_norm:
        others.append("rope_scaling")  # its factors are of the architecture llama alone
    for name in others:
        if getattr(architecture, name):
            return name
    if experts and (experts.shared_dim or experts.dense_layers or not experts.normalized):
        return "other experts than Mixtral"
    return None


def _kind(architecture: ModelConfig) -> str:
    """llama.cpp's name of the architecture."""
    return "qwen3moe" if architecture.qk_norm else "llama"


def write(
    path: Path,
    checkpoint_path: str,
    format: str,
    num_layers: int | None = None,
) -> None:
    """Write the checkpoint there, tensor by tensor.

    Raises UsageError for a model or format that cannot be
    written, LogError where the file cannot be.
    """
    architecture = load_config(checkpoint_path)
    if num_layers:
        architecture = architecture.with_layers(num_layers)
    check(architecture, format)
    import gguf

    kind = gguf.GGMLQuantizationType[format]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(None, _kind(architecture))
    _describe(writer, architecture)
    with torch.device("meta"):
        model = build(architecture)
    for name, shape in _shapes(model, architecture):
        count = math.prod(shape)
        matrix = len(shape) > 1 and ROUTER not in name
        nbytes = count // block * size if matrix else count * 4
        full = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, kind if matrix else full)

    stacks = _Stacks(architecture)

    def put(name: str, module: Any) -> nn.Module:
        for piece, tensor in _pieces(name, module.weight, architecture):
            stored = np.asarray(tensor.float()) if ROUTER in piece else _stored(tensor, format)
            for _, parts in stacks.add(piece, stored):
                writer.write_tensor_data(np.concatenate(parts))
        return nn.Identity()  # its memory is free for the next one

    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors := _rope_factors(architecture):
            writer.write_tensor_data(factors[0].numpy())
        load_model(checkpoint_path, "cpu", torch.bfloat16, num_layers, put)
        writer.close()
    except OSError as error:
        raise LogError(f"cannot write {path}: {error.strerror}") from None


def weight_bytes(path: Path) -> int:
    """Bytes that a decoding step of one row reads of a file: all but the embedding's table, unless
    that is the output, too; of experts those that are chosen."""
    import gguf

    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    experts = sum(size for name, size in sizes.items() if STACKED in name)
    if not experts:
        return sum(sizes.values())
    kind = reader.fields["general.architecture"].contents()
    count, used = (
        int(reader.fields[f"{kind}.{key}"].parts[-1][0])
        for key in ("expert_count", "expert_used_count")
    )
    return sum(sizes.values()) - experts + experts * used // count


def _describe(writer: Any, architecture: ModelConfig) -> None:
    writer.add_name(architecture.name)
    writer.add_context_length(architecture.max_position)
    writer.add_embedding_length(architecture.dim)
    writer.add_block_count(architecture.num_layers)
    experts = architecture.mixture
    writer.add_feed_forward_length(experts.expert_dim if experts else architecture.ffn_dim)
    if experts:
        writer.add_expert_count(experts.num_experts)
        writer.add_expert_used_count(experts.experts_per_token)
        writer.add_expert_feed_forward_length(experts.expert_dim)
    writer.add_head_count(architecture.num_heads)
    writer.add_head_count_kv(architecture.num_kv_heads)
    writer.add_key_length(architecture.head_dim)
    writer.add_value_length(architecture.head_dim)
    writer.add_layer_norm_rms_eps(architecture.norm_eps)
    writer.add_rope_dimension_count(architecture.head_dim)
    writer.add_rope_freq_base(architecture.rope_theta)
    writer.add_vocab_size(architecture.vocab_size)
    writer.add_tokenizer_model("none")


# ---------------------------------------------------------------------------------------- tensors


def _shapes(model: Transformer, architecture: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the file, in the order in which a model is loaded."""
    if factors := _rope_factors(architecture):
        yield "rope_freqs.weight", tuple(factors[0].shape)
    stacks = _Stacks(architecture)
    for name, module in model.named_modules():
        if module._parameters:
            weight: Any = module.weight
            for piece, tensor in _pieces(name, weight, architecture):
                for whole, shapes in stacks.add(piece, tuple(tensor.shape)):
                    yield whole, (len(shapes), *shapes[0]) if STACKED in whole else shapes[0]


class _Stacks:
    """Collects what belongs to a layer's experts until there is one piece of each expert."""

    def __init__(self, architecture: ModelConfig) -> None:
        self.experts = architecture.mixture.num_experts if architecture.mixture else 0
        self.held: dict[str, list[Any]] = {}

    def add(self, name: str, value: Any) -> list[tuple[str, list[Any]]]:
        """The tensors that are complete now: names, and a value for each expert, or one."""
        if STACKED not in name:
            return [(name, [value])]
        self.held.setdefault(name, []).append(value)
        if len(self.held) < 3 or any(len(v) < self.experts for v in self.held.values()):
            return []
        complete, self.held = list(self.held.items()), {}
        return complete


def _pieces(name: str, weight: Any, architecture: ModelConfig) -> list[tuple[str, Tensor]]:
    """What our parameter is called there, taken apart where we keep several in one."""
    top = {"tok_embeddings": "token_embd", "norm": "output_norm", "output": "output"}
    if name in top:
        tied = name == "output" and architecture.tie_embeddings
        return [] if tied else [(f"{top[name]}.weight", weight)]
    _, number, part = name.split(".", 2)
    E, H, K = architecture.head_dim, architecture.num_heads, architecture.num_kv_heads
    if part == "attention.wqkv":
        query, key, value = weight.split((H * E, K * E, K * E))
        if _kind(architecture) == "llama":
            query, key = _neighbours(query, E), _neighbours(key, E)
        named = {"attn_q": query, "attn_k": key, "attn_v": value}
    elif part.startswith("feed_forward.experts."):
        gate, *up = weight.chunk(2) if part.endswith("w13") else (weight,)
        names = ("ffn_gate", "ffn_up") if up else ("ffn_down",)
        named = {f"{n}{STACKED}": x for n, x in zip(names, (gate, *up), strict=True)}
    elif part == "feed_forward.w13":
        gate, up = weight.chunk(2)
        named = {"ffn_gate": gate, "ffn_up": up}
    else:
        others = {
            "attention_norm": "attn_norm",
            "attention.q_norm": "attn_q_norm",
            "attention.k_norm": "attn_k_norm",
            "attention.wo": "attn_output",
            "ffn_norm": "ffn_norm",
            "feed_forward.w2": "ffn_down",
            "feed_forward.router": ROUTER,
        }
        named = {others[part]: weight}
    return [(f"blk.{number}.{piece}.weight", tensor) for piece, tensor in named.items()]


def _neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Rows whose rotary pairs are (i, i + E/2), reordered to (2i, 2i + 1): in the architecture
    "llama" llama.cpp rotates neighbours."""
    pairs = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _rope_factors(architecture: ModelConfig) -> list[Tensor]:
    """What llama.cpp divides each rotation's frequency by, (E/2,) float32, where any is scaled."""
    if architecture.rope_scaling is None:
        return []
    exponents = torch.arange(0, architecture.head_dim, 2) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    return [frequencies / scaled(frequencies, architecture.rope_scaling)]


# ----------------------------------------------------------------------------------------- formats


def _stored(tensor: Any, format: str) -> Array:
    """The bytes of a matrix in the format; of a vector, float32."""
    if tensor.dim() == 1:
        return np.asarray(tensor.float())
    if format == "BF16":
        return np.asarray(tensor.contiguous().view(torch.int16))
    import gguf

    parts = []
    for rows in tensor.split(max(1, ELEMENTS_AT_ONCE // tensor.shape[1])):
        numbers = rows.float().numpy()
        if format == "Q6_K":  # which the package reads, and does not write
            parts.append(q6_k(numbers))
        else:
            parts.append(gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[format]))
    return np.concatenate(parts)


def q6_k(rows: Array) -> Array:
    """float32 (N, K), K a multiple of 256, as Q6_K: bytes (N, K / 256 · 210).

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
