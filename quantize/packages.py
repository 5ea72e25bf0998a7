"""Kernels of other packages for CUDA: humming and gemlite. Nobody has compared them with ours on a
card yet, so they run where --kernel names them, or where autoquant has timed them.

humming  integers of 1 to 8 bits, E4M3, E3M2 and E2M1 in bfloat16; compiled by NVCC or NVRTC at the
         first product (https://github.com/vllm-project/humming)
gemlite  integers of 1, 2, 4 and 8 bits in 16-bit precisions; in Triton, tuned at the first product
         (https://github.com/dropbox/gemlite)
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from quantbench.errors import KernelError
from quantbench.ops.formats import Packed
from quantbench.ops.packing import unpack
from quantbench.quantize.activation import GROUPED
from quantbench.quantize.kernel import Kernel
from quantbench.quantize.packed import PackedWeight, product

HUMMING = {"fp8": "float8e4m3", "fp6": "float6e3m2", "fp4": "float4e2m1"}  # and uint1 to uint8
HUMMING_SCALES = {torch.float8_e8m0fnu: "float8e8m0", torch.float8_e4m3fn: "float8e4m3"}


class RowsLinear(nn.Module):
    """A package's layer of rows (M, K), and what it leaves to us: activations are rounded before
    it, a row's float32 scale and a group's zero are applied behind it, and the bias."""

    def __init__(
        self, inner: nn.Module, layer: nn.Linear, scale: Tensor | None, zero: Tensor | None
    ):
        """scale: (N, 1) of rows, or None. zero: (N, groups), added to weights, or None."""
        super().__init__()
        weight = cast(PackedWeight, layer.weight.data)
        self.inner, self.activation, self.bias = inner, weight.activation, layer.bias
        static = weight.activation_scale
        for name, part in (("scale", scale), ("zero", zero), ("activation_scale", static)):
            kept = None if part is None else nn.Parameter(part.float(), requires_grad=False)
            self.register_parameter(name, kept)

    def forward(self, x: Tensor) -> Tensor:
        def multiply(numbers: Tensor, _: Any) -> Tensor:
            rows = numbers.reshape(-1, numbers.shape[-1])
            y = self.inner(rows).float()
            y = y if self.scale is None else y * self.scale[:, 0]
            if self.zero is not None:
                sums = rows.float().unflatten(-1, (self.zero.shape[1], -1)).sum(-1)
                y = y + sums @ self.zero.T
            return y.view(*x.shape[:-1], -1)

        static = self.activation_scale
        return product(multiply, x, cast(Packed, None), self.activation, self.bias, static)


def codes_of(weight: Packed) -> Tensor:
    """(N, K) uint8 codes, those of integers from 0 on."""
    if weight.bits < 8:
        return unpack(weight.planes, weight.bits)
    codes = weight.planes[0].view(torch.uint8)
    return codes ^ 128 if weight.format == "int" else codes


def _humming(layer: nn.Linear, spec: Any) -> nn.Module:
    from humming import ops
    from humming.layer import HummingLayer

    weight = cast(PackedWeight, layer.weight.data)
    parts, (N, K) = weight.parts.plain, weight.shape
    by_row = parts.scale.shape[1] == 1
    config: dict[str, Any] = {"dtype": HUMMING.get(parts.format, f"uint{parts.bits}")}
    scale = torch.ones_like(parts.scale) if by_row else parts.scale
    config |= {} if by_row else {"group_size": parts.group_size}
    if scale.dtype in HUMMING_SCALES:
        config["scale_dtype"] = HUMMING_SCALES[scale.dtype]
    else:
        scale = scale.to(weight.dtype)
    packed = ops.pack_weight(codes_of(parts).int(), parts.bits)
    inner = HummingLayer(N, K, config, torch_dtype=weight.dtype).to(weight.device)
    inner.load_from_tensors({"weight": packed, "weight_scale": scale})
    inner.transform()
    rows = parts.scale.float() if by_row else None
    if parts.tensor_scale is not None:
        whole = parts.tensor_scale.float().expand(N, 1)
        rows = whole if rows is None else rows * whole
    return RowsLinear(inner, layer, rows, parts.zero)


def _gemlite(layer: nn.Linear, spec: Any) -> nn.Module:
    from gemlite.core import TORCH_TO_DTYPE, GemLiteLinearTriton

    weight = cast(PackedWeight, layer.weight.data)
    parts, (N, K) = weight.parts.plain, weight.shape
    dtype = TORCH_TO_DTYPE[weight.dtype]
    inner = GemLiteLinearTriton(
        parts.bits, parts.group_size, K, N, dtype, dtype, scaled_activations=False, bias=False
    )
    codes = parts.planes[0] if parts.bits == 8 else codes_of(parts)
    middle = None if parts.bits == 8 else float(1 << (parts.bits - 1))
    scale = parts.scale.float()
    inner.pack(codes, scale, None if middle is None else torch.full_like(scale, middle))
    return RowsLinear(inner, layer, None, parts.zero)


def _reason_of_humming(weight: Packed, rows: int, columns: int) -> str | None:
    if weight.format not in ("int", *HUMMING):
        return f"has weights of the format {weight.format}, which humming has not"
    if rows % 64 or columns % 64:
        return f"is {rows} by {columns}; humming takes multiples of 64"
    known = weight.scale.shape[1] == 1 or weight.scale.dtype in (torch.bfloat16, *HUMMING_SCALES)
    return None if known else f"has scales of {str(weight.scale.dtype)[6:]} for groups"


def _reason_of_gemlite(weight: Packed, rows: int, columns: int) -> str | None:
    if weight.format != "int" or weight.bits not in (1, 2, 4, 8):
        return f"has {weight.bits}-bit {weight.format}; gemlite takes int of 1, 2, 4 and 8 bits"
    if columns % 32 or weight.group_size < 16:
        return (
            "is not of columns in multiples of 32, in groups of 16 or more, as gemlite takes them"
        )
    return None


def _kernel(
    package: str,
    precisions: tuple[torch.dtype, ...],
    build: Callable[[nn.Linear, Any], nn.Module],
    reason: Callable[[Packed, int, int], str | None],
) -> Kernel:
    """package: its name on PyPI. reason: (a row of the weight on the meta device, N, K) -> why it
    does not take such a layer, or None."""
    module = package.partition("-")[0]

    def unavailable(spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"{module} needs a CUDA device"
        if dtype not in precisions:
            return f"{module} takes --precision {' or '.join(str(p)[6:] for p in precisions)}"
        if importlib.util.find_spec(module) is None:
            return f"the package {package} is not installed"
        return None

    def refuses(spec: Any, device: torch.device, in_features: int, out_features: int) -> str | None:
        from quantbench.quantize.registry import of_one_row

        weight = cast(PackedWeight, of_one_row(spec, in_features))
        if weight.activation == GROUPED:
            return "rounds activations in groups, to numbers that 16 bits do not hold"
        return reason(weight.parts.plain, out_features, in_features)

    def prepare() -> None:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a compiler or a driver that is missing makes it raise
            raise KernelError(f"{package} does not load: {error}") from None

    return Kernel(build, unavailable, refuses, prepare)


PACKAGES = {
    "humming": _kernel("humming-kernels", (torch.bfloat16,), _humming, _reason_of_humming),
    "gemlite": _kernel("gemlite", (torch.bfloat16, torch.float16), _gemlite, _reason_of_gemlite),
}
