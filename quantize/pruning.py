"""Which weights matter, judged by what they multiply: Wanda (Sun et al. 2023, arXiv:2306.11695).

Two of every four weights in a row stay: those with the largest |weight| · ‖input feature‖, the norm
taken over a calibration text. torchao's WandaSparsifier does the same, but for two things: its
observer hands it squares of norms (torchao 0.18), which prune by another measure than the paper's;
and its masks and sorting take twelve times a layer's memory, and most of the time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.sparsity.utils import PerChannelNormObserver

from quantbench.quantize.scheme import rows_at_once
from quantbench.quantize.sparsity import kept_of_four


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
    observers = {name: PerChannelNormObserver() for name in linears}

    def observing(observer: PerChannelNormObserver) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            observer(inputs[0].float())

        return hook

    hooks = [
        layer.register_forward_pre_hook(observing(observers[name]))
        for name, layer in linears.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: observer.norm.sqrt()
        if observer.norm.numel()
        else torch.ones(linears[name].in_features, device=linears[name].weight.device)
        for name, observer in observers.items()
    }


def prune(layer: nn.Linear, norms: Tensor) -> None:
    """Zero two of every four weights of a layer, in place."""
    for block in layer.weight.data.split(rows_at_once(layer.weight)):
        kept = torch.stack(kept_of_four(block.abs() * norms), -1).flatten(-2)
        block.masked_fill_(~kept, 0)
