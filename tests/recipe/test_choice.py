"""Which scheme each group gets, against enumeration; bytes against those of whole models."""

import itertools

import pytest
import torch
from scipy import stats

from quantbench.models.config import ModelConfig
from quantbench.models.loading import load_config
from quantbench.quantize.spec import parse_scheme
from quantbench.recipe.choice import GroupOption, choose, least, options, total, uniform
from quantbench.recipe.cost import Costs, candidates
from quantbench.run.sizes import size_of

CPU, PRECISION = torch.device("cpu"), torch.bfloat16


def draw(seed):
    rng = stats.uniform(0.01, 1)
    return [
        [GroupOption({f"{g}": f"{o}"}, *rng.rvs(4, random_state=100 * seed + 10 * g + o))
         for o in range(4)]
        for g in range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed):
    groups = draw(seed)
    limits = {"stored": 2.0, "seconds": 2.5}
    every = [
        kind
        for kind in itertools.product(*groups)
        if all(total(kind, field) <= most for field, most in limits.items())
    ]
    chosen = choose(groups, "damage", limits)
    if not every:
        assert chosen is None
        return
    best = min(total(kind, "damage") for kind in every)
    assert all(total(chosen, field) <= most + 1e-6 for field, most in limits.items())
    assert total(chosen, "damage") == pytest.approx(best, rel=2e-3)  # the solver's gap


def test_nothing_fits_below_the_least():
    groups = draw(0)
    smallest = least(groups, "held")
    assert choose(groups, "damage", {"held": 0.99 * smallest}) is None
    assert total(choose(groups, "damage", {"held": 1.0001 * smallest}), "held") <= 1.01 * smallest


TIED = ModelConfig(
    name="tied",
    dim=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=768, vocab_size=1000,
    max_position=512, norm_eps=1e-5, rope_theta=1e4, tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("architecture", [TIED, "tiny", "tiny_moe"], ids=["tied", "tiny", "moe"])
def test_bytes_of_uniform_choices_are_those_of_the_model(architecture):
    """Every layer is in one group, with the other experts of its matrix."""
    if isinstance(architecture, str):
        architecture = load_config(architecture)
    specs = candidates(CPU, PRECISION, calibrated=True)
    costs = Costs(architecture, specs, CPU, PRECISION)
    groups = options(dict.fromkeys(costs.of, 0.0), costs, architecture.tie_embeddings)
    names = [name for group in groups for name in group[0].schemes]
    assert sorted(names) == sorted(["tok_embeddings", *architecture.linear_shapes()])
    experts = {len(one.schemes) for one, *_ in groups if ".experts." in str(one.schemes)}
    assert experts == ({8} if architecture.mixture else set())
    kinds = uniform(groups)
    assert {"none", "embed-int8", "int8wo", "fp6", "int4wo-64", "int4wo-64-gptq"} <= kinds.keys()
    weights = sum(rows * columns for rows, columns in architecture.linear_shapes().values())
    rest = None  # norms, and what no scheme changes
    for name, kind in kinds.items():
        expected = size_of(architecture, parse_scheme(name), CPU, PRECISION)
        assert 8 * total(kind, "stored") / weights == pytest.approx(expected.bits_per_weight)
        rest = expected.memory_bytes - total(kind, "held") if rest is None else rest
        assert expected.memory_bytes - total(kind, "held") == rest, name
