"""Which arms a recommendation times."""

import dataclasses

from quantbench.bench.store import ArmResult, Results, Scored, Settings
from quantbench.compare.limits import Limits
from quantbench.compare.recommend import BEATEN, SLOWER, UNJUDGED
from quantbench.compare.shortlist import MOST, Shortlist
from quantbench.quality.types import NoQuality, Quality

QUALITY = Quality(640, 8.0, 0.1)


def untimed(*judged):
    """By the arm's name, where (name, bytes, KL, kernel) were judged; KL None: no quality."""
    arms = [ArmResult(name, "", ["--quantization", name]) for name, *_ in (("none",), *judged)]
    results = Results(Settings(), arms)
    for number, (_, size, kl, kernel) in enumerate(judged, 1):
        quality = NoQuality("why") if kl is None else dataclasses.replace(QUALITY, kl=kl)
        results.apply(Scored(number, quality, None, size, kernel))
    why = Shortlist(Limits(), answer_only=True).untimed(results)
    return {arms[number].name: reason for number, reason in why.items()}


def test_what_another_beats_in_bytes_and_kl_is_not_timed():
    int8 = "int8wo", 8, 0.005, "cpu (10 layers)"
    assert untimed(int8, ("float8wo", 8, 0.006, "cpu (10 layers)")) == {"float8wo": BEATEN}
    assert untimed(int8, ("uintx-6-64", 6, 0.006, "cpu")) == {}  # fewer bytes
    assert untimed(int8, ("float8wo", 9, 0.004, "cpu")) == {}  # less KL
    assert untimed(int8, ("float8wo", 8, 0.006, "torchao")) == {}  # other kernels
    assert untimed(int8, ("int8dq", 8, 0.006, "cpu")) == {}  # reads prompts otherwise
    assert untimed(int8, ("float8wo", 8, 0.005, "cpu")) == {"float8wo": BEATEN}  # alike
    assert untimed(int8, ("fp6", 6, None, "cpu")) == {"fp6": UNJUDGED}


def test_six_at_most_with_the_smallest_and_the_best_compromise():
    """The smallest is taken even where its kernel is slow."""
    sizes = range(20, 12, -1)
    kinds = [(f"uintx-{n % 7 + 1}-{2 ** (n % 3 + 5)}", n, 0.02 - n / 1e4, "cpu") for n in sizes]
    best = "int8wo", 13, 0.0, "torchao"
    smallest = "int4wo-32", 11, 0.01, "reference"
    found = untimed(*kinds, best, smallest)
    assert set(found.values()) == {SLOWER} and len(found) == len(kinds) + 2 - MOST
    assert {name for name, *_ in kinds[:4]} == set(found)
