"""The model that drafts tokens for a planned run: --speculate self or draft."""

import dataclasses

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig, Unsaid
from quantbench.models.llama import Transformer
from quantbench.models.tokenizer import other_encoding
from quantbench.progress import progress, say
from quantbench.run import loading, sizes
from quantbench.run.plan import Plan, make_plan

SELF = "int4wo-64"  # what drafts for the same weights in more bits
MOST_COST = (
    0.8  # bytes that a drafted token reads ÷ those of a step, for weights to draft for itself
)


def load(plan: Plan) -> Transformer:
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
