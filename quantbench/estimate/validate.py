"""Estimates held against what was measured, in the JSON that our own commands write.

    print(report(of_results("results.json")))

Lines of generate.py's --output_json_path and rows of ab are estimated now. Those of earlier
versions have their estimates in an object "estimate"; other cases have measured_X and estimated_X.
An error is (estimated − measured) ÷ measured.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import QuantbenchError
from quantbench.log.options import of_repro
from quantbench.text import aligned, counted
from quantbench.typed_json import LARGEST_MEASURED, parsed

# Each quantity: its unit in a table, what its figures are multiplied by, and their format.
QUANTITIES = {
    "runtime": ("ms", 1e3, "{:.2f}"),
    "memory": ("GB", 1e-9, "{:.2f}"),
    "energy": ("J/token", 1.0, "{:.4g}"),
    "throughput": ("tokens/s", 1.0, "{:,.0f}"),
}
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
    "device": (str, ("device", "device.name", "ran.machine", "about.machine")),
    "scheme": (str, ("scheme", "arm")),
    "kind": (str, ("kind",)),
    "batch": (int, ("batch", "config.batch_size", "batch_size")),
    "positions": (int, ("positions", "prompt", "prompt_tokens", "sequence_length")),
}
Fields = dict[str, Any]
Estimator = Callable[[Fields, Fields], Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Case:
    """One figure of a run: seconds, bytes, joules per token or tokens per second."""

    model: str
    device: str
    kind: str  # of a run, or a device: what the mean error is given for
    quantity: str
    measured: float
    estimated: float
    # None where the file does not say it.
    scheme: str | None = None
    batch: int | None = None
    positions: int | None = None  # of the prompt, or before a step

    @property
    def name(self) -> str:
        """In a table: "own int8wo × 4, token at 8192"."""
        name = f"{self.model} {self.scheme}" if self.scheme else self.model
        name += "" if self.batch is None else f" × {self.batch}"
        return name + ("" if self.positions is None else f", {self.kind} at {self.positions}")

    @property
    def error(self) -> float:
        return self.estimated / self.measured - 1


def of_results(path: str | Path, estimate: Estimator = lambda content, names: {}) -> list[Case]:
    """Every case in a JSON or JSON-lines file that one of our commands wrote. estimate: of an
    object that has none, with what is known of its case.

    Raises QuantbenchError, one line, for a file without any.
    """
    try:
        cases = [
            case
            for content, names in objects(path)
            for case in _cases(content, names, content.get("estimate") or estimate(content, names))
        ]
    except ValueError:
        raise QuantbenchError(
            f"{path}: it is neither JSON nor JSON lines; --validate takes results that hold "
            "measured_seconds and estimated_seconds"
        ) from None
    if not cases:
        raise QuantbenchError(
            f"{path}: there is no case in it that was both measured and estimated; --validate "
            "takes what generate.py --output_json_path and ab write on this machine or on a card "
            "with a data sheet, or measured_X beside estimated_X, X one of "
            f"{', '.join(SUFFIXES)}"
        )
    return cases


def objects(path: str | Path) -> Iterator[tuple[Fields, Fields]]:
    """Every object in a file of JSON or of JSON lines, with what it and those around it say of
    their cases, by the keys of NAMES. Raises ValueError for a file of neither."""
    text = files.read_text("cannot read", str(path), QuantbenchError)
    try:
        content = parsed(text)
    except ValueError:
        content = [parsed(line) for line in text.splitlines() if line.strip()]
    yield from _objects(content, {})


def _objects(content: Any, above: Fields) -> Iterator[tuple[Fields, Fields]]:
    if isinstance(content, dict):
        above = above | _named(content)
        yield content, above
    inside = content.values() if isinstance(content, dict) else content
    for value in inside if isinstance(content, dict | list) else ():
        yield from _objects(value, above)


def _named(content: Mapping[str, Any]) -> dict[str, Any]:
    """What an object says of its cases; also by the command of its run, if it has one."""
    names: dict[str, Any] = {}
    try:
        config = of_repro(str(content["command"])) if "command" in content else None
    except QuantbenchError:
        config = None
    if config is not None:
        path = Path(config.checkpoint_path.removeprefix("dummy:"))
        names = {"model": path.name, "batch": config.batch_size, "positions": config.prefill_size}
    for name, (kind, places) in NAMES.items():
        values = (_at(content, place) for place in places)
        names[name] = next((v for v in values if type(v) is kind), names.get(name))
    return {name: value for name, value in names.items() if value is not None}


def _at(content: Any, place: str) -> Any:
    for key in place.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _cases(content: Fields, names: Fields, estimate: object) -> Iterator[Case]:
    device = names.get("device", "")
    kind = str(names.get("kind", device))
    found: list[tuple[str, str, Any, Any]] = [
        (kind, quantity, content.get(f"measured_{suffix}"), content.get(f"estimated_{suffix}"))
        for suffix, quantity in SUFFIXES.items()
    ]
    for name, (quantity, kind) in FIGURES.items():
        figure = estimate.get(name) if isinstance(estimate, dict) else None
        if isinstance(figure, dict):
            found.append((kind, quantity, figure.get("measured"), figure.get("estimated")))
    for kind, quantity, *values in found:
        if all(isinstance(v, int | float) and 0 < v < LARGEST_MEASURED for v in values):
            measured, estimated = (float(value) for value in values)
            own: Any = map(names.get, ("scheme", "batch", "positions"))
            yield Case(names.get("model", ""), device, kind, quantity, measured, estimated, *own)


# ---------------------------------------------------------------------------------- the report


def report(cases: Sequence[Case]) -> str:
    """A table of the cases, and mean absolute errors by kind, scheme, model and quantity."""
    rows = [["Model", "Device", "", "Measured", "Estimated", "Error"]]
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        unit, factor, form = QUANTITIES[case.quantity]
        values = (form.format(value * factor) for value in (case.measured, case.estimated))
        rows.append([case.name, case.device, f"{case.quantity}, {unit}", *values,
                     f"{case.error:+.1%}"])  # fmt: skip
        named = [f"scheme {case.scheme}", f"model {case.model}"] if case.scheme else []
        for name in [case.kind, *named]:
            groups.setdefault((name, case.quantity), []).append(case)
    lines = [aligned(rows, left=(0, 1, 2)), ""]
    for (name, quantity), own in groups.items():
        worst = max(own, key=lambda case: abs(case.error))
        mean = statistics.fmean(abs(case.error) for case in own)
        lines.append(
            f"- {name}: {quantity}: mean error {mean:.1%}, worst {abs(worst.error):.1%} "
            f"({worst.name}); {counted(len(own), 'case')}"
        )
    return "\n".join(lines) + "\n"
