"""Counts for tests, of a model of three layers: the first and the last have 4 experts."""

import random

from quantbench.experts.popularity import Popularity, Routers

ROUTERS = Routers("mine", 4, 2, (1,), ("aaaa", "", "cccc"))


def counts_of(routers, tokens, seed):
    """Random assignments of `tokens` tokens, skewed towards an expert's small numbers."""
    rng = random.Random(seed)
    layers = []
    for experts in routers.experts:
        counts = [0] * experts
        for _ in range(tokens if experts else 0):
            left = list(range(experts))
            for _ in range(routers.experts_per_token):
                chosen = left.pop(min(rng.randrange(len(left)), rng.randrange(len(left))))
                counts[chosen] += 1
        layers.append(tuple(counts))
    return tuple(layers)


def popularity_of(counts, routers=ROUTERS):
    """A popularity whose first half has these counts, and whose second half has none."""
    nothing = tuple((0,) * len(layer) for layer in counts)
    tokens = sum(counts[0]) // routers.experts_per_token
    return Popularity(routers, "a text", tokens, (counts, nothing))
