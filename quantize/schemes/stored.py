"""What a checkpoint's file holds already: weights as GGUF, GPTQ, AWQ and others quantized them."""

import torch
from torch import Tensor

from quantbench.errors import KernelError
from quantbench.ops.formats import OUTER
from quantbench.ops.packing import PLANES
from quantbench.quantize.activation import STATIC
from quantbench.quantize.kernels import our_kernels
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.recipe import Recipe
from quantbench.quantize.scheme import Scheme
from quantbench.quantize.spec import AsIs, Stored

_DTYPES = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}


def quantize(w: Tensor, spec: Stored) -> PackedWeight:
    """The parts to read from the file, on the meta device."""
    if not w.is_meta:
        raise KernelError(f"--quantization {spec}: only a checkpoint's file has weights like that")
    rows, columns = w.shape

    def part(name: str, *shape: int) -> Tensor:
        return w.new_empty(shape, dtype=_DTYPES.get(name) or getattr(torch, name))

    group_size = spec.group_size or columns
    groups = columns // group_size
    codes = {"int": "int8", "fp8": "e4m3"}.get(spec.format, "uint8") if spec.bits == 8 else "uint8"
    packed = PackedWeight.make(
        w,
        [part(codes, rows, columns * width // 8) for width in PLANES[spec.bits]],
        part(spec.scale, rows, groups),
        *(spec.format, spec.bits, group_size),
        zero=None if spec.zero == "none" else part(spec.zero, rows, groups),
        tensor_scale=part("float32") if spec.whole else None,
        outer=part("float16", rows, columns // OUTER, 2) if spec.outer else None,
    )
    static = part("float32") if spec.activation in STATIC else None
    return packed.replaced(activation=spec.activation or None, activation_scale=static)


def _refuses(spec: Stored, in_features: int) -> str | None:
    unit = OUTER if spec.outer else spec.group_size or 8
    if in_features % unit == 0:
        return None
    return f"has in_features {in_features}, no multiple of {unit}"


def _of_layers(w: Tensor, spec: AsIs) -> PackedWeight:
    raise KernelError(f"--quantization {spec} is for a checkpoint whose file is quantized")


SCHEMES = {
    AsIs: Scheme(_of_layers, our_kernels()),
    Recipe: Scheme(_of_layers, our_kernels()),
    Stored: Scheme(quantize, our_kernels(), _refuses),
}
