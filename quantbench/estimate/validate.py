"""Estimates held against what was measured, in the JSON that our own commands write.

    print(report(of_results("results.json")))

Four kinds of objects have both: a line of generate.py's --output_json_path, a row of ab, a cell of
latency, and a case of `--validate --json`. An error is (estimated − measured) ÷ measured.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench import files
from quantbench.errors import QuantbenchError
from quantbench.log.options import of_repro
from quantbench.text import aligned
from quantbench.text import counted as number_of
from quantbench.typed_json import LARGEST_MEASURED, parsed

# Each quantity: its unit in a table, what its figures are multiplied by, and their format.
QUANTITIES = {
    "runtime": ("ms", 1e3, "{:.2f}"),
    "memory": ("GiB", 1 / (1 << 30), "{:.2f}"),
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


@dataclass(frozen=True)
class Case:
    """One run. Figures by quantity: seconds, bytes, joules per token, tokens per second."""

    model: str
    device: str
    group: str  # what its mean error is given for: a device, a kind of run
    measured: dict[str, float]
    estimated: dict[str, float]
    # None where the file does not say it.
    scheme: str | None = None
    batch: int | None = None
    positions: int | None = None  # of the prompt, or before a step

    @property
    def name(self) -> str:
        """In a table: "own int8wo × 4, token at 8192"."""
        name = f"{self.model} {self.scheme}" if self.scheme else self.model
        if self.batch is not None:
            name += f" × {self.batch}"
        if self.positions is not None:
            name += f", {self.group} at {self.positions}"
        return name

    def error(self, quantity: str) -> float | None:
        """(estimated − measured) ÷ measured; None without both figures."""
        measured, estimated = self.measured.get(quantity), self.estimated.get(quantity)
        return estimated / measured - 1 if measured and estimated else None


# ---------------------------------------------------------------------------------- our results


def of_results(path: str | Path) -> list[Case]:
    """Every case in a JSON or JSON-lines file that one of our commands wrote.

    Raises QuantbenchError, one line, for a file without any.
    """
    try:
        every = list(objects(path))
    except ValueError:
        raise QuantbenchError(
            f"{path}: it is neither JSON nor JSON lines; --validate takes results that hold "
            "measured_seconds and estimated_seconds"
        ) from None
    cases = [case for content, names in every for case in _cases(content, names)]
    if not cases:
        raise QuantbenchError(
            f"{path}: there is no case in it that was both measured and estimated; --validate "
            "takes what generate.py --output_json_path, ab and latency write where they have an "
            f"estimate, or measured_X beside estimated_X, X one of {', '.join(SUFFIXES)}"
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


def _cases(content: dict[str, Any], names: dict[str, Any]) -> Iterator[Case]:
    device = names.get("device", "")

    def case(kind: str, measured: dict[str, float], estimated: dict[str, float]) -> Iterator[Case]:
        if measured.keys() & estimated.keys():
            own = map(names.get, ("scheme", "batch", "positions"))
            yield Case(names.get("model", ""), device, kind, measured, estimated, *own)

    flat = (
        _known(content, {f"{side}_{suffix}": quantity for suffix, quantity in SUFFIXES.items()})
        for side in ("measured", "estimated")
    )
    yield from case(names.get("kind", device), *flat)
    sides = _sides(content)
    for kind in dict.fromkeys(kind for _, kind in FIGURES.values()):
        own = {name: quantity for name, (quantity, of) in FIGURES.items() if of == kind}
        yield from case(kind, *(_known(side, own) for side in sides))


def _known(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The values that can have been measured, by quantity. names: of quantities in the content."""
    values = {quantity: content.get(name) for name, quantity in names.items()}
    return {
        quantity: float(value)
        for quantity, value in values.items()
        if isinstance(value, int | float) and 0 < value < LARGEST_MEASURED
    }


