"""What quality is measured on: passages of prose, of code, and of text that the model itself wrote.

    texts = Texts(plan, None, 4096)
    for passage in texts.look(0, model):
        passage.ids                     # read from position 0 on; ids[first:] are predicted

The prose is the beginning of "Workshop on Electronic Texts" (Library of Congress, 1992), which is
in the public domain; few models know it by heart. The code is files of this project (BSD 3-Clause),
Python and C++ interleaved, as they were when the text was made. An embedded model knows only
Python's standard library: it takes modules of that which its training left out. What a model writes
itself, in its chat template if it has one, is closest to what it is used for.

Texts are read in looks. The first has 640 tokens, each further one at most as many as all before
it. A passage continues its text where the last one ended, but is read from position 0 on, so that
later ones are longer and reach greater depths. At each look the model answers another prompt, by 64
decoding steps: a greedy row, and sampled ones beside it, which take hardly more time.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from quantbench import files
from quantbench.errors import UsageError
from quantbench.generate import Generator, Sampling, sample
from quantbench.models.chat import chat_of
from quantbench.models.formats import EMBEDDED, EMBEDDED_MODELS
from quantbench.models.llama import Transformer
from quantbench.quality.thresholds import FIRST_TOKENS, LEAST_TOKENS, check_tokens
from quantbench.run.plan import Plan

TEXTS = {name: Path(__file__).with_name(f"{name}.txt") for name in ("prose", "code")}
HELD_OUT = EMBEDDED / "heldout.txt"
SHARES = {"prose": 3, "code": 3, "greedy": 1, "sampled": 3}  # of the tokens; alike in the KL
PROMPTS = (  # one a look
    "Explain to a twelve-year-old how a bicycle stays upright.",
    "Write a function that merges two sorted lists, and say how long it takes.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show each step.",
    "Summarize what a library does in three sentences, then translate them into French.",
    "Begin a story about a lighthouse keeper who finds a letter.",
)
NEW_TOKENS = 64  # of each row
PIECE = 500  # characters that two texts do not have in common by chance
ALL_LOOKS = 64  # more than any text has: each look doubles the tokens


@dataclass(frozen=True)
class Passage:
    """A sequence of tokens that is read from position 0 on."""

    text: str  # the name of the text that it is from
    look: int  # the look at which it is read, from 0
    ids: list[int]
    first: int  # ids[first:] are predicted
    bytes: int | None = None  # of what is predicted, in UTF-8; None for what a model wrote

    @property
    def predicted(self) -> int:
        return len(self.ids) - self.first


class Texts:
    """All texts of a run."""

    def __init__(self, plan: Plan, text: str | None, most: int) -> None:
        """text: a file that takes the place of all texts. most: tokens to predict, 0 for all.

        Raises UsageError for a text that cannot be read or has too few tokens.
        """
        check_tokens(most)
        self.plan, self.most = plan, most or math.inf
        given = texts_of(plan, text)
        own = given.keys() == TEXTS.keys()
        self.shares = SHARES if own else dict.fromkeys(given, 1)
        self.given = {
            name: plan.tokenizer.encode(files.read_text("--text", path), bos=False)
            for name, path in given.items()
        }
        if sum(map(len, self.given.values())) - (plan.tokenizer.bos_id is None) < LEAST_TOKENS:
            path = next(iter(given.values()))
            raise UsageError(f"--text {path}: quality takes {LEAST_TOKENS} tokens or more")

    def look(self, look: int, model: Transformer) -> list[Passage]:
        """The passages of one look; `model` writes the greedy and sampled ones."""
        found = [part for name in self.given for part in self._cut(name, look)]
        return found + (self._written(look, model) if "greedy" in self.shares else [])

    def last(self, look: int) -> bool:
        """Whether no tokens are left after this look."""
        return all(self._span(name, look + 1) is None for name in self.given)

    def _span(self, name: str, look: int) -> tuple[int, int] | None:
        """The first token and the end of a text's part in a look; None after its last one."""
        size, share = sum(self.shares.values()), self.shares[name]
        first, most = int(min(FIRST_TOKENS, self.most)) * share // size, self.most * share / size
        begin, end = first << look >> 1 if look else 0, first << look
        end = int(min(end, most, len(self.given.get(name, range(end)))))
        return (begin, end) if begin < end else None

    def _cut(self, name: str, look: int) -> list[Passage]:
        """A look's part of a given text, in passages no longer than the model's context."""
        tokenizer, ids = self.plan.tokenizer, self.given[name]
        opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        room = self.plan.architecture.max_position + 1 - len(opening)
        begin, end = self._span(name, look) or (0, 0)
        found = []
        for start in range(begin, end, room):
            part = ids[start : min(start + room, end)]
            unseen = "" if opening else tokenizer.decode(part[:1])
            size = len(tokenizer.decode(part).encode()) - len(unseen.encode())
            found.append(Passage(name, look, [*opening, *part], len(opening) or 1, size))
        return [part for part in found if part.predicted > 0]

    @torch.no_grad()
    def _written(self, look: int, model: Transformer) -> list[Passage]:
        """What the model answers to this look's prompt, greedy and at temperature 1; a row ends
        with the token that ends the answer, or after NEW_TOKENS."""
        if look >= len(PROMPTS):
            return []
        room = {name: end - begin for name in ("greedy", "sampled")
                for begin, end in [self._span(name, look) or (0, 0)]}  # fmt: skip
        plan, rows = self.plan, 1 + math.ceil(room["sampled"] / NEW_TOKENS)
        chat = chat_of(plan.tokenizer, plan.name)
        prompt, _ = chat.ask(PROMPTS[look])
        count = min(NEW_TOKENS, max(room.values()), plan.architecture.max_position - len(prompt))
        if not prompt or count < 1:
            return []
        generator = Generator(model, rows, len(prompt) + count, plan.kv_cache)
        ids = torch.tensor(prompt, device=plan.device).expand(rows, -1)
        logits = generator.forward(ids)[:, -1]
        drawn = Sampling(temperature=1.0, top_k=logits.shape[-1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(look)  # drawn on the CPU: the same on all devices and ranks
            for step in range(count):
                if step:
                    logits = generator.forward(ids[:, -1:], ids.shape[1] - 1)[:, -1]
                logits = logits.cpu()
                token = torch.cat([sample(logits[:1], Sampling()), sample(logits[1:], drawn)])
                ids = torch.cat([ids, token.to(ids.device)], 1)
        found, first = [], len(prompt)
        for name, row in zip(["greedy", *["sampled"] * (rows - 1)], ids.tolist(), strict=True):
            ends = (at for at in range(first, len(row)) if row[at] in chat.stop_ids)
            row = row[: min(next(ends, len(row)) + 1, first + room[name])]
            room[name] -= len(row) - first
            found.append(Passage(name, look, row, first))
        return [part for part in found if part.predicted > 0]


def digest(passages: list[Passage]) -> str:
    """A hash of the tokens that are predicted."""
    predicted = [part.ids[part.first :] for part in passages]
    return hashlib.sha256(str(predicted).encode()).hexdigest()[:12]


def calibrated_on(plan: Plan, text: str | None) -> Path | None:
    """The text that judges the plan's scheme, and that the scheme was calibrated on, too: such a
    judge is biased. None if there is none. text: as for Texts."""
    if not plan.spec.calibrated:
        return None
    from quantbench.run import calibration  # which most runs need not import

    return judge_of(plan, text, Path(plan.config.calibration_text or calibration.TEXT))


def judge_of(plan: Plan, text: str | None, source: Path) -> Path | None:
    """The first of the texts that judge a model that has a piece of `source`."""
    read = files.read_text("--calibration_text", source)
    judges = ((path, files.read_text("--text", path)) for path in texts_of(plan, text).values())
    return next((path for path, judge in judges if _share(read, judge)), None)


def _share(first: str, second: str) -> bool:
    """Whether a text contains a piece of the other, cut in PIECE characters."""
    return any(
        a[start : start + PIECE] in b
        for a, b in ((first, second), (second, first))
        for start in range(0, max(1, len(a) - PIECE + 1), PIECE)
    )


def texts_of(plan: Plan, text: str | None = None) -> dict[str, Path]:
    """The files that a model is read on: `text` alone, if given."""
    if text is not None:
        return {"text": Path(text)}
    if plan.checkpoint.folder in EMBEDDED_MODELS.values():
        return {"held out": HELD_OUT}
    return TEXTS
