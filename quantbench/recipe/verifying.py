"""quantbench recipe --verify: the recipe and the best uniform scheme take turns on this machine.

    code = verify(config, found, budget, "mix.json")

The search predicts memory and speed, and has compared KL; here both run, and what was predicted has
to hold.
"""

import dataclasses
from collections.abc import Sequence

from quantbench.bench.arm import make_arms
from quantbench.bench.store import Results, Settings
from quantbench.compare.comparing import compare
from quantbench.compare.limits import Limits, exceeded, memory_bytes, memory_said
from quantbench.compare.recommend import Best, Recommendation
from quantbench.compare.row import Row
from quantbench.log import shell
from quantbench.log.config import RunConfig
from quantbench.recipe.search import Budget, Found


def verify(config: RunConfig, found: Found, asked: Budget, path: str) -> int:
    """Compare the recipe in the file `path` with found.uniform[0], and print which to take; the
    exit code, 1 where one of the two failed."""
    config = dataclasses.replace(config, write_result="none")
    texts = [shell.join(["--quantization", name]) for name in (found.uniform[0].name, path)]
    results = Results.begin(Settings(tokens=0), make_arms(config, texts), config.write_result)
    limits = Limits(max_kl=None, max_memory=asked.max_memory)

    def conclude(rows: Sequence[Row], best: Best) -> Recommendation:
        return Recommendation(limits, [], [sentence(asked, limits, *rows)])

    return compare(results, None, limits, conclude, "answer")


def sentence(asked: Budget, limits: Limits, uniform: Row, recipe: Row) -> str:
    """Which to take, by the rows of both. limits: those of `asked` that rows can exceed."""
    if uniform.failed or recipe.failed or recipe.speed_up is None:
        return "Not verified: the two were not compared to the end"
    words = limits.words()
    against = [words[name] for name in exceeded(recipe, limits)[0]]
    if asked.min_tok_s is not None and (recipe.decode_tok_s or 0.0) < asked.min_tok_s:
        against.append(f"it decodes {recipe.decode_tok_s or 0:.3g} tok/s")
    if asked.max_kl is not None and (memory_bytes(recipe) or 0) >= (memory_bytes(uniform) or 0):
        against.append("it is no smaller")
    figures = (
        f"its whole run has {recipe.speed_up.written('.2f')} times the speed of {uniform.arm}, in "
        f"{memory_said(recipe)} against {memory_said(uniform)}"
    )
    if against:
        return f"Take {uniform.arm}, not the recipe ({'; '.join(against)}): {figures}"
    return f"Verified, take the recipe: {figures}"
