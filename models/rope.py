"""Rotary embeddings (https://arxiv.org/abs/2104.09864), and how they reach beyond the context of
the first training.

    frequencies(spec, pairs, width, device)     # radians by which each pair rotates per position

Each kind of scaling is that of its name in Hugging Face's config.json.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quantbench.models.config import LayerSpec, RopeScaling


def frequencies(
    spec: LayerSpec,
    pairs: int,
    width: int,
    device: torch.device | str,
    positions: Tensor | None = None,
) -> Tensor:
    """Radians by which each pair of a head rotates per position, (pairs,) float32.

    width: elements of a head that rotate; the pairs behind them do not. positions: (S,), of which
    longrope takes the last; None: within the original context.
    """
    if spec.rope_theta is None:
        return torch.zeros(pairs, device=device)
    exponents = torch.arange(0, width, 2, device=device) / width
    unscaled = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is not None:
        how = spec.rope_scaling
        unscaled = _KINDS[how.kind](unscaled, how, spec.rope_theta, positions)
    return F.pad(unscaled, (0, pairs - width // 2))


def llama3(unscaled: Tensor, how: RopeScaling, *_: object) -> Tensor:
    """Llama 3.1: slow rotations are divided by `factor`, fast ones stay.

    A slow rotation turns fewer than `low_freq_factor` times over the original context, a fast one
    more than `high_freq_factor` times. In between, the result is interpolated linearly in the
    number of turns. unscaled: radians per position, (pairs,).
    """
    turns = how.original_max_position * unscaled / (2 * math.pi)
    blend = (turns - how.low_freq_factor) / (how.high_freq_factor - how.low_freq_factor)
    blend = blend.clamp(0, 1)
    return unscaled * (blend + (1 - blend) / how.factor)


def _linear(unscaled: Tensor, how: RopeScaling, *_: object) -> Tensor:
    return unscaled / how.factor


def _dynamic(unscaled: Tensor, *_: object) -> Tensor:
    """Within the trained context nothing changes; a longer cache is refused (generate.py)."""
    return unscaled


def _yarn(unscaled: Tensor, how: RopeScaling, theta: float, *_: object) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): as llama3, but interpolated by the pair's number.
    high_freq_factor is its beta_fast, low_freq_factor its beta_slow."""
    pairs = len(unscaled)

    def pair_of(turns: float) -> float:
        context = how.original_max_position / (turns * 2 * math.pi)
        return pairs * math.log(context) / math.log(theta)

    low, high = pair_of(how.high_freq_factor), pair_of(how.low_freq_factor)
    if how.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    number = torch.arange(pairs, device=unscaled.device, dtype=torch.float32)
    slow = ((number - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return unscaled / how.factor * slow + unscaled * (1 - slow)


def _longrope(unscaled: Tensor, how: RopeScaling, theta: float, positions: Tensor | None) -> Tensor:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a divisor for each pair, other ones once the
    sequence is longer than the original context."""
    short, long = (torch.tensor(each, device=unscaled.device) for each in (how.short, how.long))
    if positions is None:
        return unscaled / short
    return unscaled / torch.where(positions[-1] < how.original_max_position, short, long)


Scaled = Callable[[Tensor, RopeScaling, float, Tensor | None], Tensor]
_KINDS: dict[str, Scaled] = {
    "llama3": llama3, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip
