"""How long a model's answers are: damaged models write longer ones, or loop.

    full = answers(plan, model)                     # to the prompts, greedy
    lengths = compared(answers(other, quantized), full)
    lengths.ratio, lengths.ends, lengths.loops

All prompts are read in one batch, which begins with the first tokens of each: a row whose prompt is
at its end goes on with its answer while others still read theirs. A row that repeats itself counts
as if it had been continued to MOST tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantbench.errors import UsageError
from quantbench.generate import Generator
from quantbench.models.chat import chat_of
from quantbench.models.llama import Transformer
from quantbench.progress import progress
from quantbench.report.interval import Interval
from quantbench.run.plan import Plan

PROMPTS = Path(__file__).with_name("prompts.txt").read_text().splitlines()
MOST = 512  # tokens of an answer
LONGEST_PERIOD = 64  # tokens of what a loop repeats
REPEATS, LEAST_REPEATED = 3, 48  # times and tokens that make a loop
RESAMPLES = 2000


@dataclass(frozen=True)
class Answer:
    """One prompt's answer."""

    tokens: int  # with the one that ends it
    ended: bool
    loops: bool


@dataclass(frozen=True)
class AnswerLengths:
    """An arm's answers against those of full precision to the same prompts."""

    median: float  # tokens
    median_of_full: float
    ratio: Interval  # of the medians; 95 %, prompts resampled in pairs
    ends: float  # shares of the answers
    ends_of_full: float
    loops: float
    loops_of_full: float
    prompts: int

    def sentence(self) -> str:
        """Without a full stop."""
        return (
            f"answers to {self.prompts} prompts: median {self.median:g} tokens, "
            f"{self.ratio.written('.2f')} × full precision's; {self.ends:.0%} end "
            f"(full precision {self.ends_of_full:.0%}), {self.loops:.0%} loop "
            f"({self.loops_of_full:.0%})"
        )

    def time(self, tok_s: float, of_full: float | None) -> str:
        """Seconds to the answer, from tokens per second of decoding."""
        text = f"{self.median / tok_s:.2g} s to the median answer at {tok_s:.3g} tok/s"
        if of_full:
            text += f", full precision {self.median_of_full / of_full:.2g} s at {of_full:.3g} tok/s"
        return text


@torch.no_grad()
def answers(plan: Plan, model: Transformer, prompts: Sequence[str] = ()) -> list[Answer]:
    """The greedy answers. Raises UsageError for a model whose context has no room for them."""
    texts, stops = [], frozenset[int]()
    for prompt in prompts or PROMPTS:
        chat = chat_of(plan.tokenizer, plan.name)
        texts.append(chat.ask(prompt)[0])
        stops |= chat.stop_ids
    most = min(MOST, plan.architecture.max_position - max(map(len, texts)))
    if most < 1:
        raise UsageError(
            f"--answers: {plan.name} has a context of {plan.architecture.max_position} tokens; the "
            f"prompts take {max(map(len, texts))}"
        )
    written: list[list[int]] = [list(text) for text in texts]
    found: dict[int, Answer] = {}
    with progress(f"{plan.spec}: answering", lasting=False, unit="answers") as report:
        while len(found) < len(texts):
            report(len(found), len(texts))
            _go_on(plan, model, texts, written, stops, found, most)
    return [found[row] for row in range(len(texts))]


def _go_on(
    plan: Plan, model: Transformer, texts: Sequence[list[int]], written: list[list[int]],
    stops: frozenset[int], found: dict[int, Answer], most: int,
) -> None:  # fmt: skip
    """Write on until half of the rows are at their end: the others go on in a smaller batch."""
    rows = [row for row in range(len(texts)) if row not in found]
    left, at = len(rows) // 2, min(len(written[row]) for row in rows)
    size = max(len(texts[row]) for row in rows) + most
    generator = Generator(model, len(rows), size, plan.kv_cache)
    ids = torch.tensor([written[row][:at] for row in rows], device=plan.device)
    best = generator.forward(ids, 0)[:, -1].argmax(-1).tolist()
    while True:
        column = []
        for row, token in zip(rows, best, strict=True):
            line = written[row]
            if row not in found and len(line) == at:
                line.append(token)
                answer = line[len(texts[row]) :]
                loops = token not in stops and is_loop(answer)
                if token in stops or loops or len(answer) == most:
                    tokens = most if loops else len(answer)
                    found[row] = Answer(tokens, token in stops, loops)
            column.append(line[at] if len(line) > at else token)
        at += 1
        if sum(row not in found for row in rows) <= left:
            return
        step = torch.tensor(column, device=plan.device)[:, None]
        best = generator.forward(step, at - 1)[:, -1].argmax(-1).tolist()


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the last tokens repeat what is before them, REPEATS times at least."""
    for period in range(1, min(LONGEST_PERIOD, len(ids) // REPEATS) + 1):
        span = max(REPEATS * period, LEAST_REPEATED)
        if len(ids) >= span and all(
            ids[-i] == ids[-i - period] for i in range(1, span - period + 1)
        ):
            return True
    return False


def compared(arm: Sequence[Answer], full: Sequence[Answer]) -> AnswerLengths:
    """Answers to the same prompts, in the same order."""
    ours, theirs = (np.array([answer.tokens for answer in each]) for each in (arm, full))
    picked = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    ratios = np.median(ours[picked], 1) / np.median(theirs[picked], 1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    medians = float(np.median(ours)), float(np.median(theirs))

    return AnswerLengths(
        *medians,
        Interval(medians[0] / medians[1], float(low), float(high)),
        ends=sum(answer.ended for answer in arm) / len(arm),
        ends_of_full=sum(answer.ended for answer in full) / len(arm),
        loops=sum(answer.loops for answer in arm) / len(arm),
        loops_of_full=sum(answer.loops for answer in full) / len(arm),
        prompts=len(arm),
    )
