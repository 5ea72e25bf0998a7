"""From a spec to what carries it out: each scheme's quantizer and kernels, and how to apply them.

quantize_(model, QuantizeConfig(parse("int4wo-64")))            # torchao's way, any model
model = load_model(path, transform=Quantizer(spec, device))     # ours, layer by layer
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from errors import CheckpointError, KernelError
from quantize.packed import PackedWeight
from quantize.scheme import Kernel, Scheme
from quantize.schemes import (
    bitsandbytes,
    float8,
    fp4,
    fp6,
    full_precision,
    int4,
    int8,
    sparse_marlin,
    uintx,
)
from quantize.spec import (
    BitsAndBytes,
    Float6,
    Float8DynamicActivation,
    Float8WeightOnly,
    FullPrecision,
    Int4WeightOnly,
    Int8DynamicActivation,
    Int8DynamicActivationInt4Weight,
    Int8Embedding,
    Int8WeightOnly,
    MxFloat4,
    NvFloat4,
    SparseMarlin,
    Spec,
    UintX,
)

SCHEMES: dict[type[Spec], Scheme] = {
    FullPrecision: full_precision.SCHEME,
    Int8WeightOnly: int8.WEIGHT_ONLY,
    Int8DynamicActivation: int8.DYNAMIC,
    Int4WeightOnly: int4.WEIGHT_ONLY,
    Int8DynamicActivationInt4Weight: int4.DYNAMIC,
    Float8WeightOnly: float8.WEIGHT_ONLY,
    Float8DynamicActivation: float8.DYNAMIC,
    Float6: fp6.SCHEME,
    UintX: uintx.SCHEME,
    SparseMarlin: sparse_marlin.SCHEME,
    MxFloat4: fp4.MX,
    NvFloat4: fp4.NV,
    Int8Embedding: int8.WEIGHT_ONLY,
    BitsAndBytes: bitsandbytes.SCHEME,
}

# One of each kind, for tables: what a person chooses from.
SHOWN = (
    *("none", "int8wo", "int8dq", "embed-int8", "float8wo", "float8dq-row", "float8dq-tensor"),
    *("fp6", "int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256", "int4wo-64-hqq"),
    *("int4wo-256-hqq", "int8dq-int4wo-32", "mxfp4", "nvfp4", "bnb-int8", "bnb-nf4", "bnb-fp4"),
    *("uintx-7-64", "uintx-5-64", "uintx-4-64", "uintx-3-64", "uintx-3-64-hqq", "uintx-2-8"),
    *("uintx-2-64", "uintx-2-64-hqq", "uintx-1-64", "sparse-marlin", "sparse-marlin-wanda"),
)

MEASURED = ("autoquant", "autoquant-int4")  # what they are is known only after measuring


def available(spec: Spec, device: torch.device, dtype: torch.dtype) -> dict[str, str | None]:
    """Per kernel of the scheme, fastest first: why it cannot run there, or None if it can."""
    kernels = SCHEMES[type(spec)].kernels
    return {name: kernel.unavailable(spec, device, dtype) for name, kernel in kernels.items()}


def kernels_for(spec: Spec, kernel: str, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The kernels that a layer may get, best first: the one named, or all that run there.

    Raises KernelError, with the reason and what would work, if there is none.
    """
    reasons = available(spec, device, dtype)
    running = [name for name, reason in reasons.items() if reason is None]
    if kernel == "auto" and running:
        return running
    works = f"here it has {', '.join(running)}" if running else "it has no other here"
    if kernel == "auto":
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise KernelError(f"{spec} has no kernel for {device.type}: {why}")
    if kernel not in reasons:
        raise KernelError(f"--kernel {kernel}: {spec} has no such kernel; {works} (or auto)")
    if reasons[kernel]:
        raise KernelError(f"--kernel {kernel}: {spec}: {reasons[kernel]}; {works} (or auto)")
    return [kernel]


@dataclass
class QuantizeConfig(AOBaseConfig):
    """torchao's handle on every scheme here: what `torchao.quantize_` takes."""

    spec: Spec
    kernel: str = "auto"


@register_quantize_module_handler(QuantizeConfig)
def _apply(module: nn.Module, config: QuantizeConfig) -> nn.Module:
    weight = module.weight
    quantizer = Quantizer(config.spec, weight.device, weight.dtype, config.kernel)
    return quantizer(module.__class__.__name__, module)


