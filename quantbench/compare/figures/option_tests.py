"""Which option matters, where every setting was run once or twice: each option by itself.

    for test in by_option(seconds, {"threads": [1, 2, 1, 2], "policy": ["a", "a", "b", "b"]}):
        print(test.name, test.p, test.shown)

The runs are split by an option's values, whatever their other options are, and the split is
compared with splits at random: a permutation test of the sum of squares between the values
(Fisher 1935; Edgington and Onghena 2007). It needs no estimate of the noise and no distribution.
Exact where there are two values and few enough ways to split, else of random splits. Several
options are counted by Holm's method (1979), so that of runs in which nothing matters at most a
share `level` shows any option.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.compare.figures.families import FALSE_VERDICTS

MOST_SPLITS = 20_000


@dataclass(frozen=True)
class OptionTest:
    """One option: which runs have which value, and how often chance splits them so far apart."""

    name: str
    runs: dict[str, list[int]]  # by the value's text: places in the list of runs
    p: float
    shown: bool  # with all options counted


def by_option(
    seconds: Sequence[float],
    options: Mapping[str, Sequence[str]],
    level: float = FALSE_VERDICTS,
) -> list[OptionTest]:
    """The options with two values or more, the plainest first. options: each run's value."""
    logs = np.log(np.asarray(seconds, float))
    tests = []
    for name, values in options.items():
        split: dict[str, list[int]] = {}
        for place, value in enumerate(values):
            split.setdefault(value, []).append(place)
        if 1 < len(split) < len(values):
            tests.append(OptionTest(name, split, _chance(logs, list(split.values())), False))
    tests.sort(key=lambda test: test.p)
    shown, result = True, []
    for place, test in enumerate(tests):
        shown = shown and test.p * (len(tests) - place) <= level
        result.append(OptionTest(test.name, test.runs, test.p, shown))
    return result


def _chance(logs: np.ndarray, split: Sequence[Sequence[int]]) -> float:
    """The share of splits into groups of these sizes that are as far apart as this one."""
    sizes, count = [len(group) for group in split], len(logs)
    centred = logs - logs.mean()
    observed = sum(centred[list(group)].sum() ** 2 / len(group) for group in split)
    if len(sizes) == 2 and math.comb(count, sizes[0]) <= MOST_SPLITS:
        chosen = np.array(list(itertools.combinations(range(count), sizes[0])))
        sums = centred[chosen].sum(1)
        statistics = sums**2 / sizes[0] + sums**2 / sizes[1]  # the others sum up to the opposite
        return float((statistics >= observed * (1 - 1e-9)).mean())
    generator = np.random.default_rng(0)  # the same file gives the same answer
    orders = generator.permuted(np.tile(centred, (MOST_SPLITS, 1)), axis=1)
    ends = np.cumsum(sizes)[:-1]
    parts = np.split(orders, ends, axis=1)
    statistics = np.sum([part.sum(1) ** 2 / part.shape[1] for part in parts], axis=0)
    return float((1 + (statistics >= observed * (1 - 1e-9)).sum()) / (1 + MOST_SPLITS))