def _sides(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was measured and what was estimated, by the keys of FIGURES, in an object of one of our
    commands. A cell of latency that has a reason was not measured to the end: nothing counts."""
    match content:
        case {"estimated": dict(estimated), "estimate_errors": dict(errors)}:  # a row of ab
            numbers = {name: (estimated.get(name), error) for name, error in errors.items()}
            return {
                name: value / (1 + error)
                for name, (value, error) in numbers.items()
                if isinstance(value, float) and isinstance(error, int | float) and error > -1
            }, estimated
        case {"estimate": dict(estimate), "samples": list(samples), "batch_size": int(batch)}:
            steps = [sample.get("step_seconds", ()) for sample in samples]
            prompts = [sample.get("prefill_seconds") for sample in samples]
            if content.get("reason") is not None or not samples or None in prompts:
                return {}, {}
            return _of_cell(prompts, [s for own in steps for s in own], batch) | {
                "joules_per_token": content.get("joules_per_token")
            }, estimate
        case {"estimate": dict(estimate)}:  # a line of generate.py
            figures = {name: f for name, f in estimate.items() if isinstance(f, dict)}
            measured, estimated = (
                {name: figure.get(side) for name, figure in figures.items()}
                for side in ("measured", "estimated")
            )
            return measured, estimated
    return {}, {}


def _of_cell(prompts: list[float], steps: list[float], batch: int) -> dict[str, Any]:
    seconds = math.fsum(prompts) + math.fsum(steps)
    tokens = batch * (len(prompts) + len(steps))  # the first of a sample is the prompt's
    return {
        "prompt_seconds": statistics.fmean(prompts),
        "token_seconds": statistics.fmean(steps) if steps else None,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
    }


# ---------------------------------------------------------------------------------- the report


def report(cases: Sequence[Case]) -> str:
    """A table of the cases, and mean errors."""
    return f"{_table(cases)}\n\n{_means(cases)}\n"


def _table(cases: Sequence[Case]) -> str:
    present = [q for q in QUANTITIES if any(q in c.measured or q in c.estimated for c in cases)]
    head = ["Model", "Device"]
    for name in present:
        unit = QUANTITIES[name][0]
        head += [f"Measured, {unit}", f"Estimated, {unit}", "Error"]
    rows = [head]
    for case in cases:
        row = [case.name, case.device]
        for name in present:
            _, factor, form = QUANTITIES[name]
            for side in (case.measured, case.estimated):
                value = side.get(name)
                row.append("" if value is None else form.format(value * factor))
            error = case.error(name)
            row.append("" if error is None else f"{error:+.1%}")
        rows.append(row)
    return aligned(rows, left=(0, 1))


def _means(cases: Sequence[Case]) -> str:
    """Mean absolute errors by kind, scheme, model and quantity: a line each."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        named = ["scheme " + case.scheme, "model " + case.model] if case.scheme else []
        for name in [case.group, *named]:
            groups.setdefault(name, []).append(case)
    lines = []
    for name, own in groups.items():
        for quantity in QUANTITIES:
            errors = [(abs(e), case) for case in own if (e := case.error(quantity)) is not None]
            if errors:
                worst, at = max(errors, key=lambda pair: pair[0])
                lines.append(
                    f"- {name}: {quantity}: mean error {statistics.fmean(e for e, _ in errors):.1%}"
                    f", worst {worst:.1%} ({at.name}); {number_of(len(errors), 'case')}"
                )
    return "\n".join(lines)


def as_json(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """The cases as `of_results` reads them."""
    names = {quantity: suffix for suffix, quantity in SUFFIXES.items()}
    rows = []
    for case in cases:
        row: dict[str, Any] = {"model": case.model, "device": case.device, "kind": case.group}
        named_by = {"scheme": case.scheme, "batch": case.batch, "positions": case.positions}
        row |= {name: value for name, value in named_by.items() if value is not None}
        for side in ("measured", "estimated"):
            own = getattr(case, side)
            row |= {f"{side}_{names[q]}": value for q, value in own.items()}
        rows.append(row)
    return rows
