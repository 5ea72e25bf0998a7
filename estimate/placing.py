"""What products take in a model, fitted to whole steps: a weight's arithmetic, and waiting for it.

    placed, layer, once = fit_steps(terms, waits, seconds, wholes)
    placed(inner, outer, waiting)       # seconds of one product

A kernel that has memory fetch the next weights while it multiplies takes the longer of the two
times; one that does the one after the other takes their sum. And one that has fewer lines on their
way than the reading of a block waits longer than that does. Which it is, is fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import minimize_scalar, nnls

STEEPS = (1.0, 1.5, 2.0, 3.0, 5.0)  # norms that are tried
WAITS = (1.0, 1.25, 1.5, 2.0)  # for a second that the reading of a block waits; tried, too
LEAST = 0.02  # of a step's longest time for a weight: arithmetic that is shorter is none


@dataclass(frozen=True)
class Placed:
    """Seconds of products in a model."""

    weight: float  # seconds of a weight's arithmetic; of waiting for it, too, where steep is None
    steep: float | None  # the norm that joins these and waiting: 1 a sum, more nearer the longer
    output: float
    input: float
    waits: float = 1.0  # for each second that the reading of a block waits

    def __call__(self, inner: int, outer: int, waiting: float) -> float:
        """Of x times a weight (outer, inner). waiting: seconds for each weight."""
        each = self.weight
        if self.steep is not None:
            each = float(joined(self.weight, self.waits * waiting, self.steep))
        return each * inner * outer + self.output * outer + self.input * inner


def joined(one: float, other: np.ndarray | float, steep: float) -> np.ndarray | float:
    """The norm of two times."""
    longer = np.maximum(np.maximum(one, other), 1e-30)
    return longer * ((one / longer) ** steep + (other / longer) ** steep) ** (1 / steep)


def least_squares(matrix: np.ndarray, measured: np.ndarray) -> tuple[np.ndarray, float]:
    """The coefficients of the matrix's columns, none below zero, and the error that is left."""
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    solved, error = nnls(matrix / scale, measured)
    return solved / scale, float(error)


def fit_steps(
    terms: Sequence[Sequence[float]],
    waits: Sequence[float],
    seconds: Sequence[float],
    wholes: Sequence[float],
) -> tuple[Placed, float, float]:
    """The products' constants, and seconds of a layer and of a step, with the least squared error
    relative to the whole steps.

    terms: of each step weights, outputs, inputs, layers, 1; waits: seconds of waiting for a weight;
    seconds: of the step, without what is not fitted.
    """
    unit = np.asarray(wholes)
    matrix = np.asarray(terms) / unit[:, None]
    measured, waiting = np.asarray(seconds) / unit, np.asarray(waits)
    weights, others = matrix[:, 0], matrix[:, 1:]

    def rest(log_weight: float, steep: float, factor: float) -> tuple[np.ndarray, float]:
        """Constants of the other terms, and the error that is left."""
        each = joined(float(np.exp(log_weight)), factor * waiting, steep)
        return least_squares(others, measured - each * weights)

    def error(log_weight: float, steep: float, factor: float) -> float:
        return rest(log_weight, steep, factor)[1]

    most = float(np.log((measured / weights).max()))
    bounds = most + np.log(LEAST), most
    tried = []
    for steep, factor in product(STEEPS, WAITS):
        best = minimize_scalar(error, bounds=bounds, args=(steep, factor), method="bounded")
        tried.append((best.fun, steep, factor, float(best.x)))
    _, steep, factor, weight = min(tried)
    output, inner, layer, once = map(float, rest(weight, steep, factor)[0])
    return Placed(float(np.exp(weight)), steep, output, inner, factor), layer, once
