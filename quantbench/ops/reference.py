"""Every kernel in plain torch: slow and readable, and the oracle in the tests of the fast ones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.ops.formats import Packed, dequantize
from quantbench.ops.kv import USUAL, Scoring, StoredCache
from quantbench.ops.kv import dequantize as dequantize_kv


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x (…, K) times a packed (N, K) weight, transposed: (…, N) float32, summed in float32.

    It is an opaque op, which inductor does not compile: for one row inductor would compile for
    minutes and give a sum over weights that are unpacked one by one, thirty times slower.
    """
    scales = weight.scale, weight.zero, weight.tensor_scale, weight.outer
    coding = weight.format, weight.bits, weight.group_size
    return torch.ops.quantbench.reference_linear(x, weight.planes, *scales, *coding)


torch.library.define(
    "quantbench::reference_linear",
    "(Tensor x, Tensor[] planes, Tensor scale, Tensor? zero, Tensor? tensor_scale, "
    "Tensor? outer, str format, int bits, int group_size) -> Tensor",
)


@torch.library.impl("quantbench::reference_linear", "default")
def _reference_linear(x, planes, scale, zero, tensor_scale, outer, format, bits, group_size):
    packed = Packed(planes, scale, zero, tensor_scale, format, bits, group_size, outer)
    return F.linear(x.float(), dequantize(packed))


@torch.library.register_fake("quantbench::reference_linear")
def _(x, planes, scale, zero, tensor_scale, outer, format, bits, group_size):
    return x.new_empty((*x.shape[:-1], planes[0].shape[0]), dtype=torch.float32)


def attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, scoring: Scoring = USUAL
) -> Tensor:
    """Causal grouped-query attention: each query sees the keys at its own position and before.

    query is (B, H, S, D); key and value are (B, K, S, D) with H a multiple of K, query head h
    reading key head h // (H // K). With a `window` a query sees only the last `window` positions,
    its own included. Returns (B, H, S, D) in query's dtype.

    The G = H // K query heads that share a key head are folded into the sequence dimension, so
    key and value are read as they lie and never repeated.
    """
    B, H, S, D = query.shape
    K = key.shape[1]
    plain = scoring.softcap is None and scoring.sinks is None
    if H == K and plain and (window or S) >= S:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scale
        )
    folded = query.reshape(B, K, H // K * S, D)
    at = torch.arange(S, device=query.device)
    mask = visible(at, at, window).repeat(H // K, 1)
    if plain:
        output = F.scaled_dot_product_attention(folded, key, value, mask, scale=scoring.scale)
    else:
        parts = with_denominator(folded, key, value.float(), mask, scoring)
        output = with_sinks(*parts, folded_sinks(scoring.sinks, K, S)).to(query.dtype)
    return output.view(B, H, S, D)


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """(S, T): whether a query at one of the positions (S,) sees a key at one of (T,)."""
    mask = key_positions <= query_positions[:, None]
    if window is not None:
        mask &= key_positions > query_positions[:, None] - window
    return mask


def with_denominator(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention of query (…, S, D) over key and value (…, T, D), where a mask (S, T) allows it, in
    value's dtype; and the logarithm of its softmax's denominator (…, S), both without sinks.

    Scores are float32. In 16 bits they could overflow, and the rounding error of a large score
    would change its weight noticeably.
    """
    scale, softcap, _ = scoring
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.float() * factor) @ key.float().mT
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf)
    denominator = scores.logsumexp(-1)
    weights = (scores - denominator[..., None]).exp()
    weights = weights.masked_fill_(denominator.isneginf()[..., None], 0)  # that see no key
    return weights.to(value.dtype) @ value, denominator


def folded_sinks(sinks: Tensor | None, K: int, S: int) -> Tensor | None:
    """Sinks (H,) for the queries of S positions, folded into their key heads: (K, H / K * S)."""
    return None if sinks is None else sinks.view(K, -1).repeat_interleave(S, 1)


def with_sinks(output: Tensor, denominator: Tensor, sinks: Tensor | None) -> Tensor:
    """An attention's output (…, D), to which sinks of its queries are added; denominator (…): the
    logarithm of its softmax's."""
    if sinks is None:
        return output
    return output * (denominator - sinks).sigmoid()[..., None]


def decode_attention(
    query: Tensor,
    key: StoredCache,
    value: StoredCache,
    first: Tensor,
    count: Tensor,
    scoring: Scoring = USUAL,
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
    folded = query.float().view(B, K, H // K, D)
    mask = ((slots - first[:, None]) % T < count[:, None])[:, None, None]  # (B, 1, 1, T)
    if scoring.softcap is None and scoring.sinks is None:
        y = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scoring.scale)
    else:
        parts = with_denominator(folded, keys, values, mask, scoring)
        y = with_sinks(*parts, folded_sinks(scoring.sinks, K, 1))
    return y.reshape(B, H, D).to(query.dtype)
