"""Which weights matter, judged by what they multiply: Wanda (Sun et al. 2023, arXiv:2306.11695).

Two of every four weights in a row stay: those with the largest |weight| · ‖input feature‖, the norm
taken over a calibration text. torchao's WandaSparsifier does the same, but for two things: its
observer hands it squares of norms (torchao 0.18), which prune by another measure than the paper's;
and its masks and sorting take twelve times a layer's memory, and most of the time.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quantbench.quantize.scheme import rows_at_once


def prune_linears(module: nn.Module, run: Callable[[], object]) -> None:
    """Zero half the weights of every linear layer in `module`, in place, by what `run` feeds it."""
    linears = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    norms = input_norms(linears, run)
    for name, layer in linears.items():
        prune(layer, norms[name])


def input_norms(linears: dict[str, nn.Linear], run: Callable[[], object]) -> dict[str, Tensor]:
    """The norm of every input feature, (K,) float32, by layer, over all that `run` feeds.

    For a layer that gets nothing, such as an expert that no token takes, the norms are ones: then
    the weights alone decide.
    """
    squares = {
        name: torch.zeros(layer.in_features, device=layer.weight.device)
        for name, layer in linears.items()
    }

    def observing(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares[name] += inputs[0].float().flatten(0, -2).norm(dim=0).square()

        return hook

    hooks = [layer.register_forward_pre_hook(observing(name)) for name, layer in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: total.sqrt() if total.any() else torch.ones_like(total)
        for name, total in squares.items()
    }


def prune(layer: nn.Linear, norms: Tensor) -> None:
    """Zero two of every four weights of a layer, in place."""
    for block in layer.weight.data.split(rows_at_once(layer.weight)):
        kept = torch.stack(kept_of_four(block.abs() * norms), -1).flatten(-2)
        block.masked_fill_(~kept, 0)


def kept_of_four(sizes: Tensor) -> list[Tensor]:
    """Which of every four neighbouring columns are the two largest; the first ones among equals.
    sizes (N, K) → for the first to the fourth column, (N, K / 4) bool.

    Each is compared with each, which takes a fifth of the time of sorting them.
    """
    four = sizes.unflatten(-1, (-1, 4)).unbind(-1)
    larger = [torch.zeros_like(four[0], dtype=torch.uint8) for _ in four]  # how many others are
    for i, j in itertools.combinations(range(4), 2):
        first_wins = four[i] >= four[j]
        larger[j] += first_wins.view(torch.uint8)
        larger[i] += (~first_wins).view(torch.uint8)
    return [count < 2 for count in larger]
