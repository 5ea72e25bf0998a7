"""Every command is a file: quantbench/commands/NAME.py, or quantbench/ROOM/commands/NAME.py, which
holds a click command of its name."""

import functools
import importlib
from pathlib import Path

import click

_PACKAGE = Path(__file__).parent


@functools.cache
def command_files() -> dict[str, Path]:
    """The commands' files, by their names."""
    found = sorted(_PACKAGE.glob("commands/*.py")) + sorted(_PACKAGE.glob("*/commands/*.py"))
    return {file.stem: file for file in found if file.stem != "__init__"}


def command(name: str) -> click.Command:
    """The command of that name, whose file is imported."""
    parts = command_files()[name].relative_to(_PACKAGE.parent).with_suffix("").parts
    loaded: click.Command = getattr(importlib.import_module(".".join(parts)), name)
    return loaded
