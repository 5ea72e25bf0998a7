"""The order of rows in projections of queries, keys and values, where a checkpoint has another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantbench.models.config import ModelConfig
from quantbench.models.recurrent import Recurrent

# Qwen3-Next's projections, in its files and in llama.cpp's.
_BY_KEY_HEAD = ("in_proj_qkvz.weight", "ssm_in.weight", "in_proj_ba.weight", "ssm_ba.weight")


def row_order(
    name: str,
    pieces: Sequence[str],
    heads: Sequence[int],
    config: ModelConfig,
    interleaved: bool,
) -> Tensor | None:
    """Which row of a checkpoint's, stacked, each of ours is; None: the same. Behind each gated
    query head the checkpoint has its gate; ours are behind the values.

    pieces: what the checkpoint calls the parameter. heads: of queries (with their gates), keys and
    values. interleaved: whether rotary pairs are rows (2i, 2i + 1).
    """
    E, gated = config.head_dim, config.gated_attention
    of_head = torch.tensor(_half_split(E, config.rotary_dim or E, interleaved))
    if pieces[0].endswith(_BY_KEY_HEAD):
        return _by_key_head(config.recurrent, pieces[0].endswith(_BY_KEY_HEAD[:2]))
    if name.endswith(("q_norm.weight", "k_norm.weight")) and not config.joint_qk_norm:
        return of_head
    if ".wqkv." not in name:
        return None
    rotated = torch.arange(sum(heads[:2]))[:, None] * E
    if not gated:
        return (rotated + of_head).flatten()
    queries, gates = rotated[: heads[0] : 2], rotated[1 : heads[0] : 2]
    keys = rotated[heads[0] :]
    values = sum(heads[:2]) * E + torch.arange(heads[2] * E)
    parts = (queries + of_head, keys + of_head, values, gates + torch.arange(E))
    return torch.cat([part.flatten() for part in parts])


def _by_key_head(recurrent: Recurrent, whole: bool) -> Tensor:
    """Of Qwen3-Next's projections, which have all rows of a key head, and of its value heads, side
    by side: queries, keys, values and gates, or if not `whole` beta and decay."""
    shared = recurrent.value_heads // recurrent.key_heads
    keys, values = recurrent.key_width, shared * recurrent.value_width
    widths = (keys, keys, values, values) if whole else (shared, shared)
    rows = torch.arange(recurrent.key_heads * sum(widths)).view(recurrent.key_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(widths, 1)])


def _half_split(head_dim: int, rotary_dim: int, interleaved: bool) -> list[int]:
    """Which row of a head comes where, so that its pairs are (i, i + E/2): first those that rotate.

    Pairs of the R = rotary_dim rows that rotate are (2i, 2i + 1) if interleaved, or else
    (i, i + R/2); the others follow, paired anyhow.
    """
    rows, half = list(range(rotary_dim)), rotary_dim // 2
    first, second = (rows[::2], rows[1::2]) if interleaved else (rows[:half], rows[half:])
    middle = (rotary_dim + head_dim) // 2
    return [*first, *range(rotary_dim, middle), *second, *range(middle, head_dim)]
