"""What a layer without attention remembers: as much after a million positions as after one.

Columns      the last columns that a short convolution saw
DeltaState   these, and the state of a gated delta rule

A state cannot forget what it has read. So the last `back` positions are kept beside it, and are
read into it only when they are older: reading them again, or others in their place, needs no copy
of the state, and decoding with `back` = 1 costs what updating it at once would.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantbench.kv_cache.base import LayerMemory
from quantbench.ops.delta_rule import delta_rule

if TYPE_CHECKING:
    from quantbench.models.recurrent import Recurrent


class Columns(LayerMemory):
    """The last kernel - 1 + `back` columns (rows, C) of what is convolved: a ring."""

    slots = 1 << 62
    back = 0

    def __init__(
        self, recurrent: "Recurrent", dim: int, rows: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        """dim: the model's width. dtype: of the columns."""
        super().__init__()
        self.recurrent, self.width = recurrent, recurrent.columns(dim)
        self.rows, self.dtype, self.device = rows, dtype, device
        # Positions of the text: `first`, and `end` behind the last.
        self.register_buffer("first", self._number(), persistent=False)
        self.register_buffer("end", self._number(), persistent=False)
        self.go_back(1)

    def go_back(self, count: int) -> None:
        """What it held is lost, if it could not yet."""
        if count == self.back:
            return
        self.back = count
        shape = self.rows, self.recurrent.kernel - 1 + count, self.width
        buffer = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.register_buffer("ring", buffer, persistent=False)

    def _number(self) -> Tensor:
        return torch.zeros(1, dtype=torch.long, device=self.device)

    def fill(self, depth: int) -> None:
        """The text starts there: a step takes as long whatever came before."""
        self.first.fill_(depth)
        self.end.fill_(depth)

    def keep(self, count: int, read: int = 0) -> int:
        goes_on = int(self.oldest()) <= count <= int(self.end) or count == int(self.first)
        return count if goes_on else 0

    def oldest(self) -> Tensor:
        """The first position at which the text can go on."""
        return (self.end - self.back).maximum(self.first)

    def convolved(self, positions: Tensor, x: Tensor) -> Tensor:
        """The columns x (B, S, C) at `positions` behind the kernel - 1 before them: (B, S + kernel
        - 1, C). Columns before the text are 0."""
        (rows, count, _), size = x.shape, self.ring.shape[1]
        positions = positions.to(self.ring.device, non_blocking=True)
        start = positions[:1]
        # A text from position 0 on starts there, whatever was filled.
        self.first.copy_(torch.where(start < self.first, start, self.first))
        before = start + torch.arange(1 - self.recurrent.kernel, 0, device=start.device)
        past = self.ring[:rows, before % size]
        past = past.masked_fill((before < self.first)[:, None], 0)
        last = slice(-size, None)
        row = torch.arange(rows, device=start.device)[:, None]
        self.ring[row, positions[last] % size] = x[:, last]
        self.end.copy_(start + count)
        return torch.cat((past, x), 1)


class DeltaState(Columns):
    """A matrix (K, V) in float32 for each of H value heads, and the tokens behind it.

    `state` has read the positions before `read`; `tokens` are the next ones, at most `back`.
    """

    def __init__(
        self, recurrent: "Recurrent", dim: int, rows: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        super().__init__(recurrent, dim, rows, dtype, device)
        shape = rows, recurrent.value_heads, recurrent.key_width, recurrent.value_width
        self.register_buffer("state", torch.zeros(shape, device=device), persistent=False)
        self.register_buffer("read", self._number(), persistent=False)

    def go_back(self, count: int) -> None:
        if count == self.back:
            return
        super().go_back(count)
        r = self.recurrent
        # keys, values, decay and beta of each token, side by side
        shape = self.rows, r.value_heads, count, r.key_width + r.value_width + 2
        self.register_buffer("tokens", torch.zeros(shape, device=self.device), persistent=False)

    def fill(self, depth: int) -> None:
        super().fill(depth)
        self.read.fill_(depth)

    def oldest(self) -> Tensor:
        return self.read

    def update(
        self, positions: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor,
        beta: Tensor,
    ) -> Tensor:  # fmt: skip
        """What the tokens at `positions` read, (B, H, S, V); arguments as for `delta_rule`."""
        rows, count, back = len(key), key.shape[2], self.back
        start = positions[:1].to(self.state.device, non_blocking=True)
        begins = start <= self.first
        state = self.state[:rows].masked_fill(begins, 0)
        # How many of the stored tokens the text still has.
        known = torch.where(begins, 0, start - self.read).clamp(0, back)
        tokens = self.tokens[:rows]
        new = torch.cat((key, value, decay[..., None], beta[..., None]), -1)
        outputs = []
        if count > back:  # all that are stored become old, and the first of the new ones
            _, state = self._read(state, tokens, known)
            many = count - back
            y, state = delta_rule(state, query[:, :, :many], *self._parts(new[:, :, :many]))
            outputs.append(y)
            query, tokens, left = query[:, :, many:], new[:, :, many:], torch.zeros_like(known)
        else:
            old = (known + count - back).clamp(min=0)
            _, state = self._read(state, tokens[:, :, :count], old)
            left = known - old
            if back > 1:
                places = torch.arange(back, device=start.device)
                tokens = tokens[:, :, (places + old) % back]
                tokens = tokens.index_copy(2, left + places[:count], new)
            else:
                tokens = new
        after = min(count, back)
        places = left + torch.arange(after, device=start.device)
        if back > 1 and count < back:  # queries stand where their tokens do
            empty = query.new_zeros(*query.shape[:2], back, query.shape[-1])
            y, _ = self._read(state, tokens, left + after, empty.index_copy(2, places, query))
            y = y[:, :, places]
        else:
            y, _ = delta_rule(state, query, *self._parts(tokens))
        outputs.append(y)
        self.state[:rows] = state
        self.tokens[:rows] = tokens
        self.read.copy_(start + count - after - left)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _read(
        self, state: Tensor, tokens: Tensor, count: Tensor, query: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`delta_rule` of the first `count` of these tokens; the others change nothing."""
        key, value, decay, beta = self._parts(tokens)
        counts = torch.arange(tokens.shape[2], device=tokens.device) < count
        query = key if query is None else query
        decay, beta = (torch.where(counts, x, 0.0) for x in (decay, beta))
        return delta_rule(state, query, key, value, decay, beta)

    def _parts(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        widths = self.recurrent.key_width, self.recurrent.value_width, 1, 1
        key, value, decay, beta = tokens.split(widths, -1)
        return key, value, decay[..., 0], beta[..., 0]
