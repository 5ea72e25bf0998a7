"""How the time of some work follows the machine's speed, learned from rounds of the same work.

    drift = learned([[(seconds, speed), …], …], expected=Drift(0.8, 0.2))
    drift.slower(now, then)         # how many times as long it takes at speed `now` as at `then`

Work that only waits for memory goes with memory's speed, work that only multiplies with that of
arithmetic; most is between, and some depends on neither. Where the machine did not change from
round to round nothing can be learned, and what was expected (`by_rate`) stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.estimate.calibration import Speed

SCATTER = 0.1  # standard deviation of a measurement's logarithm, from round to round
TRUST = 0.2  # standard deviation of the exponents around those expected
LARGEST = 1.5  # exponent
STEEP = 3  # the larger, the sharper the bend between what memory and what arithmetic bounds
ARITHMETIC = 0.3  # exponent of work that waits for no memory: a part of the readings is noise


@dataclass(frozen=True)
class Drift:
    """seconds ∝ read ** -memory · multiply ** -arithmetic."""

    memory: float
    arithmetic: float

    def slower(self, now: Speed, then: Speed) -> float:
        """Seconds at speed `now` ÷ seconds at speed `then`."""
        memory, arithmetic = then.read / now.read, then.multiply / now.multiply
        return float(memory**self.memory * arithmetic**self.arithmetic)


def memory_exponent(rate: float, limit: float) -> float:
    """How far work goes with memory's speed that reads at `rate` where memory gives `limit`: as the
    p-norm of what memory and arithmetic take alone does, with p = STEEP."""
    return min(1.0, rate / limit) ** STEEP


def by_rate(rate: float, limit: float) -> Drift:
    """What is expected of work that reads at `rate` where memory gives `limit`."""
    memory = memory_exponent(rate, limit)
    return Drift(memory, ARITHMETIC * (1 - memory))


def learned(works: Sequence[Sequence[tuple[float, Speed]]], expected: Drift) -> Drift:
    """The exponents, by ridge regression: (seconds, speed) of each round, for each piece of work.

    Only differences between the rounds of one piece count, not those between pieces.
    """
    matrix, right = np.zeros((2, 2)), np.zeros(2)
    for rounds in works:
        if len(rounds) < 2:
            continue
        logs = np.log([[seconds, 1 / v.read, 1 / v.multiply] for seconds, v in rounds])
        logs -= logs.mean(0)
        x, y = logs[:, 1:], logs[:, 0]
        matrix += x.T @ x / SCATTER**2
        right += x.T @ y / SCATTER**2
    prior = np.array([expected.memory, expected.arithmetic])
    matrix += np.eye(2) / TRUST**2
    right += prior / TRUST**2
    memory, arithmetic = np.clip(np.linalg.solve(matrix, right), 0.0, LARGEST)
    return Drift(float(memory), float(arithmetic))
