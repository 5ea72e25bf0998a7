"""Which experts a model's routers choose, counted while it computes.

popularity = profile(model, tokens, context=1024, text="heldout.txt")
popularity.counts[layer]                # assignments of each expert; () for a dense layer
"""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quantbench.errors import UsageError
from quantbench.experts.popularity import Popularity, Routers
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.mixtral import Router, tokens_per_expert

DIGITS = 16  # of a digest


def routers_of(config: ModelConfig) -> Routers:
    """The routers of an architecture, without digests: the weights are not read.

    Raises UsageError for a model without experts.
    """
    mixture = config.mixture
    layers = range(config.num_layers)
    if mixture is None or all(map(mixture.is_dense, layers)):
        raise UsageError(
            f"{config.name} is no mixture of experts: no layer has any; give a model such as "
            "tiny_moe or Mixtral-8x7B"
        )
    return Routers(
        model=config.name,
        num_experts=mixture.num_experts,
        experts_per_token=mixture.experts_per_token,
        dense_layers=tuple(filter(mixture.is_dense, layers)),
        digests=("",) * config.num_layers,
    )


def identity(model: Transformer) -> Routers:
    """The routers of a loaded model, with their digests. UsageError for one without experts."""
    digests = ["" if router is None else digest(router.weight) for router in _by_layer(model)]
    return replace(routers_of(model.config), digests=tuple(digests))


def digest(weight: Tensor) -> str:
    """A digest of the signs of a weight.

    Rounding to another dtype does not change a sign, so all precisions of a model have one digest.
    """
    signs = torch.signbit(weight.detach()).cpu().contiguous().numpy()
    return hashlib.sha256(signs.tobytes()).hexdigest()[:DIGITS]


def _by_layer(model: Transformer) -> list[Router | None]:
    """Each layer's router; None for a layer without experts."""
    routers = ((m for m in layer.modules() if isinstance(m, Router)) for layer in model.layers)
    return [next(of_layer, None) for of_layer in routers]


@torch.no_grad()
def profile(
    model: Transformer,
    tokens: Tensor,
    context: int,
    text: str,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Popularity:
    """Count the experts that a text's tokens (N,) are sent to, in both halves of the text.

    context: positions of a window; windows follow one another. text: its name. report: called as
    (tokens done, N), N at least 2. Raises UsageError for a model without experts.
    """
    routers = identity(model)
    counts: list[list[int]] = []

    def add(layer: int, router: Router, _: object, output: tuple[Tensor, Tensor]) -> None:
        counted = tokens_per_expert(output[0], len(router.weight))
        counts[layer] = [a + b for a, b in zip(counts[layer], counted, strict=True)]

    middle, done, halves = len(tokens) // 2, 0, []
    with contextlib.ExitStack() as hooks:
        for layer, router in enumerate(_by_layer(model)):
            if router is not None:
                hooks.callback(router.register_forward_hook(partial(add, layer)).remove)
        for half in (tokens[:middle], tokens[middle:]):
            counts[:] = [[0] * experts for experts in routers.experts]
            for window in torch.split(half, context):
                model.hidden(window[None])
                done += len(window)
                report(done, len(tokens))
            halves.append(tuple(map(tuple, counts)))
    return Popularity(routers, text, len(tokens), (halves[0], halves[1]))
