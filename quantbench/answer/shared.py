"""Comparisons in one file that another machine's can be put beside: `recommend --share`, `collect`.

    write("--share", "here.json", [Model.of(results, rows)], None)
    files = [read("here.json"), read("there.json")]

Rows keep their machine: figures of two machines are never mixed into one interval. The digest is
of everything else in the file, so an edited file is refused.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantbench import files
from quantbench.answer.row import Row
from quantbench.bench.store import Results, Settings
from quantbench.errors import UsageError
from quantbench.log.about import About, about
from quantbench.quality.types import Quality
from quantbench.text import cleaned, shown
from quantbench.typed_json import from_json, omitted, to_json

FORMAT = 1
HOLDS = files.json_with("shared")


@dataclass(frozen=True)
class Model:
    """A comparison of one model's schemes."""

    name: str
    settings: Settings
    limits: dict[str, Any]
    rows: list[Row]
    # The baseline's bits per byte and their standard error; None where its weights are random.
    bits_per_byte: float | None = omitted()
    bits_error: float | None = omitted()

    @staticmethod
    def of(results: Results, rows: Sequence[Row]) -> "Model":
        run = next((arm.run for arm in results.arms if arm.run), None)
        name, quality = run.model if run else "", results.baseline.quality
        made = (name, results.settings, results.limits, list(rows))
        if not isinstance(quality, Quality) or quality.model or quality.bits_per_byte is None:
            return Model(*made)
        nats, error = math.log(quality.perplexity), quality.perplexity_standard_error
        bits = quality.bits_per_byte
        return Model(*made, bits, error and bits * error / quality.perplexity / nats)


@dataclass(frozen=True)
class Shared:
    """What the file holds: the command, commit and versions, the machine, and the figures."""

    shared: int  # the format
    about: About
    models: list[Model]
    digest: str = ""


def write(option: str, path: str, models: list[Model], origin: About | None) -> None:
    """Raises LogError where it cannot be written."""
    value = to_json(Shared(FORMAT, origin or about(), models))
    value["digest"] = _digest(value)
    files.write_text(option, path, json.dumps(value, indent=1) + "\n")


def read(path: str) -> Shared:
    """Raises UsageError, one line, for what --share did not write, or was edited since."""
    value = files.read_json("cannot read", path, UsageError, "recommend --share writes it")
    try:
        if not isinstance(value, dict) or value.get("shared") != FORMAT:
            raise ValueError(f'it has no "shared": {FORMAT}')
        if value.get("digest") != _digest(value):
            raise ValueError("it was edited: its digest is of other figures")
        return from_json(Shared, cleaned(value))
    except ValueError as error:
        raise UsageError(f"{shown(path)} is not what recommend --share writes: {error}") from None


def _digest(value: dict[str, object]) -> str:
    rest = {name: part for name, part in value.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
