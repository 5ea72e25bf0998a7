"""results.json for others: `recommend --share` writes it without folders, `collect` reads it.

    write("--share", "here.json", [value of results.json])
    comparisons = [*read("here.json"), *read("there.json")]

Rows keep their machine: figures of two machines are never mixed into one interval.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantbench import files
from quantbench.bench.store import Results
from quantbench.compare.row import Row
from quantbench.errors import UsageError
from quantbench.log.origin import Origin
from quantbench.quality.types import Quality
from quantbench.text import cleaned, shown
from quantbench.typed_json import from_json, omitted, to_json

HOLDS = re.compile(rb'\s*\[?\s*\{\s*("settings"|\}\s*$)').match  # what --share may replace
# The folders of a path from "/", "~" or ".", which follows a space, "=", a quote or "dummy:".
_FOLDERS = re.compile(r"""(?<![^\s='"(:])(~|\.\.?)?/([^\s'"/]+/)*(?=[^\s/])""")


@dataclass(frozen=True)
class Model:
    """A comparison of one model's schemes."""

    name: str
    rows: list[Row]
    # The baseline's bits per byte and their standard error; None where its weights are random.
    bits_per_byte: float | None = omitted()
    bits_error: float | None = omitted()

    @staticmethod
    def of(results: Results, rows: Sequence[Row]) -> "Model":
        run = next((arm.run for arm in results.arms if arm.run), None)
        made, quality = (run.model if run else "", list(rows)), results.baseline.quality
        if not isinstance(quality, Quality) or quality.model or quality.bits_per_byte is None:
            return Model(*made)
        nats, error = math.log(quality.perplexity), quality.perplexity_standard_error
        bits = quality.bits_per_byte
        return Model(*made, bits, error and bits * error / quality.perplexity / nats)


@dataclass(frozen=True)
class Comparison:
    """What `collect` takes from a results.json."""

    rows: list[Row]
    about: Origin
    model: str = ""


def write(option: str, path: str, values: Sequence[object]) -> None:
    """Write what results.json holds; of several models a list. Raises LogError where it cannot be
    written."""
    public = [without_folders(to_json(value)) for value in values]
    text = json.dumps(public[0] if len(public) == 1 else public, indent=1)
    files.write_text(option, path, text + "\n")


def without_folders(value: Any) -> Any:
    """The same JSON with the names of files alone: folders tell who the user is."""
    match value:
        case str():
            return _FOLDERS.sub("", value)
        case list():
            return [without_folders(inner) for inner in value]
        case dict():
            return {name: without_folders(inner) for name, inner in value.items()}
    return value


def read(path: str) -> list[Comparison]:
    """Raises UsageError, one line, for a file that is no results.json."""
    wrote = "recommend --share and ab --output write results.json"
    value = files.read_json("cannot read", path, UsageError, wrote)
    try:
        values = value if isinstance(value, list) and value else [value]
        return [_comparison(each) for each in values]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"{shown(path)} is no results.json: {why}; {wrote}") from None


def _comparison(value: Any) -> Comparison:
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    value = cleaned(value)
    facts = [arm["facts"] for arm in value["arms"]]
    model = next((of["model"] for of in facts if of and "model" in of), "")
    return from_json(Comparison, {**value, "model": model})
