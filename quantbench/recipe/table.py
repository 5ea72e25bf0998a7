"""What `quantbench recipe` prints: the recipe beside uniform schemes, its layers, which to take."""

from collections import Counter

from quantbench.quality.thresholds import class_of
from quantbench.recipe.search import Found, Measured
from quantbench.report.columns import Columns, aligned, number, size
from quantbench.text import counted

COLUMNS: Columns[Measured] = [
    ("scheme", lambda row: row.name),
    ("bits", number(lambda row: row.bits, ".2f")),
    ("memory", lambda row: size(row.memory_bytes)),
    ("tok/s", number(lambda row: row.tok_s, ".3g")),
    ("KL, nats", number(lambda row: row.kl, ".4f")),
    ("95 %", lambda row: "{:.4f} to {:.4f}".format(*row.kl_interval)),
    ("which is", lambda row: class_of(row.kl)),
    ("estimated ÷ measured", number(lambda row: row.predicted_kl / row.kl, ".2f")),
]


def report(found: Found) -> str:
    kinds: dict[str, Counter[str]] = {}
    for name, scheme in found.schemes.items():
        kind = ".".join(part for part in name.split(".")[-2:] if not part.isdigit())
        kinds.setdefault(kind, Counter())[scheme] += 1
    width = max(map(len, kinds))
    return "\n".join(
        [
            f"{found.model}: {verdict(found)}",
            "",
            aligned(COLUMNS, [found.recipe, *found.uniform]),
            "",
            "The recipe, by kind of layer",
            *(
                f"  {kind:<{width}}  "
                + ", ".join(f"{scheme} × {count}" for scheme, count in schemes.most_common())
                for kind, schemes in kinds.items()
            ),
        ]
    )


def verdict(found: Found) -> str:
    """Which to take, as a sentence without its full stop."""
    if found.difference is None:
        return "take the recipe: no uniform scheme satisfies the budget"
    best, low, high = found.uniform[0], *found.difference
    tried = counted(len(found.uniform), "uniform scheme")
    if found.better:
        return (
            f"take the recipe: its KL is {1 - found.recipe.kl / best.kl:.0%} below that of "
            f"{best.name}, the best of {tried} within the budget that were measured "
            f"(difference {low:.4f} to {high:.4f} nats, 95 %)"
        )
    return (
        f"take {best.name}: the recipe's KL is not lower beyond doubt (difference {low:.4f} to "
        f"{high:.4f} nats, 95 %)"
    )
