"""Which experts a model's routers choose, recorded while it computes.

with recorded(model) as routing:
    model(tokens)
routing.passes[0][layer]                # tokens of each expert in that pass; () of a dense layer

popularity = profile(model, tokens, context=1024, text="heldout.txt")
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from quantbench.errors import UsageError
from quantbench.experts.popularity import Counts, Popularity, Routers, added
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


@dataclass
class Routing:
    """What the routers chose, pass by pass."""

    passes: list[Counts] = field(default_factory=list)


@contextlib.contextmanager
def recorded(model: Transformer) -> Iterator[Routing]:
    """Record how many tokens each expert gets, in every pass through the model's modules.

    A decoding step that one C++ op carries out calls no module, and is not recorded.
    """
    routing = Routing()
    dense: list[tuple[int, ...]] = [()] * len(model.layers)
    current: list[tuple[int, ...]] = []

    def choose(number: int, experts: int, output: tuple[Tensor, Tensor]) -> None:
        if len(current) > number:  # an earlier pass that an error ended
            current.clear()
        current.extend(dense[len(current) : number])
        current.append(tuple(tokens_per_expert(output[0], experts)))
        if number == last:
            routing.passes.append((*current, *dense[number + 1 :]))
            current.clear()

    def hook(number: int) -> Callable[[Router, object, tuple[Tensor, Tensor]], None]:
        return lambda router, _, output: choose(number, len(router.weight), output)

    routers = [(number, router) for number, router in enumerate(_by_layer(model)) if router]
    last = routers[-1][0] if routers else -1
    hooks = [router.register_forward_hook(hook(number)) for number, router in routers]
    try:
        yield routing
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
        with recorded(model) as routing:
            for window in torch.split(half, context):
                model.hidden(window[None])
                done += len(window)
                report(done, len(tokens))
        halves.append(reduce(added, routing.passes))
    return Popularity(routers, text, len(tokens), (halves[0], halves[1]))
