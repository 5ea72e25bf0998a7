"""uintx-N-G: N-bit weights in groups of G columns, each with a scale and a zero point.

    w ≈ (code - 2**(N - 1)) · scale + zero

which is torchao's "tinygemm" convention; its zero point is a number, not a code, so that a group
far from zero loses nothing. -hqq chooses scale and zero by half-quadratic optimization (Badri and
Shaji 2023, https://mobiusml.github.io/hqq_blog), which gives up outliers for a better fit, or from
a narrower range where that errs less, and refits them to the codes by least squares.
"""

import torch
from torch import Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _choose_qparams_and_quantize_affine_hqq,
)

from ops.packing import pack
from quantize.kernels import our_kernels
from quantize.packed import PackedWeight
from quantize.scheme import Scheme, groups_refuse, in_range, in_row_blocks
from quantize.spec import Int4WeightOnly, UintX

NARROWER = (0.95, 0.9, 0.85, 0.8, 0.7)  # of the range that a group spans, beside HQQ's choice
# Of HQQ: the norm whose errors are minimized, the first weight of the proximal term, its growth.
NORM, BETA, KAPPA, ITERATIONS = 0.7, 10.0, 1.01, 20
REFITS = 3  # of scale and zero to the codes by least squares, after HQQ
# The scale of a group of equal weights, which has no range. About torchao's 1e-6, but this and its
# multiples are exact in 16 bits, so that zeros stay zeros.
SMALLEST_SCALE = 2.0**-20


def quantize(w: Tensor, spec: UintX) -> PackedWeight:
    return in_row_blocks(lambda rows: grouped(rows, spec.bits, spec.group_size, spec.hqq), w)


def grouped(w: Tensor, bits: int, group_size: int, hqq: bool) -> PackedWeight:
    """Weights (N, K) in groups along K; scale and zero are (N, K // group_size), 16 bits each."""
    dtype = torch.float16 if w.dtype == torch.float16 else torch.bfloat16
    most = torch.finfo(dtype).max
    scale, zero = (x.clamp(max=most).to(dtype) for x in _from_range(w, bits, group_size))
    if hqq and not w.is_meta:
        centre = zero - scale * 0.5  # of the range, for an even number of codes
        narrower = [(scale * part, (centre + scale * part * 0.5)) for part in NARROWER]
        best = _Best(w, bits, scale, zero)
        for pair in (_from_hqq(w, bits, group_size), *narrower):
            best.try_pair(*(x.to(dtype) for x in pair))
        for _ in range(REFITS):
            best.try_pair(*_refitted(w, bits, best.scale, best.zero))
        scale, zero = best.scale, best.zero
    codes = _codes(w, bits, group_size, scale, zero).to(torch.uint8)
    return PackedWeight.make(
        pack(codes, bits),
        scale,
        format="int",
        bits=bits,
        columns=w.shape[1],
        dtype=w.dtype,
        group_size=group_size,
        zero=zero,
    )


