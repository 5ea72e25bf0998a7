"""Which scheme each group of layers gets: the integer programme, one binary for each group and
scheme.

    groups = options(damage, costs, tied)
    chosen = choose(groups, "damage", {"stored": 60e6})     # an Option per group, or None
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from quantbench.quantize.spec import Int8Embedding, Int8WeightOnly
from quantbench.recipe.cost import EMBEDDING, Costs, Key

OUTPUT = "output"
# Schemes of embedding and output with the same numbers.
ALIKE = {("none", "none"), (str(Int8Embedding()), str(Int8WeightOnly()))}
GAP = 1e-3  # of the best total: estimates are no more exact
SECONDS = 20  # at most, of the solver


@dataclass(frozen=True)
class GroupOption:
    """A scheme for the layers of one group, with what it costs in all."""

    schemes: Mapping[str, str]  # by layer
    damage: float  # nats a token
    stored: float  # bytes as saved
    held: float  # bytes in memory
    seconds: float  # of a decoding step


def options(damage: Mapping[Key, float], costs: Costs, tied: bool) -> list[list[GroupOption]]:
    """The options of each group: the experts of a layer's matrix together, every other layer alone,
    and the embedding with the output, which may share its memory where they are tied."""
    members: dict[str, list[str]] = {}
    for name in costs.shapes:
        members.setdefault(re.sub(r"\.experts\.\d+", "", name), []).append(name)
    schemes = list(dict.fromkeys(scheme for _, scheme in costs.of))
    tables = [scheme for name, scheme in costs.of if name == EMBEDDING]

    def option(chosen: Mapping[str, str]) -> GroupOption:
        shared = tied and (chosen.get(EMBEDDING), chosen.get(OUTPUT)) in ALIKE
        each = [costs.of[key] for key in chosen.items() if not (shared and key[0] == EMBEDDING)]
        return GroupOption(
            chosen,
            sum(damage.get(key, 0.0) for key in chosen.items()),
            sum(cost.stored for cost in each),
            sum(cost.held for cost in each),
            sum(cost.seconds for cost in each),
        )

    groups = []
    for names in members.values():
        known = (s for s in schemes if all((n, s) in costs.of and (n, s) in damage for n in names))
        group = [dict.fromkeys(names, scheme) for scheme in known]
        if names == [OUTPUT]:
            group = [{EMBEDDING: table, **chosen} for chosen in group for table in tables]
        groups.append([option(chosen) for chosen in group])
    return groups


def choose(
    groups: Sequence[Sequence[GroupOption]], objective: str, limits: Mapping[str, float]
) -> list[GroupOption] | None:
    """The option of each group with the least sum of `objective`, an Option's field, where the sum
    of each field in `limits` is at most so much; None where nothing satisfies them."""
    flat = [option for group in groups for option in group]
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    one_each = (np.arange(len(groups))[:, None] == owner).astype(float)
    constraints = [LinearConstraint(one_each, 1, 1)]
    for name, most in limits.items():
        constraints.append(LinearConstraint([[getattr(o, name) / most for o in flat]], ub=1))
    cost = np.array([getattr(option, objective) for option in flat])
    result = milp(
        cost / max(cost.max(), 1e-300),
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": GAP, "time_limit": SECONDS},
    )
    if result.x is None:
        return None
    return [flat[i] for i in np.flatnonzero(result.x > 0.5)]


def least(groups: Sequence[Sequence[GroupOption]], name: str) -> float:
    """The smallest sum of an Option's field that any choice has."""
    return float(sum(min(getattr(option, name) for option in group) for group in groups))


def total(chosen: Sequence[GroupOption], name: str) -> float:
    """The sum of an Option's field."""
    return float(sum(getattr(option, name) for option in chosen))


def uniform(groups: Sequence[Sequence[GroupOption]]) -> dict[str, list[GroupOption]]:
    """By scheme, the choice of it for every linear layer; the embedding as --quantization of that
    name has it."""
    found = {}
    names = dict.fromkeys(s for group in groups for o in group for s in o.schemes.values())
    for name in names:
        embedding = name == str(Int8Embedding())
        linear = str(Int8WeightOnly()) if embedding else name
        wanted = {EMBEDDING: name if embedding else "none"}
        picked = [
            next((o for o in group
                  if all(s == wanted.get(layer, linear) for layer, s in o.schemes.items())), None)
            for group in groups
        ]  # fmt: skip
        if all(picked):
            found[name] = [option for option in picked if option]
    return found
