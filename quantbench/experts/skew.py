"""How unevenly a layer's tokens are routed: what a placement by popularity can gain from it.

for skew in skews(popularity):
    print(skew.layer, skew.effective, skew.half_serves, skew.is_flat)
"""

from dataclasses import dataclass

from quantbench.experts.popularity import Popularity, effective_experts

# A layer is flat if the more popular half of its experts serves less than this above its even
# share: there it hardly matters which of its experts are in fast memory.
FLAT = 0.05


@dataclass(frozen=True)
class LayerSkew:
    """The routing of one layer."""

    layer: int
    shares: tuple[float, ...]  # of the layer's assignments, by expert
    effective: float  # this number of experts, chosen evenly, would be as varied
    # The share of assignments that the more popular half of the experts serves. The half is chosen
    # by one half of the text and tried on the other; the mean of both ways.
    half_serves: float
    is_flat: bool

    @property
    def most(self) -> int:
        """The expert chosen most often."""
        return max(range(len(self.shares)), key=self.shares.__getitem__)

    @property
    def least(self) -> int:
        """The expert chosen least often."""
        return min(range(len(self.shares)), key=self.shares.__getitem__)


def skews(popularity: Popularity) -> list[LayerSkew]:
    """The skew of each layer that has experts."""
    rows = []
    for layer, counts in enumerate(popularity.counts):
        if not counts:
            continue
        first, second = (half[layer] for half in popularity.halves)
        serves = (_half(first, second) + _half(second, first)) / 2
        rows.append(
            LayerSkew(
                layer=layer,
                shares=tuple(count / max(1, sum(counts)) for count in counts),
                effective=effective_experts(counts),
                half_serves=serves,
                is_flat=serves - len(counts) // 2 / len(counts) < FLAT,
            )
        )
    return rows


def _half(profiled: tuple[int, ...], tried: tuple[int, ...]) -> float:
    """The share of assignments in `tried` to the half of the experts most chosen in `profiled`."""
    ranked = sorted(range(len(profiled)), key=profiled.__getitem__, reverse=True)
    served = sum(tried[expert] for expert in ranked[: len(profiled) // 2])
    return served / max(1, sum(tried))
