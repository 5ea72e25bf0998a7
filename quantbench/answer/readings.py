"""What the readings of a device's memory bandwidth say: figures of a row, and words."""

import statistics
from collections.abc import Sequence

from quantbench.bench.answers import Reading


def median(readings: Sequence[Reading]) -> float:
    """Bytes per second."""
    return statistics.median(reading.bytes_per_s for reading in readings)


def is_limit(readings: Sequence[Reading]) -> bool:
    """Whether they are the memory's speed, so that shares of it have a meaning."""
    return bool(readings) and all(reading.caveat is None for reading in readings)


def caveats(readings: Sequence[Reading]) -> list[str]:
    """Why they are not the memory's speed, in words for the report; each reason once."""
    return list(dict.fromkeys(reading.caveat for reading in readings if reading.caveat))


def span(readings: Sequence[Reading]) -> str:
    """The slowest and the fastest: 30.7 to 31.2 GB/s."""
    rates = [reading.bytes_per_s / 1e9 for reading in readings]
    return f"{min(rates):.1f} to {max(rates):.1f} GB/s"
