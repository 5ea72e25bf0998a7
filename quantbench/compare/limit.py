"""How near decoding comes to what memory allows, from readings of the memory's speed.

limit_share(results, 0, facts.mean_step_bytes)      # Interval(0.86, 0.85, 0.87)

The speed is read before some cycles, and a step at the limit takes its bytes ÷ that reading. It is
compared with the turns of the same cycles as an arm is with the baseline, so that what slows both
cancels.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from quantbench import stats
from quantbench.bench.answers import Reading
from quantbench.bench.store import Results
from quantbench.compare.intervals import turns_of
from quantbench.report.interval import Interval


def limit_share(results: Results, number: int, bytes_of_step: float) -> Interval | None:
    """Seconds of a step at the memory's speed ÷ seconds of the arm's; above 1 where a cache held
    some of the weights. None without readings of the memory's speed, or turns in their cycles."""
    facts, own = results.arms[number].facts, turns_of(results.turns(number, "decode"))
    readings = results.bandwidth.get(facts.device, []) if facts else []
    if own is None or not is_limit(readings):
        return None
    rates = {one.cycle: one.bytes_per_s for one in readings if one.cycle is not None}
    cycles = np.array(sorted(rates))
    seconds = np.array([bytes_of_step / rates[cycle] for cycle in cycles])
    return ratio(own, stats.Turns(cycles, np.zeros_like(cycles), seconds))


def ratio(own: stats.Turns, other: stats.Turns) -> Interval | None:
    """Seconds of the other ÷ own; None where they share no cycle."""
    found = stats.intervals(own, {1: other}, stats.Floor())[1]
    return Interval.of(found) if found.cycles else None


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
