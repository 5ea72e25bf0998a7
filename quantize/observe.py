"""What a text feeds to linear layers, summed up while it runs: what calibrated schemes go by; and
how far outputs are from exact ones."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

Statistic = Callable[[Tensor], Tensor]  # of a layer's inputs (T, K); sums over all T


def squares(x: Tensor) -> Tensor:
    """The squared norm of every feature, (K,)."""
    return x.norm(dim=0).square()


def products(x: Tensor) -> Tensor:
    """XᵀX (K, K): half the Hessian of a layer's squared error by the weights of a row."""
    return x.T @ x


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers in a module by name; "" is the module itself."""
    return {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}


def observed(
    linears: Mapping[str, nn.Linear], run: Callable[[], object], statistic: Statistic
) -> dict[str, Tensor]:
    """The statistic of each layer's inputs, float32, over all that `run` feeds.

    Zeros for a layer that gets nothing, such as an expert that no token takes.
    """
    sums = {
        name: torch.zeros_like(statistic(layer.weight.new_zeros(1, layer.in_features).float()))
        for name, layer in linears.items()
    }

    def add(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums[name] += statistic(inputs[0].float().flatten(0, -2))

    hooks = [layer.register_forward_pre_hook(partial(add, name)) for name, layer in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def decibels(exact: Tensor, y: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10 log10 of Σ exact² / Σ (y - exact)²: infinite if they
    are equal, NaN if y has one."""
    exact, y = exact.double(), y.double()
    ratio = exact.square().sum() / (y - exact).square().sum()
    return math.inf if torch.equal(exact, y) else 10 * ratio.log10().item()
