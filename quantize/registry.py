"""What carries out a spec: each scheme's quantizer and kernels, and how to apply them.

quantizer = Quantizer(parse("int4wo-64"), device, dtype)
model = load_model(path, transform=quantizer)       # layer by layer, as weights arrive
quantizer.ran                                       # Counter({"cpu": 89})
"""

import dataclasses
import functools
import importlib
import math
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from quantbench.errors import CheckpointError, KernelError
from quantbench.quantize import schemes
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.scheme import Scheme
from quantbench.quantize.spec import AsIs, FullPrecision, Int8Embedding, Spec, Stored

if TYPE_CHECKING:
    from quantbench.quantize.per_layer import MixedQuantizer


class _Schemes(Mapping[type[Spec], Scheme]):
    """Every scheme of every file in quantize/schemes/. A file is imported when it is asked for one:
    some import a package of their own."""

    def __getitem__(self, spec: type[Spec]) -> Scheme:
        return self._of(spec.file)[spec]

    def __iter__(self) -> Iterator[type[Spec]]:
        for module in pkgutil.iter_modules(schemes.__path__):
            yield from self._of(module.name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _of(self, file: str) -> dict[type[Spec], Scheme]:
        return importlib.import_module(f"{schemes.__name__}.{file}").SCHEMES


SCHEMES = _Schemes()
_EMBED = (Int8Embedding, Stored)  # schemes that embeddings have, too
MANY_COLUMNS = 1024  # more than any scheme's group, and a multiple of every one
Layer = TypeVar("Layer", bound=nn.Module)


def available(spec: Spec, device: torch.device, dtype: torch.dtype) -> dict[str, str | None]:
    """Per kernel of the scheme, fastest first: why it cannot run there, or None if it can.

    It builds and loads nothing, so a kernel may still fail when its first layer is built.
    """
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
    works = f"here it has {', '.join(running)}" if running else "nothing else runs here"
    if kernel == "auto":
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise KernelError(f"{spec} has no kernel for {device.type}: {why}")
    if kernel not in reasons:
        raise KernelError(f"--kernel {kernel}: {spec} has no such kernel; {works} (or auto)")
    if reasons[kernel]:
        raise KernelError(f"--kernel {kernel}: {spec}: {reasons[kernel]}; {works} (or auto)")
    return [kernel]


def column_unit(spec: Spec, columns: int) -> int:
    """How many columns of a weight (N, columns) have to stay together when it is cut: those that
    share a scale with others of their row but not with all, or a byte."""
    if SCHEMES[type(spec)].refuses(spec, columns):
        return 1  # the layer will be refused, with the reason
    packed = of_one_row(spec, columns)
    if not isinstance(packed, PackedWeight):
        return 1
    widths = [plane.shape[1] for plane in packed.parts.planes]
    widths += [] if packed.outer is None else [packed.outer.shape[1]]
    widths += [packed.scale.shape[1]] * (packed.scale.shape[1] > 1)
    return math.lcm(*(columns // math.gcd(columns, width) for width in widths))


def has_row_scales(spec: Spec) -> bool:
    """Whether a scheme takes the scale of a weight's row from all of its columns."""
    packed = of_one_row(spec, MANY_COLUMNS)
    return isinstance(packed, PackedWeight) and packed.scale.shape[1] == 1


def of_one_row(spec: Spec, columns: int) -> Tensor:
    return _of_shape(spec, torch.Size((1, columns)), torch.bfloat16)


@functools.lru_cache(maxsize=1024)
def _of_shape(spec: Spec, shape: torch.Size, dtype: torch.dtype) -> PackedWeight:
    """What a weight on the meta device becomes; kept, since it is asked for every layer.
    A row of zeros is quantized: arithmetic on the meta device would import torch._dynamo."""
    if isinstance(spec, (FullPrecision, Stored)):  # which compute nothing
        return SCHEMES[type(spec)].quantize(torch.empty(shape, dtype=dtype, device="meta"), spec)
    row = torch.zeros((1, shape[1]), dtype=dtype, device="cpu")
    packed = SCHEMES[type(spec)].quantize(row, dataclasses.replace(spec, way=""))
    parts = packed.of_parts(lambda part: torch.empty_like(part, device="meta"))
    by_row = parts.parts.by_row.items()
    return parts.replaced(
        **{name: part.new_empty((shape[0], *part.shape[1:])) for name, part in by_row}
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


class Quantizer:
    """(name, module) -> module: quantizes every layer it is handed, and counts kernels in `ran`.

    `models.load_model` calls it on each layer as its weights arrive, so the full-precision model
    is never whole in memory. On the meta device it gives the right shapes and takes no memory.
    """

    # (scheme, kernel) of each layer built, where layers differ
    layers: dict[str, tuple[str, str]] | None = None

    def __init__(
        self,
        spec: Spec,
        device: torch.device,
        dtype: torch.dtype,
        kernel: str | None = "auto",
        say: Callable[[str], None] = _to_stderr,
    ) -> None:
        """`device` and `dtype` are those of the run that kernels are chosen for.

        kernel: a name, "auto", or None for a quantizer that builds no layers (`quantized` only).
        say: gets a line when a kernel that looked usable fails and "auto" goes on to the next.
        Raises KernelError if no kernel runs there.
        """
        self.spec, self.device, self.dtype, self.say = spec, device, dtype, say
        self.scheme = SCHEMES[type(spec)]
        self.kernels = kernels_for(spec, kernel, device, dtype) if kernel else []
        self.ran: Counter[str] = Counter()  # how many layers each kernel got
        self._asked = kernel
        self._prepared: set[str] = set()
        self._embedding: nn.Embedding | None = None  # built, for an output tied to it

    def __call__(self, name: str, module: nn.Module) -> nn.Module:
        return self.built(name, self.quantized(name, module))

    @classmethod
    def of_shapes(cls, spec: Spec, device: torch.device, dtype: torch.dtype) -> "Quantizer":
        """One that only quantizes, for sizes where no kernel can run."""
        return cls(spec, device, dtype, kernel=None)

    def takes(self, module: nn.Module) -> bool:
        embedding = isinstance(self.spec, _EMBED) and isinstance(module, nn.Embedding)
        return isinstance(module, nn.Linear) or embedding

    def quantized(self, name: str, module: nn.Module) -> nn.Module:
        """The layer with a PackedWeight: what the scheme says, no kernel chosen yet.

        Raises KernelError, naming the layer, where the scheme or every kernel refuses its shape;
        CheckpointError for weights that are not finite.
        """
        check_vectors(name, module)
        if not self.takes(module):
            return module
        weight = module.weight.data
        if isinstance(weight, PackedWeight):  # a calibration has quantized it (run/calibration.py)
            return module
        if reason := self.scheme.refuses(self.spec, weight.shape[1]):
            raise KernelError(f"--quantization {self.spec}: {name} {reason}")
        if not weight.is_meta and not weight.sum().isfinite():
            _check_finite(name, weight)
        if isinstance(self.spec, FullPrecision):
            return module
        if weight.is_meta:
            return with_weight(module, _of_shape(self.spec, weight.shape, weight.dtype))
        return with_weight(module, self._tied(self.scheme.quantize(weight, self.spec)))

    def built(self, name: str, layer: nn.Module) -> nn.Module:
        """The layer as a module that multiplies by its kernel; the kernel is loaded first.

        With kernel "auto", one that cannot be loaded gives way to the next. Raises KernelError,
        naming the layer, if none is left.
        """
        if isinstance(layer, nn.Embedding):
            self._embedding = layer
            self._note(name, "auto")
        if not self.takes(layer) or isinstance(layer, nn.Embedding):
            return layer
        kernel = self.kernel_for(name, layer)
        while not self._is_prepared(kernel):
            kernel = self.kernel_for(name, layer)
        self._note(name, kernel)
        self.ran[kernel] += 1
        table, weight = self._table, layer.weight.data
        both = table is not None and isinstance(weight, PackedWeight) and not weight.is_meta
        tied = both and table.plane0.data_ptr() == weight.plane0.data_ptr()
        built = self.scheme.kernels[kernel].build(layer, self.spec)
        if tied and (share := getattr(built, "share", None)):  # a PackedLinear's
            share(self._embedding)
        return built

    def _note(self, name: str, kernel: str) -> None:
        if self.layers is not None:
            self.layers[name] = str(self.spec), kernel

    def stored(self, name: str, layer: nn.Linear) -> nn.Module:
        """A layer on the meta device as its kernel stores it; nothing is loaded."""
        kernel = self.kernel_for(name, layer)
        self.ran[kernel] += 1
        row = self.scheme.kernels[kernel]
        return row.build(layer, self.spec) if row.takes_shapes else layer

    def kernel_for(self, name: str, layer: nn.Linear) -> str:
        """The kernel for a layer: the first that takes its shape. KernelError if none does."""
        shape = layer.in_features, layer.out_features
        reasons = {}
        for kernel in self.kernels:
            row = self.scheme.kernels[kernel]
            reason = row.refuses(self.spec, self.device, *shape)
            rounds = row.rounds and self.spec.rounds_activations
            if reason is None and rounds and not _rounds_here(layer):
                reason = "rounds activations by the columns of one rank alone"
            if reason is None:
                return kernel
            reasons[kernel] = reason
        why = "; ".join(f"with kernel {kernel} {reason}" for kernel, reason in reasons.items())
        others = [kernel for kernel in self.scheme.kernels if kernel not in reasons]
        hint = f"; --kernel auto also tries {', '.join(others)}" if others else ""
        raise KernelError(f"--quantization {self.spec}: {name} {why}{hint}")

    def _is_prepared(self, kernel: str) -> bool:
        """Load what a kernel needs; if that fails and there is another, leave this one out."""
        if kernel in self._prepared:
            return True
        try:
            self.scheme.kernels[kernel].prepare()
        except KernelError as error:
            if self._asked != "auto":
                raise KernelError(f"--kernel {kernel}: {self.spec}: {error}") from None
            if len(self.kernels) == 1:
                raise
            self.kernels = [name for name in self.kernels if name != kernel]
            self.say(f"Kernel {kernel} cannot be used, {self.kernels[0]} is next: {error}")
            return False
        self._prepared.add(kernel)
        return True

    @property
    def _table(self) -> PackedWeight | None:
        """The embedding's weight, where it is quantized."""
        weight = self._embedding.weight.data if self._embedding else None
        return weight if isinstance(weight, PackedWeight) else None

    def _tied(self, packed: PackedWeight) -> PackedWeight:
        """An output layer whose weights are the embedding's shares its memory."""
        first = self._table
        if first is None or first.shape != packed.shape:
            return packed
        same = torch.equal(first.plane0, packed.plane0) and torch.equal(first.scale, packed.scale)
        return first if same else packed


def _rounds_here(layer: nn.Linear) -> bool:
    """Whether activations are rounded in the layer, and not before it (quantize/activation.py)."""
    weight = layer.weight.data
    return not isinstance(weight, PackedWeight) or weight.activation is not None


def with_weight(module: Layer, weight: Tensor) -> Layer:
    """A linear layer or an embedding with this weight, of its shape, and with the module's bias.
    The module itself is left as it is; a Parameter stays the same object."""
    rows, columns = weight.shape
    if isinstance(module, nn.Embedding):
        layer: nn.Module = nn.Embedding.from_pretrained(torch.empty(rows, columns, device="meta"))
    else:
        layer = nn.Linear(columns, rows, False, "meta")
        layer.bias = module.bias
    is_parameter = isinstance(weight, nn.Parameter)
    layer.weight = weight if is_parameter else nn.Parameter(weight, requires_grad=False)
    return layer


def check_vectors(name: str, module: nn.Module) -> None:
    """Raise CheckpointError for a norm's weight or a bias that is not finite. An embedding is not
    checked: it is large, and a run reads few of its rows."""
    for parameter in module.parameters(recurse=False):
        if parameter.dim() == 1 and not parameter.is_meta:
            _check_finite(name, parameter.data)


def _check_finite(name: str, weight: Tensor) -> None:
    """A sum can overflow though every weight is finite; so the weights are checked one by one."""
    bad = sum(int((~rows.isfinite()).sum()) for rows in weight.split(1024))
    if bad:
        hint = " or give --precision bfloat16" * (weight.dtype == torch.float16)
        raise CheckpointError(
            f"{name} has {bad} weights that are NaN or infinite: fetch the checkpoint again{hint}"
        )


def quantizer_of(
    spec: Spec, device: torch.device, dtype: torch.dtype, kernel: str | None = "auto"
) -> "Quantizer | MixedQuantizer":
    """What quantizes every layer as `spec` says. kernel: as for Quantizer."""
    if not isinstance(spec, AsIs):
        return Quantizer(spec, device, dtype, kernel)
    from quantbench.quantize.per_layer import MixedQuantizer

    return MixedQuantizer({name: (scheme, kernel) for name, scheme in spec.layers}, device, dtype)
