"""Which experts stay in fast memory, and how often a token then finds its expert there.

    fast = place("popularity", routers, capacity=20, popularity=popularity)
    fast[layer]                         # experts of that layer in fast memory
    hits(fast, counts)                  # assignments whose expert is there

A capacity is a number of experts over all layers; all experts of a model have the same size.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench import files
from quantbench.errors import UsageError
from quantbench.experts.popularity import AGAIN, Counts, Popularity, Routers
from quantbench.text import shown
from quantbench.typed_json import from_json

PLACEMENTS = ("popularity", "uniform", "first")  # or a file
Fast = tuple[frozenset[int], ...]  # experts in fast memory by layer; empty for a dense layer


def place(
    placement: str,
    routers: Routers,
    capacity: int,
    popularity: Popularity | None = None,
    seed: int = 0,
) -> Fast:
    """Choose `capacity` experts of the model, or all if it has fewer: those that are chosen most
    often, equally many of each layer (drawn at random by the seed), or those of the first layers.

    popularity: of this model, for "popularity".
    """
    experts = routers.experts
    if placement == "uniform":
        draw, shares = random.Random(seed), even_shares(experts, capacity)
        counts = zip(experts, shares, strict=True)
        return tuple(frozenset(draw.sample(range(of), share)) for of, share in counts)
    if placement == "first":
        order = [(layer, expert) for layer, of in enumerate(experts) for expert in range(of)]
        return _first(order, capacity, len(experts))
    assert placement == "popularity" and popularity is not None
    return most_popular(popularity.counts, capacity)


def most_popular(counts: Counts, capacity: int) -> Fast:
    """The `capacity` experts that are chosen most often, of all layers together. Equally popular
    ones come by their rank within their layers, so that no layer is favored."""
    places = []
    for layer, of_layer in enumerate(counts):
        ranked = sorted((-count, expert) for expert, count in enumerate(of_layer))
        places += [(less, rank, layer, expert) for rank, (less, expert) in enumerate(ranked)]
    return _first([place[2:] for place in sorted(places)], capacity, len(counts))


def _first(order: Sequence[tuple[int, int]], capacity: int, layers: int) -> Fast:
    """The first (layer, expert) of an order."""
    chosen = order[:capacity]
    return tuple(frozenset(e for layer, e in chosen if layer == i) for i in range(layers))


def even_shares(experts: Sequence[int], capacity: int) -> list[int]:
    """How many experts of each layer make `capacity`, as equal as possible; first layers get more.

    experts: how many each layer has, 0 or the same number.
    """
    each, remainder = divmod(min(capacity, sum(experts)), max(1, sum(map(bool, experts))))
    extra = iter(range(remainder))
    return [each + (next(extra, None) is not None) if count else 0 for count in experts]


def from_file(option: str, path: str, routers: Routers, capacity: int) -> Fast:
    """The placement that a file asks for: counts as `quantbench experts profile` writes them, or
    {"fast": [[0, 3], [], …]}, the experts by layer. Raises UsageError, one line, for another file,
    one of another model, and for more experts than `capacity`."""
    value, where = files.read_json(option, path, UsageError, AGAIN), f"{option} {path}"
    if not isinstance(value, dict) or "fast" not in value:
        popularity = Popularity.load(option, path, value).of_model(routers, option, path)
        return most_popular(popularity.counts, capacity)
    try:
        listed = from_json(list[list[int]], value["fast"])
    except ValueError:
        listed = []
    if len(listed) != len(routers.experts):
        raise UsageError(
            f"{where}: fast is a list of experts for each of {routers.model}'s "
            f"{len(routers.experts)} layers, such as [[0, 3], []]; given: {shown(value['fast'])}"
        )
    for layer, (chosen, count) in enumerate(zip(listed, routers.experts, strict=True)):
        if wrong := [expert for expert in chosen if not 0 <= expert < count]:
            has = f"experts 0 to {count - 1}" if count else "none"
            raise UsageError(f"{where}: layer {layer} has {has}; given: {shown(wrong[0])}")
    fast = tuple(map(frozenset, listed))
    if (count := sum(map(len, fast))) > capacity:
        raise UsageError(
            f"{where} lists {count} experts, and memory is for {capacity}; list "
            "fewer, or give more --expert_memory"
        )
    return fast


# ---------------------------------------------------------------------------------- hit rates


def hits(fast: Fast, counts: Counts) -> int:
    """The assignments whose expert is in fast memory."""
    layers = zip(counts, fast, strict=True)
    return sum(of_layer[expert] for of_layer, chosen in layers for expert in chosen)


def uniform_hits(counts: Counts, capacity: int) -> float:
    """The expected hits of a uniform placement, over all ways to draw it."""
    shares = zip(counts, even_shares(tuple(map(len, counts)), capacity), strict=True)
    return sum(sum(of_layer) * share / max(1, len(of_layer)) for of_layer, share in shares)


@dataclass(frozen=True)
class HitRates:
    """What each way of placing `capacity` experts gives on held-out counts: hits ÷ assignments."""

    capacity: int
    share: float  # of all experts
    assignments: int
    uniform: float  # expected
    popularity: float  # placed by counts of another text
    popularity_hits: int
    ideal: float  # placed by the held-out counts themselves: no placement does better
    ideal_hits: int

    @property
    def gain(self) -> float:
        return self.popularity - self.uniform

    @property
    def gain_share(self) -> float | None:
        """The gain ÷ that of the ideal placement; None where that gains nothing."""
        possible = self.ideal - self.uniform
        return self.gain / possible if possible > 1e-9 else None


def hit_rates(routers: Routers, pairs: Sequence[tuple[Counts, Counts]]) -> list[HitRates]:
    """Placements of eighths of the experts, rounded up, by the first counts of a pair, tried on the
    second; all pairs are added up. Eighths that are not enough for a token are left out."""
    every = sum(routers.experts)
    assignments = sum(sum(map(sum, held_out)) for _, held_out in pairs)
    of, rates = max(1, assignments), []
    for capacity in dict.fromkeys(-(-every * eighth // 8) for eighth in range(1, 9)):
        if capacity >= routers.experts_per_token:
            uniform = sum(uniform_hits(held_out, capacity) for _, held_out in pairs)
            popular = sum(hits(most_popular(first, capacity), second) for first, second in pairs)
            ideal = sum(hits(most_popular(held_out, capacity), held_out) for _, held_out in pairs)
            figures = uniform / of, popular / of, popular, ideal / of, ideal
            rates.append(HitRates(capacity, capacity / max(1, every), assignments, *figures))
    return rates
