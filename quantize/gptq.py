"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): codes that make up for one another's errors.

A layer's columns are rounded one after the other, and what rounding a column adds to the layer's
outputs, on a calibration text, is taken back by the columns that are not rounded yet.

    packed = scheme.quantize(w, spec)           # scales and zero points; they stay
    packed = refined(w, packed, hessian)        # other codes

Columns are taken in the order of their inputs' norms, largest first ("act-order"), while they are
still free to be corrected; -gptq-inorder takes them as they are. Groups keep their columns
("static groups"), so kernels see no order. torchao's prototype of GPTQ (0.18) runs on CUDA alone
and has neither of the two.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantbench.ops.formats import TABLES
from quantbench.ops.packing import pack
from quantbench.quantize.packed import PLANE_NAMES, PackedWeight

DAMPING = (0.01, 0.1, 1.0)  # added to the diagonal, times its mean, until there is an inverse
COLUMNS = 64  # corrected at once by those before them
ELEMENTS = 1 << 22  # of the rows that are rounded at once


def refined(
    w: Tensor, packed: PackedWeight, hessian: Tensor, act_order: bool = True
) -> PackedWeight | None:
    """`packed`, which holds w (N, K) rounded, with codes for the least ‖(W - Ŵ)X‖.

    hessian: XXᵀ, (K, K) float32. None if it has no inverse, even damped: if it is not finite, or
    zero.
    """
    inverse = inverse_of(hessian, act_order)
    return None if inverse is None else corrected(w, packed, inverse)


def inverse_of(hessian: Tensor, act_order: bool = True) -> tuple[Tensor, Tensor] | None:
    """What `corrected` goes by: the order of columns (K,), and the upper Cholesky factor of the
    inverse (K, K) in that order. None if there is none."""
    order = torch.arange(len(hessian), device=hessian.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    factor = _factor(hessian[order][:, order])
    return None if factor is None else (order, factor)


def corrected(w: Tensor, packed: PackedWeight, inverse: tuple[Tensor, Tensor]) -> PackedWeight:
    """`packed`, which holds w (N, K) rounded, with other codes."""
    order, factor = inverse
    levels, codes = _levels(packed)
    scale, zero = packed.parts.scales
    group = (order // packed.group_size).tolist()
    new_codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    for rows in torch.arange(len(w), device=w.device).split(max(1, ELEMENTS // w.shape[1])):
        chosen = _chosen(
            w[rows][:, order].float().T.contiguous(),
            factor,
            levels,
            scale[rows].T[group],
            torch.zeros(()).expand(len(group), 1) if zero is None else zero[rows].T[group],
        )
        new_codes[rows[:, None], order] = codes[chosen.T]
    planes = pack(new_codes, packed.bits)
    return packed.replaced(**dict(zip(PLANE_NAMES, planes, strict=False)))


def _chosen(rest: Tensor, factor: Tensor, levels: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The numbers of the levels (K, N) that the columns (K, N) become; `rest` is overwritten."""
    nearest, chosen = _nearest(levels), torch.empty_like(rest, dtype=torch.int32)
    for start in range(0, len(rest), COLUMNS):
        block = rest[start : start + COLUMNS]
        end, errors = start + len(block), torch.empty_like(block)
        for i, column in enumerate(block):
            j = start + i
            chosen[j] = nearest((column - zero[j]) / scale[j])
            rounded = levels[chosen[j]] * scale[j] + zero[j]
            errors[i] = (column - rounded) / factor[j, j]
            block[i + 1 :].addr_(factor[j, j + 1 : end], errors[i], alpha=-1)
        rest[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return chosen


def _nearest(levels: Tensor) -> Callable[[Tensor], Tensor]:
    """The numbers of the levels that are nearest to x (N,). A search is for levels at different
    distances alone: torch starts threads for it, however few rows there are."""
    least, step = levels[0], levels[1] - levels[0]
    if torch.equal(levels, least + step * torch.arange(len(levels), device=levels.device)):
        return lambda x: ((x - least) / step).round_().clamp_(0, len(levels) - 1)
    middles = (levels[1:] + levels[:-1]) / 2
    return lambda x: torch.bucketize(x, middles)


def _factor(hessian: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse of the damped Hessian; None if there is none."""
    mean = hessian.diagonal().mean()
    for damping in DAMPING if mean.isfinite() and mean > 0 else ():
        damped = hessian + torch.eye(len(hessian), device=hessian.device) * mean * damping
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed and upper.isfinite().all():
            return upper
    return None


def _levels(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """The numbers of the format's codes, ascending, and the codes in this order (uint8)."""
    count = 1 << packed.bits
    table = TABLES.get(packed.format) or range(-count // 2, count // 2)
    levels = torch.tensor([float(value) for value in table], device=packed.device)
    levels, order = levels.sort(stable=True)
    return levels, order.to(torch.uint8)
