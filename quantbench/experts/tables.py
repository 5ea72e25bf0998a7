"""Which experts are chosen: a line for each layer, and hit rates over capacities."""

from collections.abc import Callable, Sequence

from quantbench.experts.placement import HitRates
from quantbench.experts.popularity import FLAT, LayerSkew, Popularity
from quantbench.report.columns import Columns, aligned, number
from quantbench.text import counted

LEVELS = " ▁▂▃▄▅▆▇█"  # of a share, in quarters of an even one
EVEN = 4  # the level of an even share
WIDEST = 64  # characters of a heat map; more experts share a character


def title(popularity: Popularity) -> str:
    """What was counted: tiny_moe, 5 layers of 8 experts, 2 for each token; 30000 tokens of …"""
    routers = popularity.routers
    layers = sum(map(bool, routers.experts))
    return (
        f"{routers.model}: {counted(layers, 'layer')} of {routers.num_experts} experts, "
        f"{routers.experts_per_token} for each token; {popularity.tokens} tokens of "
        f"{popularity.text}"
    )


def lines(popularity: Popularity, skews: Sequence[LayerSkew]) -> list[str]:
    """A line for each layer with experts, and what they mean."""
    experts = popularity.routers.num_experts
    each = _experts_per_character(experts)
    columns: Columns[LayerSkew] = [
        ("layer", lambda skew: str(skew.layer)),
        (f"experts 0 to {experts - 1}", lambda skew: f"|{heat(skew.shares)}|"),
        ("most chosen", lambda skew: _expert(skew, max)),
        ("least", lambda skew: _expert(skew, min)),
        ("as varied as", lambda skew: f"{skew.effective:.1f} of {experts}"),
        ("popular half serves", number(lambda skew: skew.half_serves, ".1%")),
    ]
    meaning = (
        f"{LEVELS[EVEN]} is an even share, {100 / experts:.1f} % of a layer's assignments; "
        f"{LEVELS[-1]} is twice that or more, blank next to nothing"
    )
    if each > 1:
        meaning += f"; a character is the mean of {each} experts"
    flat = [skew.layer for skew in skews if skew.is_flat]
    remarks = [meaning, "the popular half is chosen by half of the text, and tried on the other"]
    if flat:
        remarks.append(
            f"flat: {_layers(flat)}; the popular half serves less than {100 * FLAT:.0f} points "
            "above an even share, so that popularity hardly matters there"
        )
    if dense := popularity.routers.dense_layers:
        remarks.append(f"without experts: {_layers(dense)}")
    return [title(popularity), "", *aligned(columns, skews).splitlines(), "", *remarks]


def heat(shares: Sequence[float]) -> str:
    """A character for each expert, or for as many as fit into WIDEST characters."""
    each = _experts_per_character(len(shares))
    groups = [shares[start : start + each] for start in range(0, len(shares), each)]
    levels = [EVEN * len(shares) * sum(group) / len(group) for group in groups]
    return "".join(LEVELS[min(len(LEVELS) - 1, round(level))] for level in levels)


def _expert(skew: LayerSkew, which: Callable[[Sequence[float]], float]) -> str:
    """The first expert that has the most or the fewest assignments: "3: 12.5%"."""
    share = which(skew.shares)
    return f"{skew.shares.index(share)}: {share:.1%}"


def _experts_per_character(experts: int) -> int:
    return -(-experts // WIDEST)


def _layers(numbers: Sequence[int]) -> str:
    noun = "layer" if len(numbers) == 1 else "layers"
    return f"{noun} {', '.join(map(str, numbers))}"


RATES: Columns[HitRates] = [
    ("experts in fast memory", lambda rates: f"{rates.capacity} ({rates.share:.0%})"),
    ("uniform", number(lambda rates: rates.uniform, ".1%")),
    ("popularity", number(lambda rates: rates.popularity, ".1%")),
    ("its hits", lambda rates: str(rates.popularity_hits)),
    ("ideal", number(lambda rates: rates.ideal, ".1%")),
    ("its hits", lambda rates: str(rates.ideal_hits)),
    ("popularity gains", number(lambda rates: rates.gain, "+.1f", 100, " points")),
    ("of what is possible", number(lambda rates: rates.gain_share, ".0%")),
]


def rate_lines(rates: Sequence[HitRates], held_out: str | None) -> list[str]:
    """Hit rates by capacity. held_out: the text that they are of; None: halves of one text."""
    tried = f"the text {held_out}" if held_out else "the half that it was not counted on"
    return [
        f"Hit rate: assignments whose expert is in fast memory ÷ all {rates[0].assignments}",
        *aligned(RATES, rates).splitlines(),
        "",
        f"popularity is tried on {tried}; ideal knows that text's own counts; uniform is the mean "
        "over all ways to draw it",
    ]