def _from_range(w: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, (N, K // group_size) float32, that span each group from least to most."""
    scale, zero = _choose_qparams_affine_tinygemm(
        in_range(w),
        MappingType.ASYMMETRIC,
        (1, group_size),
        torch.uint8,
        quant_min=0,
        quant_max=2**bits - 1,
        eps=SMALLEST_SCALE,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.float32,
    )
    return scale.reshape(w.shape[0], -1), zero.reshape(w.shape[0], -1)  # a lone group is squeezed


def _from_hqq(w: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Scale and zero, (N, K // group_size) float32, by half-quadratic optimization.

    torchao's numbers bit for bit (_choose_qparams_and_quantize_affine_hqq), in place: on the CPU
    it takes most of the time of loading such a model.
    """
    if w.device.type != "cpu":
        _, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
            w, bits, group_size, compute_dtype=torch.float32, device=w.device
        )
        return scale.reshape(w.shape[0], -1), zero.reshape(w.shape[0], -1)
    most, groups = 2**bits - 1, w.float().reshape(-1, group_size)
    low, high = groups.aminmax(dim=1, keepdim=True)
    steps = (most / (high - low)).clamp(max=2e4)  # for a unit of weight: 1 / scale
    zero = -low * steps
    if bits == 4:
        zero = zero.round()
    beta, least = BETA, 1e4
    codes, error, shrunk = (torch.empty_like(groups) for _ in range(3))
    for _ in range(ITERATIONS):
        torch.mul(groups, steps, out=codes).add_(zero).round_().clamp_(0, most)
        torch.sub(codes, zero, out=error).div_(steps)
        torch.sub(groups, error, out=error)
        torch.pow(torch.abs(error, out=shrunk), NORM - 1, out=shrunk).mul_(1.0 / beta)
        size = error.abs()
        torch.sub(size, shrunk, out=shrunk).relu_().copysign_(error)
        torch.sub(groups, shrunk, out=shrunk).mul_(steps)
        zero = torch.sub(codes, shrunk, out=shrunk).mean(1, keepdim=True)
        beta *= KAPPA
        mean = float(size.mean())
        if mean >= least:
            break
        least = mean
    scale = 1.0 / steps
    shape = w.shape[0], -1
    return scale.reshape(shape), (((most + 1) / 2 - zero) * scale).reshape(shape)


def _refitted(w: Tensor, bits: int, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and zero of least squares for the codes that scale and zero lead to."""
    group_size = w.shape[1] // scale.shape[1]
    codes = _codes(w, bits, group_size, scale, zero).unflatten(-1, (-1, group_size))
    codes, groups = codes - (1 << (bits - 1)), w.float().unflatten(-1, (-1, group_size))
    centred = codes - codes.mean(-1, keepdim=True)
    spread = centred.square().sum(-1)
    slope = (centred * groups).sum(-1) / spread.clamp(min=1e-6)
    slope = torch.where(spread > 0, slope, scale.float())
    return slope.to(scale.dtype), (groups.mean(-1) - slope * codes.mean(-1)).to(zero.dtype)


class _Best:
    """For each group that pair (scale, zero) of those tried which has the least squared error.

    HQQ minimizes errors to the power 0.7, which here and there is worse in their squares.
    """

    def __init__(self, w: Tensor, bits: int, scale: Tensor, zero: Tensor) -> None:
        self.w, self.bits, self.scale, self.zero = w, bits, scale, zero
        self.error = _error(w, bits, scale, zero)

    def try_pair(self, scale: Tensor, zero: Tensor) -> None:
        error = _error(self.w, self.bits, scale, zero)
        better = (error < self.error) & (scale > 0)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        self.error = torch.where(better, error, self.error)


def _error(w: Tensor, bits: int, scale: Tensor, zero: Tensor) -> Tensor:
    """The squared error of every group, (N, K // group_size)."""
    group_size = w.shape[1] // scale.shape[1]
    codes = _codes(w, bits, group_size, scale, zero).unflatten(-1, (-1, group_size))
    numbers = (
        codes.sub_(1 << (bits - 1)).mul_(scale.float()[..., None]).add_(zero.float()[..., None])
    )
    return numbers.sub_(w.float().unflatten(-1, (-1, group_size))).square_().sum(-1)


def _codes(w: Tensor, bits: int, group_size: int, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest codes (N, K), for the scale and zero that will be stored."""
    groups = w.float().unflatten(-1, (-1, group_size))
    steps = (groups - zero.float()[..., None]).div_(scale.float()[..., None])
    return steps.round_().add_(1 << (bits - 1)).clamp_(0, 2**bits - 1).flatten(-2)


def hqq_needs_all_rows(spec: UintX | Int4WeightOnly) -> bool:
    """HQQ stops when the error of all rows that it is given gets no smaller."""
    return spec.hqq


SCHEMES = {UintX: Scheme(quantize, our_kernels(), groups_refuse, hqq_needs_all_rows)}
