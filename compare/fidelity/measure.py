"""What `python -m compare quality` measures; apart from the command, since it needs torch."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchlog.config import RunConfig
from benchlog.origin import git_commit, versions
from compare.fidelity import harness
from compare.fidelity.layer_sqnr import sqnr_of_layers
from compare.fidelity.reference_logits import reference
from compare.fidelity.scores import score, summary, through_cache, token_ids, window
from errors import UsageError
from models.checkpoints.saved import how_saved
from models.checkpoints.sources import locate
from run.loading import load
from run.plan import make_plan

Say = Callable[[str], None]


@torch.no_grad()
def measure(
    config: RunConfig,
    text: str | None,
    tokens: int,
    tasks: Sequence[str],
    limit: int | None,
    say: Say,
) -> dict[str, Any]:
    """Everything of the report, ready for JSON; SQNR of a layer that did not change is None."""
    if tasks:
        harness.check(tasks)
    if how_saved(locate(config.checkpoint_path)):
        raise UsageError(
            f"--checkpoint_path {config.checkpoint_path} was saved quantized; quality is measured "
            "against full precision: give that checkpoint, and --quantization"
        )
    plan = make_plan(config)
    ids = token_ids(plan, tokens, text)
    context = window(plan, tokens)
    ids = ids.to(plan.device)
    full = reference(plan.config, ids, context, say)
    say(f"{plan.spec} …")
    loaded = load(plan, lambda done, total: None, say)
    model = loaded.model
    scores = score(through_cache(plan, model, ids, context), full.open())
    found = summary(scores)
    seen = len(plan.tokenizer.decode(ids.tolist()).encode())
    seen -= len(plan.tokenizer.decode(ids[:1].tolist()).encode())
    bits = scores.nats.sum().item() / math.log(2)
    say("Each layer against its double in full precision …")
    layers = sqnr_of_layers(plan, model, plan.config.checkpoint_path, ids)
    return {
        "config": dataclasses.asdict(plan.config),
        "model": plan.name,
        "scheme": _name(plan.config, str(plan.spec)),
        "kernel": loaded.kernels,
        "window": context,
        "quality": {**found, "bits_per_byte": bits / seen},
        "full_precision_perplexity": full.perplexity,
        "noise_floor": full.noise_floor,
        "other_dtype": full.other_dtype,
        "layers": [
            {name: _finite(value) for name, value in dataclasses.asdict(layer).items()}
            for layer in layers
        ],
        "tasks": harness.evaluate(plan, model, tasks, limit, say) if tasks else {},
        "versions": versions(),
        "git_commit": git_commit(),
    }


def _name(config: RunConfig, scheme: str) -> str:
    cache = "int8" if config.kv_cache_quantization else config.kv_cache
    return scheme if cache == "dense" else f"{scheme}, {cache} KV cache"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value
