"""Whether decoding predicts what reading a prompt does: one window, both ways.

Quality is measured by reading text as prompts, hundreds of tokens at once; generating reads one
token a step, through other kernels. Here one window goes both ways: the decoder of the arm steps
over its last tokens one by one, and its predictions are compared with those of the prompt kernels.
Of full precision this is the noise floor: a KL that two kernels differ by shows no damage.

Two ways of adding up the same products differ by rounding. Where the logits of two distributions
differ by a relative ε, their divergence is of the order ε², and every layer adds to it:
layers · (ROUNDINGS · ε)². Beyond that, the two paths compute different things.
"""

import math

import torch

from quantbench.generate import Generator
from quantbench.models.llama import Transformer
from quantbench.quality.scores import Scores, compared, summary
from quantbench.quality.texts import Passage
from quantbench.quality.types import DecodeCheck, Quality
from quantbench.run.plan import Plan

STEPS = 32
# Measured on the embedded model with 35 schemes and caches, in units of ε a layer: 2 for weights in
# any format; 11 where activations or the cache are rounded to 8 bits or fewer, as values close to
# the middle of a step fall to either side. A stale row of the cache makes 16 and more.
ROUNDINGS, ROUNDINGS_OF_ACTIVATIONS = 6, 16
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
UNNOTICED = 1e-8  # nats that nobody can notice, though float32 has less


@torch.no_grad()
def both_ways(
    plan: Plan, model: Transformer, ids: list[int], steps: int = STEPS
) -> tuple[str, Quality]:
    """Predict the tokens `ids` twice, the last `steps` of the first 2 · steps + 1: by one prompt,
    which is the reference, and by decoding steps behind a prompt of the others. Returns the
    decoder's name and the steps' quality.

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
    rows = compared(torch.cat(logits), prompt, tokens[0, first + 1 :])
    passage = Passage("decoding", 0, ids, first + 1)
    return generator.decoder.name, summary(Scores([passage], rows))


def check(plan: Plan, model: Transformer, ids: list[int], steps: int = STEPS) -> DecodeCheck:
    """`both_ways`, and whether the difference is more than rounding."""
    decoder, found = both_ways(plan, model, ids, steps)
    assert found.kl is not None
    limit, kl = kl_of_rounding(plan), found.kl if math.isfinite(found.kl) else None
    return DecodeCheck(decoder, found.tokens, kl, limit, differs=kl is None or kl > limit)


def kl_of_rounding(plan: Plan) -> float:
    """The largest mean divergence, in nats, that rounding explains."""
    epsilon, units = UNIT_ROUNDOFF.get(plan.precision, 2.0**-8), ROUNDINGS
    # Kernels for quantized weights may add up in bfloat16 whatever the model's dtype.
    if str(plan.spec) != "none":
        epsilon = max(epsilon, 2.0**-8)
    if plan.spec.rounds_activations or plan.kv_cache != "dense":
        epsilon, units = max(epsilon, 2.0**-8), ROUNDINGS_OF_ACTIVATIONS
    return max(UNNOTICED, plan.architecture.num_layers * (units * epsilon) ** 2)
