"""Speculative decoding: tokens that something cheap drafts are read in one pass of the model.

    speculator = Speculator(forward, likely, draw, Lookup(), positions)
    for token in speculator.after(first): ...

A drafted token x is accepted with probability min(1, p(x) / q(x)), where p is the model's
distribution and q the draft's; the first that is not is replaced by one drawn from max(p - q, 0).
So the text has the model's own distribution (Leviathan et al. 2023, arXiv:2211.17192; Chen et al.
2023, arXiv:2302.01318), and a greedy text is that of single steps, as far as a pass of several
tokens rounds as they do. Drafts come from the text itself (Lookup; Saxena 2023, "prompt lookup
decoding") or from a model (ModelDraft).

How many tokens to draft follows from what passes of 1 to MOST + 1 tokens take, measured once, and
from how often such drafts were accepted so far: as many as give the most tokens per second, or
none.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quantbench.run.facts import Speculation

MOST = 15  # drafted tokens in a pass: cpu-step has 16 rows, one for the token before them
SIZES = (1, 2, 4, 8, 16)  # tokens of the passes that are timed; others lie between two of them
TIMED = 5  # passes of each size
FORGOTTEN = 0.97  # weight of a judged draft after the next one: texts change
EVERY = 16  # passes without a draft, after which a model that drafts gets another chance

Forward = Callable[[Tensor, int], Tensor]  # tokens (1, S), position of the first -> (1, S, V)
Likely = tuple[Tensor, Tensor]  # probabilities and tokens of those that may be drawn, both (N, k)


class Drafter(Protocol):
    levels: int  # kinds of drafted tokens, by how likely they are to be accepted

    def offer(self, history: Sequence[int], most: int) -> list[int]:
        """The level of each token that it could draft after `history`; at most `most`."""

    def draft(self, history: Sequence[int], count: int) -> tuple[list[int], Likely | None]:
        """So many of the tokens just offered, and what they were drawn from: None if certain."""

    def judged(self, accepted: int) -> None:
        """How many of the tokens just drafted were accepted."""


class Lookup:
    """Drafts what followed the last occurrence of the newest tokens."""

    SHORTEST, LONGEST = 2, 7  # tokens that have to be the same
    levels = LONGEST + 1

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # tokens -> the position behind them
        self._read: list[int] = []

    def offer(self, history: Sequence[int], most: int) -> list[int]:
        if self._read != history[: len(self._read)] or len(self._read) == len(history):
            self._after, self._read = {}, []
        for end in range(len(self._read) + 1, len(history)):  # not the newest: it has no successor
            for size in range(self.SHORTEST, min(self.LONGEST, end) + 1):
                self._after[tuple(history[end - size : end])] = end
        self._read = list(history[: max(len(history) - 1, 0)])
        for size in range(min(self.LONGEST, len(history) - 1), self.SHORTEST - 1, -1):
            if at := self._after.get(tuple(history[-size:])):
                self._at = at
                return [min(size + i, self.LONGEST) for i in range(most)]
        return []

    def draft(self, history: Sequence[int], count: int) -> tuple[list[int], None]:
        text = list(history[self._at :])
        for i in range(count - len(text)):  # it goes on as it would if all were accepted
            text.append(text[i])
        return text[:count], None

    def judged(self, accepted: int) -> None:
        pass


class ModelDraft:
    """Drafts with another model of the same tokens, or with the same weights in fewer bits."""

    levels = 1

    def __init__(
        self,
        forward: Forward,
        likely: Callable[[Tensor], Likely],
        draw: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        shared: bool,
    ) -> None:
        """forward: of the drafting model. shared: whether it writes to the model's own caches, so
        that a pass of the model replaces its keys and values."""
        self.forward, self.likely, self.draw = forward, likely, draw
        self.device, self.shared = device, shared
        self.read: list[int] = []  # tokens whose keys and values its caches hold

    def offer(self, history: Sequence[int], most: int) -> list[int]:
        return [0] * most

    def draft(self, history: Sequence[int], count: int) -> tuple[list[int], Likely]:
        self.start = len(history)
        known = len(history) - 1 if self.shared else _common(self.read, history)
        known = min(known, len(history) - 1)
        new, tokens, likely = list(history[known:]), [], []
        for _ in range(count):
            logits = self.forward(torch.tensor([new], device=self.device), known)[:, -1]
            known += len(new)
            likely.append(self.likely(logits))
            new = [int(self.draw(*likely[-1]))]
            tokens += new
        self.read = [*history, *tokens[:-1]]
        probabilities, drawn_from = (torch.cat(part) for part in zip(*likely, strict=True))
        return tokens, (probabilities, drawn_from)

    def judged(self, accepted: int) -> None:
        del self.read[self.start + accepted :]


class Odds:
    """How often drafts were accepted, by level; one in two before any was judged."""

    def __init__(self, levels: int) -> None:
        self.accepted, self.judged = [1.0] * levels, [2.0] * levels

    def of(self, level: int) -> float:
        return self.accepted[level] / self.judged[level]

    def see(self, level: int, accepted: bool) -> None:
        self.accepted[level] = FORGOTTEN * self.accepted[level] + accepted
        self.judged[level] = FORGOTTEN * self.judged[level] + 1


class Speculator:
    """The loop of `Generator.stream` for one row, with a draft."""

    def __init__(
        self,
        forward: Forward,
        likely: Callable[[Tensor], Likely],
        draw: Callable[[Tensor, Tensor], Tensor],
        drafter: Drafter,
        positions: int,
        device: torch.device,
    ) -> None:
        """likely: of logits (N, V), the tokens that may be drawn. draw: (…, k), (…, k) -> (…, 1),
        a token by its weight. positions: of the caches."""
        self.forward, self.likely, self.draw = forward, likely, draw
        self.drafter, self.positions, self.device = drafter, positions, device
        self.odds, self.counted = Odds(drafter.levels), Speculation()
        self.history: list[int] = []  # tokens in the caches, and the newest one
        self.seconds: list[float] = []  # of a pass of 1, 2, … tokens
        self.draft_seconds = 0.0  # of a drafted token
        self._without = 0  # passes since the last draft

    def begin(self, prompt: Tensor, start: int) -> None:
        """The caches hold `start` positions, as before, and then the prompt (1, S)."""
        known = self.history[:start]
        self.history = [*known, *[-1] * (start - len(known)), *prompt[0].tolist()]

    def after(self, token: int) -> Iterator[int]:
        """The tokens that follow `token`, the first one behind the prompt."""
        self.history.append(token)
        while len(self.history) <= self.positions:
            if not self.seconds:
                self._time()
            yield from self._pass()

    def _pass(self) -> list[int]:
        """The tokens that one pass gives."""
        history, start = self.history, len(self.history) - 1
        offered = self.drafter.offer(history, min(MOST, self.positions - start - 1))
        count = self._best(offered)
        drafts, drawn_from = self.drafter.draft(history, count) if count else ([], None)
        self._without = 0 if drafts else self._without + 1
        tokens = torch.tensor([[history[-1], *drafts]], device=self.device)
        probabilities, likely = self.likely(self.forward(tokens, start)[0])
        target = probabilities.cpu(), likely.cpu()  # to wait for the device once
        accepted, last = judge(drafts, target, drawn_from, self.draw)
        new = [*drafts[:accepted], last]
        if drafts:
            self.drafter.judged(accepted)
        elif offered and self.drafter.levels > 1:  # it costs nothing to see whether it was right
            drafts = self.drafter.draft(history, 1)[0]
            self.odds.see(offered[0], drafts == new)
            drafts = []
        verdicts = [True] * accepted + [False] * (accepted < len(drafts))
        for level, was_accepted in zip(offered, verdicts, strict=False):
            self.odds.see(level, was_accepted)
        was = self.counted
        self.counted = Speculation(
            was.passes + 1, was.drafted + len(drafts), was.accepted + accepted
        )
        history += new
        return new

    def _best(self, offered: Sequence[int]) -> int:
        """How many of the offered tokens give the most tokens per second."""
        best, most = 0, 1 / self.seconds[0]
        expected, all_accepted = 1.0, 1.0
        for count, level in enumerate(offered, 1):
            all_accepted *= self.odds.of(level)
            expected += all_accepted
            speed = expected / (self.seconds[count] + count * self.draft_seconds)
            if speed > most:
                best, most = count, speed
        again = self._without >= EVERY and self.drafter.levels == 1
        return best or int(again and bool(offered))

    def _time(self) -> None:
        """Time passes behind the newest token, at positions that later ones write again."""
        start = len(self.history) - 1
        room = self.positions - start
        seconds = {
            size: self._median(lambda: self.forward(self._newest(size), start))  # noqa: B023
            for size in SIZES
            if size <= room
        }
        every = range(1, MOST + 2)
        self.seconds = np.interp(every, list(seconds), list(seconds.values())).tolist()
        if isinstance(self.drafter, ModelDraft):
            draft = self.drafter
            self.draft_seconds = self._median(lambda: draft.forward(self._newest(1), start))
            draft.read = []

    def _newest(self, count: int) -> Tensor:
        return torch.tensor([self.history[-1:] * count], device=self.device)

    def _median(self, work: Callable[[], Tensor]) -> float:
        taken = []
        for _ in range(TIMED + 1):  # the first does not count
            started = time.perf_counter()
            work().sum().item()  # the device is done
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])


def judge(
    drafts: Sequence[int],
    target: Likely,
    drawn_from: Likely | None,
    draw: Callable[[Tensor, Tensor], Tensor],
) -> tuple[int, int]:
    """How many of N drafted tokens are accepted, and the token behind them.

    target: the model's distributions (N + 1, k), before each of them and behind the last.
    drawn_from: the draft's (N, k'); None where its tokens were certain.
    """
    for i, x in enumerate(drafts):
        p, tokens = target[0][i], target[1][i]
        if drawn_from is None:
            q, q_of_x = (tokens == x).to(p), 1.0
        else:
            there, at = drawn_from[0][i].to(p), drawn_from[1][i].to(tokens)
            q = (tokens[:, None] == at).to(p) @ there
            q_of_x = float(there[at == x].sum())
        if float(torch.rand(())) * q_of_x < float(p[tokens == x].sum()):
            continue
        return i, int(draw((p - q).clamp(min=0), tokens))
    return len(drafts), int(draw(target[0][-1], target[1][-1]))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
