"""Which experts a model's routers choose, counted while it computes.

with counting(model) as counts:
    model(tokens)
counts[layer]                           # tokens of each expert; [] of a dense layer

popularity = profile(model, tokens, context=1024, text="heldout.txt")
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantbench.errors import UsageError
from quantbench.experts.popularity import Popularity, Routers
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.mixtral import Router, tokens_per_expert

Report = Callable[[int, int], None]
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
    routers = _by_layer(model)
    digests = ["" if router is None else digest(router.weight) for router in routers]
    return replace(routers_of(model.config), digests=tuple(digests))


def digest(weight: Tensor) -> str:
    """A digest of the signs of a weight.

    Rounding to another dtype keeps every sign, so that a model has one digest in all precisions.
    """
    signs = torch.signbit(weight.detach()).cpu().contiguous().numpy()
    return hashlib.sha256(signs.tobytes()).hexdigest()[:DIGITS]


def _by_layer(model: Transformer) -> list[Router | None]:
    """Each layer's router; None for a layer without experts."""
    return [
        next((module for module in layer.modules() if isinstance(module, Router)), None)
        for layer in model.layers
    ]


@contextlib.contextmanager
def counting(model: Transformer) -> Iterator[list[list[int]]]:
    """Count the tokens of each expert of each layer, in every pass through the model's modules.

    A decoding step that one C++ op carries out calls no module, and is not counted.
    """
    routers = _by_layer(model)
    counts = [[0] * (0 if router is None else len(router.weight)) for router in routers]

    def hook(number: int) -> Callable[[Router, object, tuple[Tensor, Tensor]], None]:
        def add(router: Router, _: object, output: tuple[Tensor, Tensor]) -> None:
            more = tokens_per_expert(output[0], len(router.weight))
            counts[number] = [a + b for a, b in zip(counts[number], more, strict=True)]

        return add

    hooks = [r.register_forward_hook(hook(number)) for number, r in enumerate(routers) if r]
    try:
        yield counts
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def profile(
    model: Transformer,
    tokens: Tensor,
    context: int,
    text: str,
    report: Report = lambda done, total: None,
) -> Popularity:
    """Count the experts that a text's tokens (N,) are sent to, in both halves of the text.

    context: positions of a window; windows follow one another. text: its name. report: called as
    (tokens done, N). Raises UsageError for a model without experts and for fewer than two tokens.
    """
    routers = identity(model)
    if len(tokens) < 2:
        raise UsageError(f"{text}: {len(tokens)} tokens are too few to count experts; give more")
    middle, done, halves = len(tokens) // 2, 0, []
    for half in (tokens[:middle], tokens[middle:]):
        with counting(model) as counts:
            for window in torch.split(half, context):
                model.hidden(window[None])
                done += len(window)
                report(done, len(tokens))
        halves.append(tuple(map(tuple, counts)))
    return Popularity(routers, text, len(tokens), (halves[0], halves[1]))
