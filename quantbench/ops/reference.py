"""Every kernel in plain torch: slow and readable, and the oracle in the tests of the fast ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.ops.formats import Packed, dequantize
from quantbench.ops.kv import Stored
from quantbench.ops.kv import dequantize as dequantize_kv


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x (…, K) times a packed (N, K) weight, transposed: (…, N) float32, summed in float32.

    It is an opaque op, which inductor does not compile: for one row inductor would compile for
    minutes and give a sum over weights that are unpacked one by one, thirty times slower.
    """
    return torch.ops.quantbench.reference_linear(
        x,
        weight.planes,
        weight.scale,
        weight.zero,
        weight.tensor_scale,
        weight.format,
        weight.bits,
        weight.group_size,
    )


@torch.library.custom_op(
    "quantbench::reference_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] planes, Tensor scale, Tensor? zero, Tensor? tensor_scale, "
    "str format, int bits, int group_size) -> Tensor",
)
def _reference_linear(
    x: Tensor,
    planes: list[Tensor],
    scale: Tensor,
    zero: Tensor | None,
    tensor_scale: Tensor | None,
    format: str,
    bits: int,
    group_size: int,
) -> Tensor:
    packed = Packed(planes, scale, zero, tensor_scale, format, bits, group_size)
    return F.linear(x.float(), dequantize(packed))


@_reference_linear.register_fake
def _(x, planes, scale, zero, tensor_scale, format, bits, group_size):
    return x.new_empty((*x.shape[:-1], planes[0].shape[0]), dtype=torch.float32)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    window: int | None = None,
) -> Tensor:
    """Causal grouped-query attention: each query sees the keys at its own position and before.

    query is (B, H, S, D); key and value are (B, K, T, D) with H a multiple of K, query head h
    reading key head h // (H // K). Positions are (S,) and (T,) integers. With a `window` a query
    sees only the last `window` positions, its own included. Returns (B, H, S, D) in query's dtype.

    The G = H // K query heads that share a key head are folded into the sequence dimension, so
    key and value are read as they lie and never repeated.
    """
    B, H, S, D = query.shape
    K = key.shape[1]
    visible = key_positions <= query_positions[:, None]
    if window is not None:
        visible &= key_positions > query_positions[:, None] - window
    folded = query.reshape(B, K, H // K * S, D)
    output = F.scaled_dot_product_attention(folded, key, value, visible.repeat(H // K, 1))
    return output.view(B, H, S, D)


def decode_attention(
    query: Tensor, key: Stored, value: Stored, first: Tensor, count: Tensor
) -> Tensor:
    """Attention of one new token per row over the slots that its cache has filled.

    query (B, H, D), H a multiple of the cache's K heads, query head h reading head h // (H // K);
    first and count (B,) integers on the same device: row b sees the slots (first[b] + i) % T for
    i < count[b]. Returns (B, H, D) in query's dtype; sums and softmax are float32.
    """
    B, H, D = query.shape
    keys, values = dequantize_kv(key), dequantize_kv(value)
    K, T = keys.shape[1:3]
    slots = torch.arange(T, device=query.device)
    visible = (slots - first[:, None]) % T < count[:, None]  # (B, T)
    folded = query.float().view(B, K, H // K, D)
    y = F.scaled_dot_product_attention(folded, keys, values, visible[:, None, None])
    return y.reshape(B, H, D).to(query.dtype)
