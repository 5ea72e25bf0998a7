"""What quality is measured on: passages of prose, of code, and of text that the model itself wrote.

    for passage in passages(plan, None, 16384, lambda: written(plan, model)):
        passage.ids                     # read from position 0 on; ids[first:] are predicted

The prose is the beginning of "Workshop on Electronic Texts" (Library of Congress, 1992), which is
in the public domain; few models know it by heart. The code is files of this project (BSD 3-Clause),
Python and C++ in turn, as they were when the text was made. An embedded model knows only Python's
standard library: it takes modules of that which its training left out. What a model writes itself,
after a few prompts and in its chat template if it has one, is closest to what it is used for.

Texts are read in looks. The first has 512 tokens, an equal share of each text, and each further one
as many as all before it. Each passage continues its text where the last one ended, but is read from
position 0 on, so the later ones are longer, and reach greater depths.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

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
PROMPTS = (
    "Explain to a twelve-year-old how a bicycle stays upright.",
    "Write a function that merges two sorted lists, and say how long it takes.",
)
NEW_TOKENS, SAMPLED_ROWS = 128, 3  # for each prompt; one more row is greedy
WRITTEN = ("greedy", "sampled")  # names of the texts that the model writes
Report = Callable[[int, int], None]
Written = tuple[list[int], int]  # ids with the prompt's, and where the answer begins


@dataclass(frozen=True)
class Passage:
    """A sequence of tokens that is read from position 0 on."""

    text: str  # the name of the text that it is from
    look: int  # the look at which it is read, from 0
    ids: list[int]
    first: int  # ids[first:] are predicted
    bytes: int | None = None  # of what is predicted, in UTF-8; None for what a model wrote
    number: int = 0  # among all passages
    digest: str = ""  # of all that is predicted of its text

    @property
    def predicted(self) -> int:
        return len(self.ids) - self.first


def passages(
    plan: Plan,
    text: str | None,
    most: int,
    write: Callable[[], tuple[list[Written], list[Written]]],
) -> list[Passage]:
    """All passages, in the order in which they are read.

    text: a file that takes the place of all texts. most: tokens to predict, 0 for all. write:
    gives what the model writes; called last, and only if that is read.

    Raises UsageError for a text that cannot be read or has too few tokens.
    """
    check_tokens(most)
    given = _given(plan, text)
    own = WRITTEN if given.keys() == TEXTS.keys() else ()
    count = len(given) + len(own)
    share, limit = (min(FIRST_TOKENS, most) or FIRST_TOKENS) // count, most // count
    found = [part for name, path in given.items() for part in _cut(plan, name, path, share, limit)]
    if sum(part.predicted for part in found) < LEAST_TOKENS:
        path = next(iter(given.values()))
        raise UsageError(f"--text {path}: quality takes {LEAST_TOKENS} tokens or more")
    if own:
        for name, rows in zip(WRITTEN, write(), strict=True):
            found += _in_looks(name, rows, share, limit)
    found.sort(key=lambda part: part.look)
    hashes = {part.text: hashlib.sha256() for part in found}
    for part in found:
        hashes[part.text].update(str(part.ids[part.first :]).encode())
    return [
        replace(part, number=number, digest=hashes[part.text].hexdigest()[:12])
        for number, part in enumerate(found)
    ]


def source(plan: Plan, text: str | None) -> str:
    """A hash of all that decides what is read but the model's weights."""
    content = [path.read_bytes() for path in _given(plan, text).values()]
    return hashlib.sha256(repr((content, PROMPTS, NEW_TOKENS, SAMPLED_ROWS)).encode()).hexdigest()


def _given(plan: Plan, text: str | None) -> dict[str, Path]:
    if text is not None:
        return {"text": Path(text)}
    if plan.checkpoint.folder in EMBEDDED_MODELS.values():
        return {"held out": HELD_OUT}
    return TEXTS


def _cut(plan: Plan, name: str, path: Path, share: int, limit: int) -> list[Passage]:
    """The text in passages: share tokens, share again, then twice as many each time."""
    tokenizer = plan.tokenizer
    opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = tokenizer.encode(files.read_text("--text", path), bos=False)[: limit or None]
    room, first = plan.architecture.max_position + 1 - len(opening), len(opening) or 1
    found, begin, look = [], 0, 0
    while begin < len(ids):
        end = min(len(ids), begin + (begin or share))
        for start in range(begin, end, room):
            part = ids[start : min(start + room, end)]
            unseen = "" if opening else tokenizer.decode(part[:1])
            size = len(tokenizer.decode(part).encode()) - len(unseen.encode())
            found.append(Passage(name, look, [*opening, *part], first, size))
        begin, look = end, look + 1
    return [part for part in found if part.predicted > 0]


def _in_looks(name: str, rows: Sequence[Written], share: int, limit: int) -> list[Passage]:
    """What the model wrote, (ids, where it begins), each at the look that it is needed for."""
    found, begin = [], 0
    for ids, first in rows:
        ids = ids[: first + limit - begin] if limit else ids
        look = (begin // share).bit_length()
        if len(ids) > first:
            found.append(Passage(name, look, ids, first))
        begin += len(ids) - first
    return found


@torch.no_grad()
def written(
    plan: Plan, model: Transformer, report: Report = lambda done, total: None
) -> tuple[list[Written], list[Written]]:
    """What the model writes after PROMPTS: greedy texts, and those drawn at temperature 1. A text
    ends with the token that ends the answer, or after NEW_TOKENS."""
    chat = chat_of(plan.tokenizer, plan.name)
    context, rows = plan.architecture.max_position, 1 + SAMPLED_ROWS
    random = torch.random.get_rng_state()
    torch.manual_seed(0)  # the draws are on the CPU, so every device and rank makes the same
    greedy, sampled = list[Written](), list[Written]()
    for number, line in enumerate(PROMPTS):
        chat.reset()
        prompt, _ = chat.ask(line)
        count = min(NEW_TOKENS, context - len(prompt))
        if not prompt or count < 1:
            continue
        generator = Generator(model, rows, len(prompt) + count, plan.kv_cache)
        ids = torch.tensor(prompt, device=plan.device).expand(rows, -1)
        logits = generator.forward(ids)[:, -1]
        for step in range(count):
            ids = torch.cat([ids, _drawn(logits.cpu()).to(plan.device)], 1)
            report(number * NEW_TOKENS + step, len(PROMPTS) * NEW_TOKENS)
            if step < count - 1:
                logits = generator.forward(ids[:, -1:], ids.shape[1] - 1)[:, -1]
        for row, into in zip(ids.tolist(), [greedy, *[sampled] * SAMPLED_ROWS], strict=True):
            answer = row[len(prompt) :]
            end = next((at for at, id in enumerate(answer, 1) if id in chat.stop_ids), count)
            into.append(([*prompt, *answer[:end]], len(prompt)))
    torch.random.set_rng_state(random)
    return greedy, sampled


def _drawn(logits: Tensor) -> Tensor:
    """The next token (B, 1) of each row: the likeliest of the first row, drawn for the others."""
    drawn = sample(logits[1:], Sampling(temperature=1.0, top_k=logits.shape[-1]))
    return torch.cat([sample(logits[:1], Sampling()), drawn])