class Quantizer:
    """(name, module) -> module: quantizes every layer it is handed, and remembers how.

    `models.load_model` calls it on each layer as its weights arrive, so the full-precision model
    is never whole in memory. On the meta device it gives the right shapes and takes no memory.
    """

    def __init__(
        self,
        spec: Spec,
        device: torch.device,
        dtype: torch.dtype,
        kernel: str = "auto",
    ) -> None:
        """`device` and `dtype` are where the model will run; kernels are chosen for them."""
        self.spec, self.device, self.dtype = spec, device, dtype
        self.kernels = kernels_for(spec, kernel, device, dtype)
        self.ran: Counter[str] = Counter()  # how many layers each kernel got
        self._embedding: PackedWeight | None = None
        self._shapes: dict[tuple[torch.Size, torch.dtype], PackedWeight] = {}

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        layer = self.quantized(name, module)
        return self.built(name, layer)

    @classmethod
    def of_shapes(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> "Quantizer":
        """One that only quantizes, for sizes where no kernel can run."""
        quantizer = cls(FullPrecision(), device, dtype)
        quantizer.spec = spec
        return quantizer

    def takes(self, module: nn.Module) -> bool:
        embedding = isinstance(self.spec, Int8Embedding) and isinstance(module, nn.Embedding)
        return isinstance(module, nn.Linear) or embedding

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with a PackedWeight: what the scheme says, no kernel chosen yet.

        Raises KernelError, naming the layer, where the scheme or every kernel refuses its shape;
        CheckpointError for weights that are not finite.
        """
        if not self.takes(module):
            return module
        scheme, weight = SCHEMES[type(self.spec)], module.weight.data
        out_features, in_features = weight.shape
        if reason := scheme.refuses(self.spec, in_features):
            raise KernelError(f"--quantization {self.spec}: {name} {reason}")
        if not weight.is_meta and not weight.sum().isfinite():
            _check_finite(name, weight)
        if isinstance(self.spec, FullPrecision):
            return module
        if weight.is_meta:
            return with_weight(module, self._of_shape(weight))
        packed = self._tied(module, scheme.quantize(weight, self.spec))
        return with_weight(module, packed)

    def _of_shape(self, weight: Tensor) -> PackedWeight:
        """What a weight on the meta device becomes, found out once per shape: it takes 5 ms."""
        key = (weight.shape, weight.dtype)
        if key not in self._shapes:
            self._shapes[key] = SCHEMES[type(self.spec)].quantize(weight, self.spec)
        return self._shapes[key]

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer in the form its kernel takes."""
        if not self.takes(layer) or isinstance(layer, nn.Embedding):
            return layer
        return SCHEMES[type(self.spec)].kernels[self.choose(name, layer)].build(layer, self.spec)

    def stored(self, name: str, layer: nn.Linear) -> nn.Module:
        """A layer on the meta device as its kernel stores it."""
        kernel = self.choose(name, layer)
        if not self.takes(layer) or not SCHEMES[type(self.spec)].kernels[kernel].takes_shapes:
            return layer
        return SCHEMES[type(self.spec)].kernels[kernel].build(layer, self.spec)

    def choose(self, name: str, layer: nn.Linear) -> str:
        """The kernel for a layer: the first that takes its shape. KernelError if none does."""
        reasons = {}
        for kernel in self.kernels:
            found: Kernel = SCHEMES[type(self.spec)].kernels[kernel]
            reason = found.refuses(self.spec, self.device, layer.in_features, layer.out_features)
            if reason is None:
                self.ran[kernel] += 1
                return kernel
            reasons[kernel] = reason
        why = "; ".join(f"with kernel {kernel} {reason}" for kernel, reason in reasons.items())
        others = [k for k in SCHEMES[type(self.spec)].kernels if k not in reasons]
        hint = f"; --kernel auto also tries {', '.join(others)}" if others else ""
        raise KernelError(f"--quantization {self.spec}: {name} {why}{hint}")

    def _tied(self, module: nn.Module, packed: PackedWeight) -> PackedWeight:
        """An output layer whose weights are the embedding's shares its memory."""
        if isinstance(module, nn.Embedding):
            self._embedding = packed
        first = self._embedding
        if first is None or first is packed or first.shape != packed.shape or packed.is_meta:
            return packed
        same = torch.equal(first.plane0, packed.plane0) and torch.equal(first.scale, packed.scale)
        return first if same else packed


def with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    """A layer like `module` but for its weight; `module` itself is left as it is."""
    if isinstance(module, nn.Embedding):
        like: nn.Module = nn.Embedding(*module.weight.shape, device="meta")
    else:
        like = nn.Linear(module.in_features, module.out_features, False, "meta")
        like.bias = module.bias
    like.weight = nn.Parameter(weight, requires_grad=False)
    return like


def _check_finite(name: str, weight: Tensor) -> None:
    """A sum can overflow though every weight is finite; only the weights can tell."""
    bad = sum(int((~rows.isfinite()).sum()) for rows in weight.split(1024))
    if bad:
        raise CheckpointError(f"{name} has {bad} weights that are NaN or infinite")
