"""What each scheme costs in each layer: bytes, from shapes alone, and seconds, from timed products.

costs = Costs(architecture, specs, device, precision)
costs.of["layers.0.feed_forward.w2", "int4wo-64"].held       # bytes as its kernel holds them
costs.set_seconds(costs.time(config))
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from quantbench.bench.answers import ShapeTimings
from quantbench.bench.process import Process
from quantbench.devices import stored_bytes
from quantbench.errors import KernelError
from quantbench.log.config import RunConfig
from quantbench.models.config import ModelConfig
from quantbench.progress import progress
from quantbench.quantize.registry import Quantizer, available
from quantbench.quantize.spec import SHOWN, Int8Embedding, Spec, parse_scheme

Shape = tuple[int, int]
Key = tuple[str, str]  # (layer, scheme)
EMBEDDING = "tok_embeddings"
BETWEEN = ("uintx-5-128", "uintx-3-32", "uintx-3-128")  # which tables do not list
LEFT_OUT = (
    *("float8wo", "uintx-2-8", "sparse-marlin"),  # others do less damage in fewer bytes
    "uintx-4-64",  # has int4wo-64's numbers
    *("bnb-nf4", "bnb-fp4"),  # their kernels keep all other layers from fused decoding
    "embed-int8",  # int8wo, in linear layers
)


@dataclass(frozen=True)
class Cost:
    stored: int  # bytes as saved: with scales, without a kernel's padding
    held: int  # bytes as its kernel holds them
    seconds: float = 0.0  # of its product in a decoding step


def candidates(device: torch.device, precision: torch.dtype, calibrated: bool) -> list[Spec]:
    """The schemes that layers may get: those of weights alone that run here. Rounded activations
    change a layer's output beside its weights, which the damage leaves out. calibrated: also those
    that a text calibrates, which take the place of -hqq."""
    specs = [parse_scheme(name) for name in (*SHOWN, *BETWEEN) if name not in LEFT_OUT]
    if calibrated:
        specs = [spec for spec in specs if not spec.way]
        gptq = [spec for spec in specs if "gptq" in spec.choices.get("way", ())]
        specs += [replace(spec, way="gptq") for spec in gptq]
    return [
        spec
        for spec in specs
        if (calibrated or not spec.calibrated)
        and not spec.rounds_activations
        and None in available(spec, device, precision).values()
    ]


class Costs:
    def __init__(
        self,
        architecture: ModelConfig,
        specs: Sequence[Spec],
        device: torch.device,
        precision: torch.dtype,
    ) -> None:
        """A scheme that does not take a layer's shape has no cost there."""
        self.shapes = architecture.linear_shapes()
        self.of: dict[Key, Cost] = {}
        by_shape: dict[tuple[Shape, Spec], Cost | None] = {}
        for spec in specs:
            quantizer = Quantizer(spec, device, precision)
            for name, shape in self.shapes.items():
                if (shape, spec) not in by_shape:
                    by_shape[shape, spec] = _bytes(name, shape, quantizer)
                if cost := by_shape[shape, spec]:
                    self.of[name, str(spec)] = cost
        with torch.device("meta"):
            table = nn.Embedding(*self.shapes["output"], dtype=precision)
        rounded = Quantizer.of_shapes(Int8Embedding(), device, precision).quantized("", table)
        for scheme, layer in (("none", table), (str(Int8Embedding()), rounded)):
            count = sum(map(stored_bytes, layer.parameters()))
            self.of[EMBEDDING, scheme] = Cost(0, count)  # bits count linear layers alone

    def time(self, config: RunConfig) -> dict[tuple[Shape, str], float]:
        """Seconds of each scheme's product with each shape of layer, timed in another process."""
        names = (scheme for name, scheme in self.of if name != EMBEDDING)
        schemes = list(dict.fromkeys(map(_timed_as, names)))
        where = {"device": config.device, "precision": config.precision}
        shapes = list(dict.fromkeys(self.shapes.values()))
        found: dict[tuple[Shape, str], float] = {}
        timing = progress("Timing every scheme's layers", unit="shapes")
        with closing(Process()) as worker, timing as report:
            kernels = {name: ["auto"] for name in schemes}
            for done, (rows, columns) in enumerate(shapes, 1):
                size = {"rows": rows, "columns": columns, "batch_size": config.batch_size}
                timings = worker.answer(ShapeTimings, "products", kernels=kernels, **size, **where)
                found |= {((rows, columns), one.scheme): one.seconds
                          for one in timings.products if one.seconds is not None}  # fmt: skip
                report(done, len(shapes))
        return found

    def set_seconds(self, found: Mapping[tuple[Shape, str], float]) -> None:
        """found: what `time` found. A scheme whose kernel failed is left out."""
        for (name, scheme), cost in list(self.of.items()):
            if name == EMBEDDING:
                continue
            if (key := (self.shapes[name], _timed_as(scheme))) in found:
                self.of[name, scheme] = replace(cost, seconds=found[key])
            else:
                del self.of[name, scheme]


def _timed_as(scheme: str) -> str:
    """The scheme whose product is the same: how codes are chosen changes none."""
    return str(replace(parse_scheme(scheme), way=""))


def _bytes(name: str, shape: Shape, quantizer: Quantizer) -> Cost | None:
    with torch.device("meta"):
        plain = nn.Linear(shape[1], shape[0], bias=False, dtype=quantizer.dtype)
    try:
        layer = cast(nn.Linear, quantizer.quantized(name, plain))
        held = quantizer.stored(name, layer)
    except KernelError:
        return None
    return Cost(stored_bytes(layer.weight), sum(map(stored_bytes, held.parameters())))
