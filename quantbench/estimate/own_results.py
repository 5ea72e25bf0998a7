"""Estimates beside what was measured, in the JSON that our own commands write.

    for beside in figures({"estimate": {"token_seconds": {"estimated": 0.2, "measured": 0.21}}}):
        beside.kind, beside.measured, beside.estimated  # "token", {"runtime": 0.21}, …
    named({"model": "own", "config": {"batch_size": 4}})        # {"model": "own", "batch": 4}

Five kinds of objects have both: a line of generate.py's --output_json_path, a row of ab, a cell of
latency, a case of `--validate --json`, and one of docs/data/estimate_accuracy.json.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quantbench.errors import QuantbenchError
from quantbench.log.options import of_repro
from quantbench.log.table import Estimates
from quantbench.typed_json import LARGEST_MEASURED, from_json

# What our commands call the figures of a run: the quantity, and the kind of a case.
FIGURES = {
    "prompt_seconds": ("runtime", "prompt"),
    "token_seconds": ("runtime", "token"),
    "tokens_per_second": ("throughput", "run"),
    "joules_per_token": ("energy", "run"),
    "peak_memory_bytes": ("memory", "memory"),
}
# Suffixes of measured_… and estimated_… in JSON, by quantity.
SUFFIXES = {
    "seconds": "runtime",
    "bytes": "memory",
    "joules_per_token": "energy",
    "tokens_per_second": "throughput",
}
# What a case is called by: its type, and where it may stand. The first place counts that has it.
NAMES: dict[str, tuple[type, tuple[str, ...]]] = {
    "model": (str, ("model", "model.name")),
    "device": (str, ("device", "device.name", "carried.machine", "about.machine")),
    "scheme": (str, ("scheme", "arm")),
    "kind": (str, ("kind",)),
    "held_out": (bool, ("held_out",)),
    "batch": (int, ("batch", "config.batch_size", "batch_size")),
    "positions": (int, ("positions", "prompt", "prompt_tokens", "sequence_length")),
}


@dataclass(frozen=True)
class Figures:
    """Figures of one kind of a case, by quantity: seconds, bytes, joules per token, tokens/s."""

    kind: str | None  # None: the object, or what it stands in, says it
    measured: dict[str, float]
    estimated: dict[str, float]


def named(content: Mapping[str, Any]) -> dict[str, Any]:
    """What an object says of its cases: keys of NAMES, and no others."""
    names = {}
    for name, (kind, places) in NAMES.items():
        values = (_at(content, place) for place in places)
        value = next((value for value in values if type(value) is kind), None)
        if value is not None:
            names[name] = value
    return _of_command(content.get("command")) | names


def _at(content: Any, place: str) -> Any:
    for key in place.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _of_command(command: Any) -> dict[str, Any]:
    """What the command of a row of ab says of its run; nothing for any other."""
    try:
        config = of_repro(command) if isinstance(command, str) else None
    except QuantbenchError:
        return {}
    if config is None:
        return {}
    names = {
        "model": Path(config.checkpoint_path.removeprefix("dummy:")).name,
        "batch": config.batch_size,
        "positions": config.prefill_size,
    }
    return {name: value for name, value in names.items() if value is not None}


def figures(content: Mapping[str, Any]) -> Iterator[Figures]:
    """The figures of each kind that an object has both measured and estimated."""
    flat = (_by_suffix(content, side) for side in ("measured", "estimated"))
    yield from _both(Figures(None, *flat))
    for shape in SHAPES:
        try:
            read: _Shape = from_json(shape, content)
        except ValueError:
            continue
        for kind in dict.fromkeys(kind for _, kind in FIGURES.values()):
            names = {name: q for name, (q, own) in FIGURES.items() if own == kind}
            yield from _both(Figures(kind, *(_known(side, names) for side in read.sides())))


def _both(pair: Figures) -> Iterator[Figures]:
    if pair.measured.keys() & pair.estimated.keys():
        yield pair


def _by_suffix(content: Mapping[str, Any], side: str) -> dict[str, float]:
    names = {f"{side}_{suffix}": quantity for suffix, quantity in SUFFIXES.items()}
    return _known(content, names)


def _known(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The values that can have been measured, by quantity. names: of quantities in the content."""
    values = {quantity: content.get(name) for name, quantity in names.items()}
    return {
        quantity: float(value)
        for quantity, value in values.items()
        if isinstance(value, int | float) and 0 < value < LARGEST_MEASURED
    }


# ---------------------------------------------------------------------------------- our commands

Side = Mapping[str, float | None]


class _Shape(Protocol):
    """An object that a command of ours writes."""

    def sides(self) -> tuple[Side, Side]:
        """What was measured, and what was estimated; by the keys of FIGURES."""


@dataclass(frozen=True)
class _Line:
    """A line of generate.py's --output_json_path."""

    estimate: Estimates

    def sides(self) -> tuple[Side, Side]:
        known = {name: own for name in FIGURES if (own := getattr(self.estimate, name)) is not None}
        measured = {name: figure.measured for name, figure in known.items()}
        return measured, {name: figure.estimated for name, figure in known.items()}


@dataclass(frozen=True)
class _Row:
    """A row of ab."""

    estimated: dict[str, float]
    estimate_errors: dict[str, float]  # (estimated − measured) ÷ measured

    def sides(self) -> tuple[Side, Side]:
        measured = {
            name: self.estimated[name] / (1 + error)
            for name, error in self.estimate_errors.items()
            if name in self.estimated and error > -1
        }
        return measured, self.estimated


@dataclass(frozen=True)
class _Sample:
    prefill_seconds: float
    step_seconds: list[float]


@dataclass(frozen=True)
class _Cell:
    """A cell of latency. One with a reason was not measured to the end, and counts as nothing."""

    batch_size: int
    samples: list[_Sample]
    estimate: dict[str, float]
    reason: str | None = None
    joules_per_token: float | None = None

    def sides(self) -> tuple[Side, Side]:
        if self.reason is not None or not self.samples:
            return {}, self.estimate
        prompts = [sample.prefill_seconds for sample in self.samples]
        steps = [seconds for sample in self.samples for seconds in sample.step_seconds]
        tokens = self.batch_size * (len(self.samples) + len(steps))  # the first is the prompt's
        seconds = math.fsum(prompts) + math.fsum(steps)
        measured = {
            "prompt_seconds": statistics.fmean(prompts),
            "token_seconds": statistics.fmean(steps) if steps else None,
            "tokens_per_second": tokens / seconds if seconds > 0 else None,
            "joules_per_token": self.joules_per_token,
        }
        return measured, self.estimate


SHAPES: tuple[type[Any], ...] = (_Line, _Row, _Cell)
