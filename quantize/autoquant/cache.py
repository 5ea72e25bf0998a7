"""Timings kept in a JSON file from one run to the next, by everything that they depend on.

A file that is no such file counts as empty, and one that cannot be written keeps nothing: then the
next run measures again.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantbench import devices, files
from quantbench.quantize.autoquant.race import Timing
from quantbench.typed_json import parsed

PACKAGES = ("torch", "torchao", "triton", "quantbench")  # that kernels come from
SOURCES = (".py", ".cpp", ".h")


@dataclass(frozen=True)
class Clock:
    """The timings of one shape of layer: per candidate's name, with its agreement (verdict.py);
    rotated, cache: as in race.Race."""

    timings: Mapping[str, tuple[Timing, float]]
    rotated: int
    cache: int


def default_cache() -> Path:
    """Where timings are kept."""
    return files.cache_folder() / "autoquant.json"


def key(layer: nn.Linear, batch_size: int, compile: bool) -> dict[str, Any]:
    """Everything that a product's time depends on, but for the candidate."""
    device = layer.weight.device
    instructions = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""
    return {
        "device": {"type": device.type, "instructions": instructions, **devices.describe(device)},
        "versions": _versions(),
        "shape": list(layer.weight.shape),
        "bias": layer.bias is not None,
        "dtype": str(layer.weight.dtype)[6:],
        "batch_size": batch_size,
        "compile": compile,
    }


def read(path: Path | None, key: Mapping[str, Any], names: Sequence[str]) -> Clock | None:
    """What was written under the key, if it has timings for all the names."""
    value = _entries(path).get(_text(key))
    try:
        timings = {
            name: (Timing(**fields), float(agreement))
            for name, (fields, agreement) in value["timings"].items()
        }
        clock = Clock(timings, int(value["rotated"]), int(value["cache"]))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return None
    return clock if set(names) <= set(timings) else None


def write(path: Path | None, key: Mapping[str, Any], clock: Clock) -> None:
    """Other entries stay; the file is replaced whole, so that a reader never sees half of it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            files.lock(folder)  # between reading and replacing, another process adds nothing
            _replace(path, _entries(path) | {_text(key): dataclasses.asdict(clock)})
        finally:
            os.close(folder)
    except OSError:  # a folder that cannot be written to: the next run times again
        return


def _replace(path: Path, entries: Mapping[str, Any]) -> None:
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"timings": entries}, file, indent=1)
        os.replace(unfinished, path)
    except OSError:
        Path(unfinished).unlink(missing_ok=True)


def _entries(path: Path | None) -> dict[str, Any]:
    try:
        entries = parsed(path.read_bytes())["timings"] if path else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _versions() -> dict[str, str]:
    """Versions of PACKAGES, and a digest of our kernels' sources, which change between versions."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for folder in ("ops", "quantize"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES:
                digest.update(path.read_bytes())
    return versions | {"sources": digest.hexdigest()[:16]}
