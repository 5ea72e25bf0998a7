"""Whether decoding predicts what reading a prompt does: one window, both ways.

Quality is measured by reading text as prompts, hundreds of tokens at once; generating reads one
token a step, through other kernels. Here one window goes both ways: the decoder of the arm steps
over its last tokens one by one, and its predictions are compared with those of the prompt kernels.

Two ways of adding up the same products differ by rounding. Where the logits of two distributions
differ by a relative ε, their divergence is of the order ε², and every layer adds to it:
layers · (ROUNDINGS · ε)². Beyond that, the two paths compute different things.
"""

import math

import torch
from torch import Tensor

from quantbench.generate import Generator
from quantbench.models.llama import Transformer
from quantbench.quality.types import DecodeCheck
from quantbench.run.plan import Plan

# Measured on the embedded model with 35 schemes and caches, in units of ε a layer: 2 for weights in
# any format; 11 where activations or the cache are rounded to 8 bits or fewer, as values close to
# the middle of a step fall to either side. A stale row of the cache makes 16 and more.
ROUNDINGS, ROUNDINGS_OF_ACTIVATIONS = 6, 16
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
UNNOTICED = 1e-8  # nats that nobody can notice, though float32 has less


@torch.no_grad()
def check(plan: Plan, model: Transformer, ids: Tensor, steps: int) -> DecodeCheck:
    """Predict the last `steps` of the tokens ids (N + 1,) twice, and compare: by one prompt, and
    by decoding step after step behind a prompt of the other tokens.

    The batch is one row, and nothing is compiled. `steps` is reduced where there are fewer tokens.
    """
    context = len(ids) - 1
    steps = min(steps, context - 1)
    config = plan.config
    generator = Generator(model, 1, context, plan.kv_cache, config.decoder)
    prompt = _logs(generator.forward(ids[None, :-1])[0, -steps:])
    generator.forward(ids[None, : context - steps])
    decoded = _logs(
        torch.cat(
            [
                generator.forward(ids[None, place : place + 1], place)[0]
                for place in range(context - steps, context)
            ]
        )
    )
    divergence = (prompt.exp() * (prompt - decoded)).sum(-1)
    targets = ids[-steps:, None].cpu()
    apart = (prompt - decoded).gather(-1, targets).mean()
    kl, limit = divergence.mean().clamp(min=0).item(), kl_of_rounding(plan)
    return DecodeCheck(
        decoder=generator.decoder.name,
        tokens=steps,
        kl=kl if math.isfinite(kl) else None,
        kl_max=divergence.max().clamp(min=0).item() if math.isfinite(kl) else None,
        perplexity_ratio=apart.exp().item() if math.isfinite(kl) else None,
        kl_of_rounding=limit,
        differs=not kl <= limit,  # also where it is not a number
    )


def kl_of_rounding(plan: Plan) -> float:
    """The largest mean divergence, in nats, that rounding explains."""
    epsilon, units = UNIT_ROUNDOFF.get(plan.precision, 2.0**-8), ROUNDINGS
    # Kernels for quantized weights may add up in bfloat16 whatever the model's dtype.
    if str(plan.spec) != "none":
        epsilon = max(epsilon, 2.0**-8)
    if plan.spec.rounds_activations or plan.kv_cache != "dense":
        epsilon, units = max(epsilon, 2.0**-8), ROUNDINGS_OF_ACTIVATIONS
    return max(UNNOTICED, plan.architecture.num_layers * (units * epsilon) ** 2)


def _logs(logits: Tensor) -> Tensor:
    return logits.cpu().double().log_softmax(-1)
