"""Which experts stay in fast memory, and how often a token then finds its expert there.

    placement = place("popularity", routers, capacity=20, popularity=popularity)
    placement.fast[layer]                       # experts of that layer in fast memory
    hits(placement, counts)                     # how many assignments they serve

A capacity is a number of experts over all layers; all experts of a model are equally large.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quantbench import files
from quantbench.errors import UsageError
from quantbench.experts.popularity import AGAIN, Counts, Popularity, Routers
from quantbench.text import shown
from quantbench.typed_json import from_json

PLACEMENTS = {
    "popularity": "the experts chosen most often, of all layers together",
    "uniform": "equally many of each layer, drawn at random",
    "first": "all experts of the first layers, as far as they go",
}


@dataclass(frozen=True)
class Placement:
    """The experts in fast memory."""

    fast: tuple[frozenset[int], ...]  # by layer; empty for a layer without experts

    @property
    def count(self) -> int:
        return sum(map(len, self.fast))


def place(
    how: str, routers: Routers, capacity: int, popularity: Popularity | None = None, seed: int = 0
) -> Placement:
    """Choose `capacity` experts of the model, or all if it has fewer.

    how: a key of PLACEMENTS. popularity: of this model, for "popularity". seed: for "uniform".
    Raises UsageError for a word that is none, and for a popularity that is missing.
    """
    experts = routers.experts
    if capacity < 0:
        raise UsageError(f"a placement of {capacity} experts is impossible; give 0 or more")
    if how == "uniform":
        draw = random.Random(seed)
        shares = zip(even_shares(experts, capacity), experts, strict=True)
        return Placement(tuple(frozenset(draw.sample(range(of), few)) for few, of in shares))
    if how == "first":
        order = [(layer, expert) for layer, of in enumerate(experts) for expert in range(of)]
    elif how != "popularity":
        raise UsageError(f"a placement is {', '.join(PLACEMENTS)} or a file; given: {shown(how)}")
    elif popularity is None:
        raise UsageError(
            "a placement by popularity needs counts; write them with quantbench experts profile"
        )
    else:
        order = by_popularity(popularity.counts)
    layers = range(len(experts))
    return Placement(tuple(frozenset(e for at, e in order[:capacity] if at == i) for i in layers))


def by_popularity(counts: Counts) -> list[tuple[int, int]]:
    """All (layer, expert), those chosen most often first.

    Equally popular ones come by their place within their layers, so that no layer is favored.
    """
    places = []
    for layer, of_layer in enumerate(counts):
        ranked = sorted(range(len(of_layer)), key=lambda e: -of_layer[e])  # noqa: B023
        places += [(-of_layer[e], rank, layer, e) for rank, e in enumerate(ranked)]
    return [(layer, expert) for _, _, layer, expert in sorted(places)]


def even_shares(experts: Sequence[int], capacity: int) -> list[int]:
    """How many experts of each layer make `capacity`, as equal as possible; first layers get more.

    experts: how many each layer has, 0 or the same number.
    """
    having = [layer for layer, count in enumerate(experts) if count]
    each, more = divmod(min(capacity, sum(experts)), max(1, len(having)))
    shares = {layer: each + (number < more) for number, layer in enumerate(having)}
    return [shares.get(layer, 0) for layer in range(len(experts))]


def from_file(option: str, path: str, routers: Routers, capacity: int) -> Placement:
    """The placement that a file asks for.

    The file is either what `quantbench experts profile` wrote, whose most popular experts are
    taken, or {"fast": [[0, 3], [], …]}, the experts themselves by layer.
    Raises UsageError, one line, for another file, one of another model, and for more experts than
    `capacity`.
    """
    value = files.read_json(option, path, UsageError, AGAIN)
    if not isinstance(value, dict) or "fast" not in value:
        popularity = Popularity.read(option, path, value).of_model(routers, option, path)
        return place("popularity", routers, capacity, popularity)
    try:
        listed = from_json(list[list[int]], value["fast"])
    except ValueError:
        raise UsageError(
            f"{option} {path}: fast is a list of experts for each layer, such as [[0, 3], []]; "
            f"given: {shown(value['fast'])}"
        ) from None
    if len(listed) != len(routers.experts):
        raise UsageError(
            f"{option} {path} lists experts of {len(listed)} layers; {routers.model} has "
            f"{len(routers.experts)}: list one for each, [] for none"
        )
    for layer, (chosen, count) in enumerate(zip(listed, routers.experts, strict=True)):
        wrong = [expert for expert in chosen if not 0 <= expert < count]
        if wrong:
            has = f"experts 0 to {count - 1}" if count else "none"
            raise UsageError(f"{option} {path}: layer {layer} has {has}; given: {shown(wrong[0])}")
    placement = Placement(tuple(map(frozenset, listed)))
    if placement.count > capacity:
        raise UsageError(
            f"{option} {path} lists {placement.count} experts, and memory is for {capacity}; list "
            "fewer, or give more --expert_memory"
        )
    return placement


# ---------------------------------------------------------------------------------- hit rates


def hits(placement: Placement, counts: Counts) -> int:
    """The assignments whose expert is in fast memory."""
    layers = zip(counts, placement.fast, strict=True)
    return sum(of_layer[expert] for of_layer, fast in layers for expert in fast)


def uniform_hits(counts: Counts, capacity: int) -> float:
    """The expected hits of a uniform placement, over all ways to draw it."""
    shares = zip(counts, even_shares(tuple(map(len, counts)), capacity), strict=True)
    return sum(sum(of_layer) * share / max(1, len(of_layer)) for of_layer, share in shares)


def popular_hits(profiled: Counts, held_out: Counts, capacity: int) -> int:
    """The hits in `held_out` of the experts that are chosen most often in `profiled`."""
    return sum(held_out[layer][e] for layer, e in by_popularity(profiled)[:capacity])


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
        """Popularity's hit rate less uniform's."""
        return self.popularity - self.uniform

    @property
    def gain_share(self) -> float | None:
        """The gain ÷ that of the ideal placement; None where that gains nothing."""
        possible = self.ideal - self.uniform
        return self.gain / possible if possible > 1e-9 else None


def hit_rates(routers: Routers, pairs: Sequence[tuple[Counts, Counts]]) -> list[HitRates]:
    """Placements of eighths of the experts by the first counts of a pair, tried on the second;
    hits and assignments of all pairs are added up.

    Eighths are rounded up; those that are not enough for a token are left out.
    """
    every = sum(routers.experts)
    eighths = dict.fromkeys(-(-every * eighth // 8) for eighth in range(1, 9))
    assignments = sum(sum(map(sum, held_out)) for _, held_out in pairs)
    rates = []
    for capacity in (c for c in eighths if c >= routers.experts_per_token):
        uniform = sum(uniform_hits(held_out, capacity) for _, held_out in pairs)
        popular = sum(popular_hits(*pair, capacity) for pair in pairs)
        ideal = sum(popular_hits(held_out, held_out, capacity) for _, held_out in pairs)
        of = max(1, assignments)
        figures = uniform / of, popular / of, popular, ideal / of, ideal
        rates.append(HitRates(capacity, capacity / max(1, every), assignments, *figures))
    return rates
