"""Which kernel decode attention runs on: the fastest that the device has, chosen once.

    cpu        C++, built when first used (ops/cpu/attention.py)
    triton     on CUDA (ops/triton/attention.py)
    torch      plain torch over the filled slots; on an accelerator, or compiled, over all of them

All compute what ops.reference.decode_attention computes.
"""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from quantbench.ops import reference
from quantbench.ops.kv import READ_BY_KERNELS, USUAL, Scoring, StoredCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIM, GROUP = 256, 128  # largest head_dim, and most query heads for a key head, of our kernels


@dataclass(frozen=True)
class AttentionKernel:
    """The kernel of decode attention."""

    name: str  # cpu, triton or torch
    reason: str | None = None  # why it is torch; None if it is the device's own kernel


def choose(
    device: torch.device,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    format: str = "dense",
) -> AttentionKernel:
    """The fastest kernel for heads of `head_dim`, `group` query heads for each key head, in
    `dtype`, over a cache of that format.

    On the CPU the first call builds the kernel, which takes a minute.
    """
    if format not in READ_BY_KERNELS:
        return AttentionKernel("torch", f"no kernel reads keys and values stored as {format}")
    if head_dim % 8 or head_dim > HEAD_DIM:
        return AttentionKernel("torch", f"head_dim {head_dim} is no multiple of 8 up to {HEAD_DIM}")
    if group > GROUP or dtype not in DTYPES:
        return AttentionKernel("torch", f"{group} query heads for a key head in {dtype}")
    if device.type == "cpu":
        from quantbench.ops.cpu import build

        reason = build.refusal()
        return AttentionKernel("torch", reason) if reason else AttentionKernel("cpu")
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return AttentionKernel("torch", "Triton is not installed: pip install triton")
        return AttentionKernel("triton")
    return AttentionKernel("torch", f"plain torch is the only kernel for {device.type}")


def decode_attention(
    kernel: str,
    query: Tensor,
    key: StoredCache,
    value: StoredCache,
    first: Tensor,
    count: Tensor,
    scoring: Scoring = USUAL,
) -> Tensor:
    """ops.reference.decode_attention by the kernel of that name."""
    if kernel == "cpu":
        from quantbench.ops.cpu import attention

        arguments = query, key, value, first, count, scoring
        if scoring.sinks is None:
            return attention.decode_attention(*arguments)
        return reference.with_sinks(*attention.past_attention(*arguments), scoring.sinks).to(
            query.dtype
        )
    if kernel == "triton":
        from quantbench.ops.triton import attention as on_card

        return on_card.decode_attention(query, key, value, first, count, scoring)
    if query.device.type == "cpu" and not torch.compiler.is_compiling() and not first.any():
        filled = int(count.max())
        key, value = key.slots(0, filled), value.slots(0, filled)
    return reference.decode_attention(query, key, value, first, count, scoring)
