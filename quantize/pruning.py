"""Which weights matter, judged by what they multiply: Wanda (Sun et al. 2023, arXiv:2306.11695).

Two of every four weights in a row stay: those with the largest |weight| · ‖input feature‖, the norm
taken over a calibration text. torchao's WandaSparsifier does it, with two things of ours around it:
it works on some rows at a time, since its masks and sorting take twelve times a layer's memory; and
it gets norms where its own observer would hand it their squares (torchao 0.18), which prunes by
another measure than the paper's.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.sparsity.utils import PerChannelNormObserver
from torchao.sparsity.wanda import WandaSparsifier

from quantize.scheme import rows_at_once


def prune_linears(module: nn.Module, run: Callable[[], object]) -> None:
    """Zero half the weights of every linear layer in `module`, in place, by what `run` feeds it."""
    linears = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    norms = input_norms(linears, run)
    for name, layer in linears.items():
        prune(layer, norms[name])


def input_norms(linears: dict[str, nn.Linear], run: Callable[[], object]) -> dict[str, Tensor]:
    """For each layer, the norm of every input feature, (K,) float32, over all that `run` feeds.

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
        block.copy_(_pruned(block, norms))


def _pruned(weight: Tensor, norms: Tensor) -> Tensor:
    holder = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], False, "meta"))
    holder[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it announces its own block size, and a deprecation
        sparsifier = WandaSparsifier(semi_structured_block_size=4)
        sparsifier.prepare(holder, [{"tensor_fqn": "0.weight"}])
        holder[0].activation_post_process.norm = norms
        sparsifier.step()
        sparsifier.squash_mask()
    return holder[0].weight.data
