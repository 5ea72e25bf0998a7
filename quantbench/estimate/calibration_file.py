"""The file of a calibration: where this machine's lies, and how any is read.

calibration = load(path)                    # UsageError, one line, for what is none
calibration = of_this_machine("cpu")        # None where nobody calibrated it
"""

from collections.abc import Mapping
from pathlib import Path

from quantbench import files
from quantbench.errors import UsageError
from quantbench.estimate.calibration import FORMAT, Calibration
from quantbench.estimate.plausible import check
from quantbench.files import cache_folder
from quantbench.text import shown
from quantbench.typed_json import from_json


def load(path: str, what: str = "--calibration") -> Calibration:
    """Raises UsageError, one line, for a file that `calibrate` did not write. what: names the
    file in it."""
    value = files.read_json(what, path, UsageError, "`calibrate` writes one")
    if not isinstance(value, Mapping) or "products" not in value or "wholes" not in value:
        raise UsageError(
            f"{what} {path}: no calibration; `quantbench calibrate --json PATH` writes one"
        )
    if value.get("format") != FORMAT:
        raise UsageError(
            f"{what} {path}: format {shown(value.get('format'))}, and this version "
            f"reads {FORMAT}; calibrate again"
        )
    try:
        calibration = from_json(Calibration, value)
        check(calibration)
    except ValueError as error:
        raise UsageError(f"{what} {path}: damaged: {error}; calibrate again") from None
    return calibration


def default_path() -> Path:
    """Where `calibrate` writes, and where commands look for this machine's calibration."""
    return cache_folder() / "calibration.json"


def of_this_machine(device_type: str) -> Calibration | None:
    """The calibration in the default place; None where there is none, or one of another kind of
    device. Raises UsageError, one line that names the file, where it cannot be read."""
    path = default_path()
    if not path.exists():
        return None
    calibration = load(str(path), "this machine's calibration,")
    return calibration if calibration.device["type"] == device_type else None
