"""Rotary scaling: what becomes of the radians by which each pair of a head rotates per position;
and which layers rotate."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantbench.models.config import RopeScaling
from quantbench.models.config_checks import COUNT


def of_smollm3(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The config with the layers that rotate: as its class has it, all but each fourth."""
    layers, each = config.get("num_hidden_layers"), config.get("no_rope_layer_interval") or 4
    if config.get("no_rope_layers") is not None or not (COUNT.test(layers) and COUNT.test(each)):
        return dict(config)
    return {**config, "no_rope_layers": [int((i + 1) % each != 0) for i in range(layers)]}


def scaled(
    unscaled: Tensor, scaling: RopeScaling, theta: float = 0.0, length: Tensor | int = 0
) -> Tensor:
    """Radians per position (R/2,) of a scaled rotation from those of the plain one; arguments as
    for `frequencies`."""
    if scaling.kind == "linear":
        return unscaled / scaling.factor
    if scaling.kind == "proportional":
        rotates = torch.arange(len(unscaled), device=unscaled.device)
        return unscaled / scaling.factor * (rotates < int(scaling.share * len(unscaled)))
    if scaling.kind == "yarn":
        return _yarn(unscaled, scaling, theta)
    if scaling.kind == "longrope":
        short, long = (
            torch.tensor(factors, device=unscaled.device)
            for factors in (scaling.short_factors, scaling.long_factors)
        )
        is_long = torch.as_tensor(length, device=unscaled.device) > scaling.original_max_position
        return unscaled / torch.where(is_long, long, short)
    return unscaled if scaling.kind == "dynamic" else _llama3(unscaled, scaling)


def _yarn(unscaled: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): like Llama 3.1's, interpolated linearly in the
    pair's number."""
    width = 2 * len(unscaled)
    low, high = (
        width
        * math.log(scaling.original_max_position / (turns * 2 * math.pi))
        / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    pairs = torch.arange(len(unscaled), device=unscaled.device)
    slow = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    return unscaled * (1 - slow + slow / scaling.factor)


def _llama3(unscaled: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's context extension: slow rotations are divided by `factor`, fast ones stay.

    A slow rotation turns fewer than `low_freq_factor` times over the original context, a fast one
    more than `high_freq_factor` times. In between, the result is interpolated linearly in the
    number of turns. unscaled: radians per position, (E/2,).
    """
    turns = scaling.original_max_position * unscaled / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return unscaled * (blend + (1 - blend) / scaling.factor)
