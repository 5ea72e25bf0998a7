"""The error of each linear layer: its SQNR against the same layer in full precision."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from quantbench.models.llama import Transformer
from quantbench.models.loading import load_model
from quantbench.quality.types import LayerSqnr
from quantbench.quantize.observe import decibels
from quantbench.run.plan import Plan

COLUMNS = 128  # sampled per weight; the error does not vary by column
OF_LAYERS = 64  # tokens that each layer is compared on


@torch.no_grad()
def sqnr_of_layers(plan: Plan, model: Transformer, ids: list[int]) -> list[LayerSqnr]:
    """Every linear layer of the plan's model, in order, against the plan's checkpoint, on the text
    `ids`: SQNR of its weights and outputs.

    The checkpoint is read in full precision, layer by layer, and each layer is compared with the
    quantized one's inputs: the two models are not in memory together because of it.
    Experts in two tiers of memory are left out: their weights are not in the model's modules.
    None of AWQ's layers can be compared: they take scaled inputs, and change layers before them."""
    if any(spec.way == "awq" for spec in plan.spec.candidates):
        return []
    inputs: dict[str, Tensor] = {}  # (1, n, K), by the layer's name
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if module in names and given:
            inputs[names[module]] = given[0]

    hook = register_module_forward_pre_hook(keep)
    try:
        model(torch.tensor([ids[:OF_LAYERS]], device=plan.device))
    finally:
        hook.remove()
    layers: list[LayerSqnr] = []

    def compare(name: str, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear) and name in inputs:
            weight: Any = module.weight
            x, quantized = inputs.pop(name).flatten(0, -2), model.get_submodule(name)
            columns = torch.linspace(0, weight.shape[1] - 1, min(COLUMNS, weight.shape[1])).long()
            # Each input selects a column: a single 1, which activations in 8 bits hold exactly.
            selecting = nn.functional.one_hot(columns, weight.shape[1]).to(weight)
            pairs = (weight[:, columns].T, selecting), (nn.functional.linear(x, weight), x)
            bias = 0 if module.bias is None else module.bias
            layers.append(LayerSqnr(name, *(_sqnr(y, quantized(x) - bias) for y, x in pairs)))
        return nn.Identity()  # this model is never run: free its weights

    precision = getattr(torch, plan.config.precision)
    load_model(plan.checkpoint, plan.device, precision, plan.config.num_layers, compare)
    return layers


def _sqnr(expected: Tensor, found: Tensor) -> float | None:
    """Of outputs without the bias, which is not quantized and would count as signal."""
    sqnr = decibels(expected, found)
    return None if math.isinf(sqnr) else sqnr
