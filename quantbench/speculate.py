"""Speculative decoding: tokens that something cheap drafts are read in one pass of the model.

    generator = speculating(plan, generator)    # as --speculate says
    generator = Speculating(generator, Lookup())
    generator.generate(prompt, 100).speculation # how many drafted tokens were accepted

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

import dataclasses
import itertools
import operator
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quantbench.errors import UsageError
from quantbench.generate import Generator, draw, likely
from quantbench.log.config import RunConfig, Unsaid
from quantbench.models.llama import Transformer
from quantbench.models.tokenizer import other_encoding
from quantbench.progress import progress, say
from quantbench.run import loading, sizes
from quantbench.run.facts import Generation, Speculation
from quantbench.run.plan import Plan, make_plan

MOST = 15  # drafted tokens in a pass: cpu-step has 16 rows, one for the token before them
SIZES = (1, 2, 4, 8, 16)  # tokens of the passes that are timed; others lie between two of them
TIMED = 5  # passes of each size
FORGOTTEN = 0.97  # weight of a judged draft after the next one: texts change
EVERY = 16  # passes without a draft, after which a model that drafts gets another chance

Likely = tuple[Tensor, Tensor]  # probabilities and tokens of those that may be drawn, both (N, k)


class Drafter(Protocol):
    levels: int  # kinds of drafted tokens, by how likely they are to be accepted

    def offer(self, history: Sequence[int], most: int) -> list[int]:
        """The level of each token that it could draft after `history`; at most `most`."""

    def draft(self, history: Sequence[int], count: int) -> tuple[list[int], Likely | None]:
        """So many of the tokens just offered, and what they were drawn from: None if certain."""


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


class ModelDraft:
    """Drafts with another model of the same tokens, or with the same weights in fewer bits."""

    levels = 1

    def __init__(self, generator: Generator, shared: bool) -> None:
        """generator: of the drafting model. shared: whether it writes to the model's own caches, so
        that a pass of the model replaces its keys and values."""
        self.generator, self.shared = generator, shared
        for memory in generator.caches:
            memory.go_back(MOST + 1)
        self.read: list[int] = []  # tokens whose keys and values its caches hold

    def offer(self, history: Sequence[int], most: int) -> list[int]:
        return [0] * most

    def draft(self, history: Sequence[int], count: int) -> tuple[list[int], Likely]:
        known = len(history) - 1
        if not self.shared:  # from their first difference on, drafted tokens were not accepted
            same = map(operator.eq, self.read, history)
            known = min(known, sum(itertools.takewhile(bool, same)))
        new, tokens, offered = list(history[known:]), [], []
        for _ in range(count):
            logits = self.generator.forward(self.generator.tensor([new]), known)[:, -1]
            known += len(new)
            offered.append(likely(logits, self.generator.sampling))
            new = [int(draw(*offered[-1]))]
            tokens += new
        self.read = [*history, *tokens[:-1]]
        probabilities, drawn_from = (torch.cat(part) for part in zip(*offered, strict=True))
        return tokens, (probabilities, drawn_from)


class Odds:
    """How often drafts were accepted, by level; one in two before any was judged."""

    def __init__(self, levels: int) -> None:
        self.accepted, self.judged = [1.0] * levels, [2.0] * levels

    def of(self, level: int) -> float:
        return self.accepted[level] / self.judged[level]

    def see(self, level: int, accepted: bool) -> None:
        self.accepted[level] = FORGOTTEN * self.accepted[level] + accepted
        self.judged[level] = FORGOTTEN * self.judged[level] + 1


class Speculating(Generator):
    """A Generator of one row, whose `stream` reads drafted tokens."""

    def __init__(self, generator: Generator, drafter: Drafter) -> None:
        """Shares all that the generator has. Raises UsageError for more than one row, and for a
        sliding window that is shorter than the caches: a rejected draft would have overwritten what
        the next tokens attend to."""
        if generator.batch_size > 1:
            raise UsageError("speculation is for one row: leave batch_size at 1")
        slots = min(cache.slots for cache in generator.caches)
        if slots < generator.cache_size:
            raise UsageError(
                f"speculation: the sliding window has {slots} positions, fewer than the "
                f"{generator.cache_size} of the caches"
            )
        for memory in generator.caches:
            memory.go_back(MOST + 1)
        self.__dict__.update(generator.__dict__)
        self.speculator = Speculator(generator, drafter)

    @torch.no_grad()
    def stream(self, prompt: Tensor, start: int = 0) -> Iterator[Tensor]:
        token = next(super().stream(prompt, start))
        yield token
        self.speculator.begin(prompt, start)
        for number in self.speculator.after(int(token)):
            yield self.tensor([[number]])
        self._check(token, self.cache_size)  # raises: the caches are full

    def generate(self, *arguments: Any, **named: Any) -> Generation:
        before = self.speculator.counted
        generation = super().generate(*arguments, **named)
        counted = self.speculator.counted.since(before)
        return dataclasses.replace(generation, speculation=counted)


class Speculator:
    """The loop behind the first token: it drafts, reads the drafts in one pass, and judges."""

    def __init__(self, generator: Generator, drafter: Drafter) -> None:
        self.generator, self.drafter, self.positions = generator, drafter, generator.cache_size
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
        tokens = self.generator.tensor([[history[-1], *drafts]])
        logits = self.generator.forward(tokens, start)[0]
        probabilities, choices = likely(logits, self.generator.sampling)
        target = probabilities.cpu(), choices.cpu()  # to wait for the device once
        accepted, last = judge(drafts, target, drawn_from)
        new = [*drafts[:accepted], last]
        if not drafts and offered and self.drafter.levels > 1:  # seeing if it was right is free
            self.odds.see(offered[0], self.drafter.draft(history, 1)[0] == new)
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
        room = self.positions - len(self.history) + 1
        seconds = {size: self._median(self.generator, size) for size in SIZES if size <= room}
        every = range(1, MOST + 2)
        self.seconds = np.interp(every, list(seconds), list(seconds.values())).tolist()
        if isinstance(self.drafter, ModelDraft):
            self.draft_seconds = self._median(self.drafter.generator, 1)
            self.drafter.read = []

    def _median(self, generator: Generator, count: int) -> float:
        """Seconds of a pass of `count` times the newest token."""
        tokens, taken = generator.tensor([self.history[-1:] * count]), []
        for _ in range(TIMED + 1):  # the first does not count
            started = time.perf_counter()
            generator.forward(tokens, len(self.history) - 1).sum().item()  # the device is done
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])


def judge(
    drafts: Sequence[int],
    target: Likely,
    drawn_from: Likely | None,
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


# ---------------------------------------------------------------------------- a model that drafts

SELF = "int4wo-64"  # what drafts for the same weights in more bits
MOST_COST = 0.8  # of weights that draft for themselves: bytes of a drafted token ÷ those of a step


def speculating(plan: Plan, generator: Generator) -> Speculating:
    """With what --speculate names; a model is loaded, and drafts for itself into the same
    caches."""
    if plan.config.speculate == "lookup":
        return Speculating(generator, Lookup())
    is_self = plan.config.speculate == "self"
    draft = Generator(
        load_draft(plan),
        cache_size=generator.cache_size,
        kv_cache=plan.kv_cache,
        sampling=generator.sampling,
        caches=generator.caches if is_self else None,
    )
    return Speculating(generator, ModelDraft(draft, is_self))


def load_draft(plan: Plan) -> Transformer:
    """The model that drafts. Raises UsageError for one that cannot pay, or that has other
    tokens."""
    draft = make_plan(draft_config(plan.config))
    if plan.config.speculate == "self":
        _refuse_cost(plan, draft)
    elif different := _other_tokens(plan, draft):
        raise UsageError(
            f"--draft_checkpoint {plan.config.draft_checkpoint}: its {different} is not that of "
            f"{plan.config.checkpoint_path}"
        )
    with progress(f"Loading the draft, {draft.name} as {draft.spec.name}") as report:
        return loading.load(draft, report, say).model


def draft_config(config: RunConfig) -> RunConfig:
    """The options of the model that drafts."""
    default = SELF if config.speculate == "self" else Unsaid(RunConfig.quantization)
    own = ("speculate", "draft_quantization", "draft_checkpoint", "save", "format", "kernel")
    return dataclasses.replace(
        config.without(own),
        quantization=config.draft_quantization or default,
        checkpoint_path=config.draft_checkpoint or config.checkpoint_path,
        num_layers=None if config.draft_checkpoint else config.num_layers,
    )


def _other_tokens(plan: Plan, draft: Plan) -> str | None:
    """What differs between the tokens of two models; None if nothing does."""
    if plan.architecture.vocab_size != draft.architecture.vocab_size:
        return "number of tokens"
    different = other_encoding(plan.tokenizer, draft.tokenizer, [plan.config.prompt])
    return different and different[0]


def _refuse_cost(plan: Plan, draft: Plan) -> None:
    """Raise UsageError for a draft of too many bits. autoquant's are not known beforehand."""
    bytes_of = [
        sizes.size_of(p.architecture, p.spec.scheme, p.device, p.precision).model_bytes
        for p in (plan, draft)
        if p.spec.scheme
    ]
    cost = bytes_of[-1] / bytes_of[0]
    if len(bytes_of) == 2 and cost > MOST_COST:
        raise UsageError(
            f"--speculate self: {draft.spec.name} reads {cost:.0%} of the bytes that "
            f"{plan.spec.name} does, so a drafted token pays only if more than {cost:.0%} of them "
            "are accepted; take a --draft_quantization of fewer bits, or --speculate lookup"
        )
