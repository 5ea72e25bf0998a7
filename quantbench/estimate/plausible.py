"""What no machine is measured to be: impossible values, and figures beyond a card's datasheet.

check(calibration)              # ValueError, with the value, for a damaged file
refuse(calibration, sheet)      # QuantbenchError where it contradicts the device's datasheet
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from quantbench.devices import ACCELERATORS
from quantbench.errors import QuantbenchError
from quantbench.estimate.calibration import Calibration
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.datasheets import Datasheet
from quantbench.kv_cache import CACHES
from quantbench.log.config import PRECISIONS
from quantbench.text import shown
from quantbench.typed_json import LARGEST_MEASURED, require

ABOVE_DATASHEET = 1.02  # a reading above this multiple of the datasheet's figure is an error
# The lists of a calibration without which nothing can be estimated, and those that may be empty.
NEEDED = ("bandwidth", "products", "attention", "rest", "draws", "wholes")
OTHERS = ("weight_stacks", "cache_stacks", "exchanges")
# Whole numbers of a point that may be 0; so may the bytes that a prompt's attention finds cached.
MAY_BE_ZERO = {"depth", "normed"}
BESIDE = ("seconds", "read", "copy", "multiply")  # of a point, and of the speed read beside it
NAMED = {"model": MODELS, "cache": CACHES, "kv_cache": CACHES}  # names that a point may give


def check(calibration: Calibration) -> None:
    """Raise ValueError, with the value, for what no machine is measured to be."""
    device = calibration.device
    _one_of("precision", calibration.precision, PRECISIONS)
    _one_of("the device's type", device.get("type"), ("cpu", *ACCELERATORS))
    name = device.get("name")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise ValueError(f"the device's name takes printable text; given: {shown(name)}")
    for part in NEEDED:
        if not getattr(calibration, part):
            raise ValueError(f"it has no {part}")
    for kind, tokens in (("prompts", range(2, 1 << 62)), ("steps", range(1, 2))):
        if not any(point.tokens in tokens for point in calibration.wholes):
            raise ValueError(f"it has no {kind} among its wholes")
    for point in itertools.chain(*(getattr(calibration, part) for part in NEEDED + OTHERS)):
        kind = type(point).__name__
        _check_point(f"an {kind}" if kind[0] in "AE" else f"a {kind}", point)
    left, power = calibration.left_behind, calibration.power
    _not_negative("what prompts leave behind", left.one_pass, left.several)
    _not_negative("the seconds of a call", calibration.call_seconds)
    _not_negative("base_bytes", calibration.base_bytes)
    require("memory_bytes", calibration.memory_bytes)
    if power is not None:
        require("watts of the power limit", power.limit)
        _not_negative("watts", power.prompt, power.step)


def _check_point(of: str, point: Any) -> None:
    zero = MAY_BE_ZERO | ({"bytes"} if getattr(point, "queries", 1) > 1 else set())
    for field in dataclasses.fields(point):
        value, what = getattr(point, field.name), f"{field.name} of {of}"
        if dataclasses.is_dataclass(value):
            _check_point(f"the speed beside {of}", value)
        elif field.name in BESIDE:
            require(what, value)
        elif field.name in NAMED:
            _one_of(what, value, NAMED[field.name])
        elif type(value) is int:
            require(what, value, above=-1 if field.name in zero else 0)


def _one_of(what: str, value: object, names: Any) -> None:
    if value not in tuple(names):
        raise ValueError(f"{what} takes {', '.join(names)}; given: {shown(value)}")


def _not_negative(what: str, *values: float | None) -> None:
    for value in values:
        if value is not None and not 0 <= value < LARGEST_MEASURED:
            raise ValueError(f"{what} takes numbers from 0; given: {value:.6g}")


def contradictions(calibration: Calibration, sheet: Datasheet | None) -> list[str]:
    """What cannot be: faster than the card's datasheet, or slower than zero."""
    wrong = [
        f"a product of {p.scheme} took {p.seconds} s"
        for p in calibration.products
        if p.seconds <= 0
    ]
    if sheet is None or not calibration.bandwidth or wrong:
        return wrong
    wrong += [
        f"memory was {done} at {rate / 1e9:.0f} GB/s, above the datasheet's "
        f"{sheet.bandwidth / 1e9:.0f} GB/s"
        for done, rate in _rates(calibration)
        if rate > ABOVE_DATASHEET * sheet.bandwidth
    ]
    peak = sheet.peaks.get(calibration.precision)
    fastest = max(_multiplied(calibration), default=0.0)
    if peak and fastest > ABOVE_DATASHEET * peak:
        wrong.append(
            f"{calibration.precision} was multiplied at {fastest / 1e12:.0f} Tflop/s, above the "
            f"datasheet's {peak / 1e12:.0f}"
        )
    return wrong


def _rates(calibration: Calibration) -> Iterator[tuple[str, float]]:
    """What was done with blocks that no cache holds, and bytes per second."""
    largest = calibration.bandwidth[-2:]
    yield "read", max(p.read for p in largest)
    yield "copied", max(p.copy for p in largest)
    yield "read beside products and steps", calibration.speed.read


def _multiplied(calibration: Calibration) -> Iterator[float]:
    """Operations per second of the fixed product beside each, and of unquantized products."""
    for p in calibration.products:
        yield p.speed.multiply
        if p.scheme == "none":
            yield 2 * p.rows * p.inner * p.outer / p.seconds


def refuse(calibration: Calibration, sheet: Datasheet | None) -> None:
    """Raise QuantbenchError where a calibration contradicts the device's datasheet."""
    if wrong := contradictions(calibration, sheet):
        raise QuantbenchError(
            f"calibrate: {wrong[0]}; nothing is written: measure again with nothing else running"
        )
