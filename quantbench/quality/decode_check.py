"""Whether decoding predicts what reading a prompt does, and a timed arm what was judged.

Quality is measured by reading text as prompts, hundreds of tokens at once; generating reads one
token a step, through other kernels. One window goes both ways: the decoder of the arm steps over
its last tokens one by one. In full precision the divergence of the two is the noise: a KL that two
kernels differ by shows no damage. An arm's decoding may be ROUNDINGS times that from its prompts;
beyond it, the two paths compute different things. Where activations or the cache are rounded, both
paths differ by more, as values fall to either side of a step: there decoding may not be that much
further from full precision than prompts are.
"""

import math

import torch
from torch import Tensor

from quantbench.generate import Generator
from quantbench.models.llama import Transformer
from quantbench.quality.block_errors import block_mean
from quantbench.quality.scores import Reader, Reference, Scores, compared, summary
from quantbench.quality.texts import Passage
from quantbench.quality.thresholds import of_rounding
from quantbench.quality.types import DecodeCheck, Likeliest, Quality
from quantbench.run.plan import Plan

STEPS, BLOCK = 32, 4  # tokens
COMPARED, TOP = 64, 8  # tokens on which two processes are compared, and likeliest ones of each
LEAST = 1e-9  # probability of all other tokens


@torch.no_grad()
def both_ways(
    plan: Plan, model: Transformer, ids: list[int], steps: int = STEPS
) -> tuple[str, int, Tensor, Tensor]:
    """Predict the last `steps` of the first 2 · steps + 1 tokens by one prompt, and by decoding
    steps behind a prompt of the others: the decoder's name, the position of the first step, and
    the logits (steps, V) of the prompt and of the steps.

    The batch is one row, and nothing is compiled. `steps` is reduced where there are fewer tokens.
    """
    ids = ids[: 2 * steps + 1]
    context = len(ids) - 1
    first = context - min(steps, context - 1)
    generator = Generator(model, 1, context, plan.kv_cache, plan.config.decoder)
    tokens = torch.tensor([ids], device=plan.device)
    prompt = generator.forward(tokens[:, :-1])[0, first:]
    generator.forward(tokens[:, :first])
    logits = [generator.forward(tokens[:, at : at + 1], at)[0] for at in range(first, context)]
    return generator.decoder.name, first, prompt, torch.cat(logits)


def noise(plan: Plan, model: Transformer, ids: list[int], steps: int = 2 * STEPS) -> Quality:
    """The model's decoding steps against its prompts."""
    _, first, prompt, decoded = both_ways(plan, model, ids, steps)
    ids = ids[: first + 1 + len(prompt)]
    rows = compared(decoded, prompt, torch.tensor(ids[first + 1 :]))
    return summary(Scores([Passage("decoding", 0, ids, first + 1)], rows))


@torch.no_grad()
def check(
    plan: Plan, model: Transformer, full: Reference, noise: float | None, steps: int = STEPS
) -> DecodeCheck:
    """Whether decoding differs from reading a prompt, beyond rounding. noise: the reference's."""
    passage = full.passages[0]
    decoder, first, *both = both_ways(plan, model, passage.ids, steps)
    place = first + 1 - passage.first  # in the hidden states
    states = full.hidden[0][place : place + len(both[0])].to(plan.device)
    targets = torch.tensor(passage.ids[first + 1 :][: len(states)])
    if plan.spec.rounds_activations or plan.kv_cache != "dense":
        reference = full.head(states[None])[0]
        prompt, decoded = (compared(logits, reference, targets)["kl"] for logits in both)
        parts = torch.split(decoded - prompt, BLOCK)
        more = block_mean([part.sum().item() for part in parts], [len(part) for part in parts])
        low = more.ends()[0] if more.known_error is not None else more.mean
        kl = more.mean
    else:
        kl = low = compared(both[1], both[0], targets)["kl"].mean().item()
    limit, known = of_rounding(noise), kl if math.isfinite(kl) else None
    return DecodeCheck(decoder, len(targets), known, limit, differs=known is None or low > limit)


@torch.no_grad()
def likeliest(plan: Plan, model: Transformer, ids: list[int]) -> Likeliest:
    """What the model predicts behind each of the first COMPARED tokens."""
    ids = ids[:COMPARED]
    top = _logs(plan, model, ids).topk(TOP)
    logs = [[round(value, 4) for value in row] for row in top.values.tolist()]
    return Likeliest(ids, top.indices.tolist(), logs)


@torch.no_grad()
def divergence(plan: Plan, model: Transformer, judged: Likeliest) -> float:
    """KL(judged ‖ model), nats a token, with all other tokens as one."""
    own = _logs(plan, model, judged.ids).gather(1, torch.tensor(judged.tokens))
    p, q = (
        torch.cat([part, (1 - part.sum(1, keepdim=True)).clamp_min(LEAST)], 1)
        for part in (torch.tensor(judged.logs).double().exp(), own.exp())
    )
    return float((p * (p / q).log()).sum(1).mean())


def _logs(plan: Plan, model: Transformer, ids: list[int]) -> Tensor:
    """Logarithms of probabilities (n, V) behind each token, float64 on the CPU."""
    states = Reader(plan, model).hidden(Passage("", 0, [*ids, 0], 1))
    return model.logits(states[None])[0].cpu().double().log_softmax(-1)
