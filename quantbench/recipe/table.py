"""What `quantbench recipe` prints: the recipe and uniform schemes, its layers, which to take."""

from collections import Counter

from quantbench.quality.thresholds import class_of
from quantbench.recipe.search import Found, MeasuredRecipe
from quantbench.report.columns import Columns, aligned, number, size

COLUMNS: Columns[MeasuredRecipe] = [
    ("scheme", lambda row: row.name),
    ("bits", number(lambda row: row.bits, ".2f")),
    ("memory", lambda row: size(row.memory_bytes)),
    ("tok/s", number(lambda row: row.tok_s, ".3g")),
    ("KL, nats", number(lambda row: row.kl, ".3g")),
    ("95 %", lambda row: "{:.3g} to {:.3g}".format(*row.kl_interval)),
    ("which is", lambda row: class_of(row.kl)),
    ("estimated ÷ measured", number(lambda row: row.ratio, ".2f")),
]


def report(found: Found) -> str:
    kinds: dict[str, Counter[str]] = {}
    for name, scheme in found.mixture.schemes:
        kind = ".".join(part for part in name.split(".")[-2:] if not part.isdigit())
        kinds.setdefault(kind, Counter())[str(scheme)] += 1
    width, table = max(map(len, kinds)), aligned(COLUMNS, [found.recipe, *found.uniform])
    lines = [f"{found.model}: {verdict(found)}", "", table, "", "The recipe, by kind of layer"]
    for kind, schemes in kinds.items():
        counts = ", ".join(f"{scheme} × {count}" for scheme, count in schemes.most_common())
        lines.append(f"  {kind:<{width}}  {counts}")
    return "\n".join(lines)


def verdict(found: Found) -> str:
    """Which to take, as a sentence without its full stop."""
    if not found.uniform:
        return "take the recipe: no uniform scheme satisfies the budget"
    recipe, best = found.recipe, found.uniform[0]
    if found.max_kl is not None:
        if found.better:
            saved = size(best.memory_bytes - recipe.memory_bytes)
            return f"take the recipe: it is {saved} smaller than {best.name}, the smallest " \
                   f"uniform scheme of a KL of at most {found.max_kl:g}"  # fmt: skip
        return f"take {best.name}: it is no larger than the recipe"
    low, high = found.difference
    interval = f"difference {low:.2g} to {high:.2g} nats, 95 %"
    if found.better:
        return (
            f"take the recipe: its KL is {1 - recipe.kl / best.kl:.0%} below that of {best.name}, "
            f"the best uniform scheme within the budget ({interval})"
        )
    return f"take {best.name}: the recipe's KL is not lower beyond doubt ({interval})"
