"""KL against bytes: recipes, uniform schemes and other programs' files of the same weights.

    found = frontier(config, bits=[3.5, 4.5], paths=["model-Q4_K_M.gguf"])

A recipe for each number of bits a weight and for that of each file; beside it the best uniform
scheme within these bits, calibrated and not.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.log.origin import Origin, about
from quantbench.quality.scores import Scores
from quantbench.quantize.spec import Spec, parse_scheme
from quantbench.recipe.choice import GroupOption, total
from quantbench.recipe.search import Budget, Search
from quantbench.report.columns import Columns
from quantbench.run.plan import Plan, make_plan
from quantbench.run.sizes import size_of

Kind = Literal["recipe", "calibrated", "uniform", "file"]


@dataclass(frozen=True)
class FrontierPoint:
    kind: Kind
    name: str
    bits: float  # a weight of the linear layers, scales included
    kl: float  # nats a token to full precision
    interval: tuple[float, float]  # 95 %


@dataclass(frozen=True)
class Frontier:
    model: str
    weights: int  # of the linear layers
    points: list[FrontierPoint]  # the smallest first
    about: Origin


COLUMNS: Columns[FrontierPoint] = [
    ("bits", lambda point: f"{point.bits:.2f}"),
    ("kind", lambda point: point.kind),
    ("name", lambda point: point.name),
    ("KL, nats", lambda point: f"{point.kl:.3g}"),
    ("95 %", lambda point: "{:.3g} to {:.3g}".format(*point.interval)),
]


def frontier(config: RunConfig, bits: Sequence[float], paths: Sequence[str]) -> Frontier:
    """paths: checkpoints of the same model, quantized. Raises UsageError for others, and for bits
    below the smallest schemes."""
    plans = [make_plan(dataclasses.replace(config, checkpoint_path=path)) for path in paths]
    sizes = [_bits(plan) for plan in plans]
    wanted = sorted({*bits, *sizes})
    state = Search(config, Budget(bits=wanted[0]), None, calibrated=True)
    points = dict[str, FrontierPoint]()

    def add(kind: Kind, name: str, size: float, scores: Scores) -> None:
        kl = scores.mean_kl()
        points.setdefault(name, FrontierPoint(kind, name, size, kl.mean, kl.ends()))

    def chosen(kind: Kind, spec: Spec, options: Sequence[GroupOption]) -> None:
        add(kind, spec.name, 8 * total(options, "stored") / state.weights, state.scores(spec))

    for most in wanted:
        state.limits = {"stored": most / 8 * state.weights}
        mixture = state.choose(None)
        chosen("recipe", state.mixture(mixture), mixture)
        rivals = state.rivals(state.limits, "damage")
        best: dict[Kind, str] = {}
        for name in rivals:
            best.setdefault("calibrated" if parse_scheme(name).calibrated else "uniform", name)
        for kind, name in best.items():
            chosen(kind, parse_scheme(name), rivals[name])
    for plan, size in zip(plans, sizes, strict=True):
        add("file", plan.name, size, state.scores_of(plan))
    ordered = sorted(points.values(), key=lambda point: point.bits)
    return Frontier(state.plan.name, state.weights, ordered, about())


def _bits(plan: Plan) -> float:
    """Raises UsageError where a plan's checkpoint is not quantized."""
    if plan.checkpoint.saved is None or plan.spec.scheme is None:
        raise UsageError(f"FILE {plan.config.checkpoint_path} is not quantized")
    how = plan.architecture, plan.spec.scheme, plan.device, plan.precision
    return size_of(*how).bits_per_weight
