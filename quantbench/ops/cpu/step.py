"""A decoding step of a Llama in one C++ op, embeddings to logits.

Norms, biases, rotation, gates and sums stand between the matrix products of the same op. As 110
small ops, a step with 4-bit weights spends a fifth of its time between them.

The op computes what models/llama.py, gemma.py and mixtral.py compute, and rounds to x's dtype where
their modules round. B rows, D model width, E head width, V vocabulary. Ranks that share memory
exchange numbers in the op.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quantbench.ops.cpu import build

MAX_FUSED_ROWS = 16  # above this, products take nearly all of the time and fusing gains nothing

torch.library.define("quantbench::cpu_keep", "(Tensor[] parts, Tensor(a!)[] caches) -> int")
torch.library.define(
    "quantbench::cpu_decode",
    "(Tensor x, int kept, Tensor hows, str format, Tensor rotations, Tensor positions, "
    "int sequences, float epsilon, int heads, int kv_heads, int width, Tensor norm, Tensor output, "
    "Tensor? output_bias, int ranks, int[] vocabularies) -> Tensor",
)


@torch.library.register_fake("quantbench::cpu_decode")
def _(x, kept, hows, format, rotations, positions, sequences, epsilon, heads, kv_heads, width,
      norm, output, output_bias, ranks, vocabularies):  # fmt: skip
    return x.new_empty((x.shape[0], sum(vocabularies)))


class Linear(NamedTuple):
    weight: Tensor  # unquantized (N, K), or packed by ops.cpu.linear.pack
    bias: Tensor | None  # (N,)


@dataclass(frozen=True)
class Networks:
    """Feed-forward networks of one width."""

    w13: Sequence[Tensor]  # of each network, all plain (2 · width, D) or all packed alike
    w2: Sequence[Tensor]  # of each network, all plain (D, width) or all packed alike
    width: int  # 0 if there are no networks

    def head(self) -> list[int]:
        """The width, then the bytes of each network's packed w13 and w2; 0 for plain ones."""
        stored = [w[0] if w else torch.empty(0) for w in (self.w13, self.w2)]
        return [self.width, *(w.numel() if w.dtype == torch.uint8 else 0 for w in stored)]

    def places(self) -> list[int]:
        """The addresses of each network's w13 and w2."""
        return [w.data_ptr() for pair in zip(self.w13, self.w2, strict=True) for w in pair]


@dataclass(frozen=True)
class Experts:
    """A layer's mixture of experts, each with two matrices like a feed-forward network's."""

    router: Tensor  # (X, D), in the activations' dtype
    networks: Networks  # X of them; of experts that come and go, one that is like all of them
    chosen: int  # experts of a token
    normalized: bool  # whether their weights add up to 1
    shared: Networks  # the one that all tokens go through, or none
    shared_gate: Tensor | None  # (D,): its sigmoid says how much a token takes from that one
    # Of experts that come and go between two tiers of memory (experts/fused.py): the addresses of
    # `Turn` in step/experts.h, of all layers together, and of when each expert was last used, by
    # the turn's clock, both int64; and the number by which `Turn::ask` knows the layer.
    moving: tuple[int, int, int] | None = None  # None: all experts stay where they are

    def table(self) -> Tensor:
        """Where the experts' matrices lie, as step/experts.h reads it: int64. It is valid as long
        as these matrices are. Where experts come and go, none of them is there yet."""
        head = [self.chosen, int(self.normalized), *self.networks.head(), *self.shared.head()]
        places = [0] * (2 * len(self.router)) if self.moving else self.networks.places()
        moving = self.moving or (0, 0, 0)
        return torch.tensor([*head, *moving, *places, *self.shared.places()])


# Numbers before an expert's addresses in `Experts.table`.
TABLE_HEAD = 11


class LayerSettings(NamedTuple):
    """What differs between layers beyond their weights, as `How` of step/step.h reads it."""

    wraps: bool  # whether a full cache overwrites its oldest slot, for a sliding window
    rotation: int  # which of the tables of `rotations`
    gate: int  # `Gate` of step/rows.h: silu, gelu (tanh), or relu² without a gate
    scale: float  # of attention scores
    softcap: float = 0.0  # scores become softcap · tanh(score / softcap); 0: they do not
    residual: float = 1.0  # what attention and feed-forward network return is multiplied by it


@dataclass(eq=False)
class Step:
    """All but tokens and positions. Parts and caches are handed to the op once.

    Where several ranks share the model, sizes are this rank's.
    """

    parts: Sequence[Tensor]  # of all layers, in the order of `Part` in step/step.h; empty: none
    # The KV caches of all layers, where a step stores the new keys and values: for each layer those
    # of the keys, then those of the values: codes, and the scale if the format has one, each (B or
    # more, kv_heads, T, …).
    caches: Sequence[Tensor]
    format: str  # of the caches: one of ops.kv.WRITTEN_BY_STEPS
    hows: Tensor  # the numbers of each layer's `How`, float64
    # (2, tables, E / 2), float32: in each table radians per position of each of a head's pairs, and
    # what their cosines and sines are multiplied by.
    rotations: Tensor
    norm: Tensor  # what the final norm multiplies by, float32
    output: Linear
    vocabularies: Sequence[int]  # how many tokens each rank has in its output; V is their sum
    heads: int  # query heads
    kv_heads: int  # key/value heads
    width: int  # of the feed-forward network
    epsilon: float  # of all norms
    ranks: int = 0  # handle of ops/cpu/ranks.py, of the ranks to sum over; 0: this process is alone

    def __post_init__(self) -> None:
        forget = build.load().quantbench_forget
        forget.argtypes, forget.restype = (ctypes.c_int64,), None
        self.handle = torch.ops.quantbench.cpu_keep(self.parts, self.caches)
        weakref.finalize(self, forget, self.handle).atexit = False

    def __call__(self, x: Tensor, positions: Tensor, sequences: int | None = None) -> Tensor:
        """Logits (B, V) of the next tokens, after those at `positions`, (B,) int64, or (1,) for
        all.

        x: their embeddings (B, D): B / sequences tokens of each sequence, at consecutive positions,
        one behind the other; one of each of B sequences if not given. Each attends to its
        sequence's positions up to its own. Of several tokens each gets the bits that it gets alone.

        Raises RuntimeError for a position that is not in the caches, for several tokens of a
        sequence that would wrap around in a sliding window's cache, and when another rank has ended
        or failed.
        """
        rows = len(x) if sequences is None else sequences
        tokens = x, self.handle, self.hows, self.format, self.rotations, positions, rows
        sizes = self.epsilon, self.heads, self.kv_heads, self.width
        ending = self.norm, *self.output, self.ranks, list(self.vocabularies)
        return torch.ops.quantbench.cpu_decode(*tokens, *sizes, *ending)
