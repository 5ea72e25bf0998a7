"""int8wo and int8dq, with torchao's tensors and kernels.

torchao's configs change inductor's global settings unless told not to; here each Session chooses
its own, so that one run's scheme cannot change the next one's speed.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerRow,
    quantize_,
)
from torchao.quantization.transform_module import register_quantize_module_handler


def weight_only() -> AOBaseConfig:
    """Symmetric int8 weights with one scale per output row; activations stay as they are."""
    return Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False)


def weight_only_refuses(layer: nn.Linear) -> str | None:
    """Why torch's CPU product cannot be trusted with a layer, or None.

    Compiled, int8wo becomes aten._weight_int8pack_mm, which loads 16 weights at a time without a
    tail (torch 2.13): other widths read past the row, and give garbage or a segmentation fault.
    """
    if layer.weight.device.type == "cpu" and layer.in_features % 16:
        return (
            f"has in_features {layer.in_features}; on the CPU that has to be a multiple of 16 "
            "(int8dq takes any width)"
        )
    return None


@dataclass
class DynamicActivationConfig(AOBaseConfig):
    """The same weights; activations rounded to int8 per token, products summed in int32."""


@register_quantize_module_handler(DynamicActivationConfig)
def _dynamic_activation(module: nn.Linear, config: DynamicActivationConfig) -> nn.Module:
    stock = Int8DynamicActivationInt8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(module, stock, filter_fn=lambda m, _: m is module)
    rows = RowsLinear(module.in_features, module.out_features, module.bias is not None, "meta")
    rows.weight, rows.bias = module.weight, module.bias
    return rows


class RowsLinear(nn.Linear):
    """A linear layer that hands its kernel rows: (B, S, K) goes in as (B · S, K).

    Compiled for one token, torchao's int8dq calls torch._int_mm on a (1, K) view whose row stride
    inductor is free to set to 0, and on the CPU that product reads elsewhere in memory (torch
    2.13: errors of 1e4 times the result). A row that is two-dimensional from the start keeps its
    stride.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.flatten(0, -2), self.weight, self.bias)
        return y.unflatten(0, x.shape[:-1])
