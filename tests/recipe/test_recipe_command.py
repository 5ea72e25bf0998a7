"""quantbench recipe on the embedded model: budgets kept, the file runs, and what is refused."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.models.formats import EMBEDDED
from quantbench.models.loading import load_config
from quantbench.quality.texts import Texts
from quantbench.quantize import recipe
from quantbench.quantize.spec import parse_scheme
from quantbench.recipe import search
from quantbench.recipe.cost import EMBEDDING
from quantbench.recipe.search import Budget, calibration_tokens
from quantbench.recipe.verifying import verify
from quantbench.run import calibration
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from quantbench.run.sizes import size_of
from tests.bench.world import Behaviour, World
from tests.programs import worked

made = partial(worked, "recipe", "--device", "cpu")
searched = partial(search.search, RunConfig(device="cpu"), calibrated=False)


@pytest.fixture
def quick(monkeypatch):
    """Fewer schemes, tokens and uniform schemes."""
    monkeypatch.setattr("quantbench.recipe.cost.SHOWN", ("none", "int8wo", "int4wo-64", "fp6"))
    monkeypatch.setattr("quantbench.recipe.cost.BETWEEN", ("uintx-3-64", "uintx-5-128"))
    monkeypatch.setattr(calibration, "HESSIAN_ROWS", 8)
    for name, value in {"SEQUENCES": 2, "JUDGED_TOKENS": 512, "UNIFORM": 1}.items():
        monkeypatch.setattr(search, name, value)


@pytest.mark.parametrize("words, rival", [("", "int4wo-64-gptq"), ("--uncalibrated", "int4wo-64")])
def test_bits_are_kept_and_the_recipe_is_better(words, rival, quick, in_tmp):
    result = made("--bits", "4.5", "--output", "mix.json", *words.split())
    assert "take the recipe: its KL is" in result.stdout
    assert f"below that of {rival}," in result.stdout
    plan = make_plan(RunConfig(quantization="mix.json", device="cpu"))
    assert plan.spec.calibrated == (not words)
    size = size_of(plan.architecture, plan.spec, plan.device, plan.precision)
    assert 4.3 < size.bits_per_weight <= 4.5
    about = json.loads(Path("mix.json").read_text())["about"]
    assert about["better"] and about["recipe"]["kl"] < about["uniform"][0]["kl"]
    assert 0.5 < about["recipe"]["predicted_kl"] / about["recipe"]["kl"] < 2
    if words:
        exported = worked("recipe", "export", "mix.json").stdout
        assert len(exported.splitlines()) == 5 * 7 + 2  # Hugging Face's tensors, by layer


def test_the_smallest_of_a_kl(quick):
    found = searched(Budget(max_kl=0.05))
    assert found.recipe.kl <= 0.05
    assert found.better == (found.recipe.memory_bytes < found.uniform[0].memory_bytes)
    assert all(rival.kl <= 0.05 for rival in found.uniform)


def test_memory_counts_what_the_recipe_holds(quick, monkeypatch):
    """The recipe's own weights, and what a run of any scheme has."""
    monkeypatch.setattr(search.devices, "peak_memory", lambda _: {"resident": 430_000_000})
    found = searched(Budget(max_memory=437_000_000))
    plan = make_plan(RunConfig(device="cpu"))
    sizes = [
        size_of(plan.architecture, spec, plan.device, plan.precision).memory_bytes
        for spec in (found.mixture, parse_scheme(found.uniform[0].name))
    ]
    assert found.recipe.memory_bytes <= 437_000_000
    with pytest.raises(UsageError, match="400.00 MB: the smallest schemes .* come to 43"):
        searched(Budget(max_memory=400_000_000))
    apart = found.recipe.memory_bytes - found.uniform[0].memory_bytes
    assert apart == sizes[0] - sizes[1]


def test_a_step_is_timed_and_the_slowest_schemes_are_left_out(quick, monkeypatch):
    """Seconds as bytes at 1 GB/s, so that a limit is one of bytes."""

    def time(costs, config):
        return {(costs.shapes[name], scheme): cost.stored / 1e9
                for (name, scheme), cost in costs.of.items() if name != EMBEDDING}  # fmt: skip

    monkeypatch.setattr(search.Costs, "time", time)
    step = SimpleNamespace(seconds=0.02)
    monkeypatch.setattr("quantbench.estimate.here.Here.phases", lambda *_: (step, step))
    found = searched(Budget(min_tok_s=80.0))
    assert 80 <= found.recipe.tok_s < 82
    assert all(rival.tok_s >= 80 for rival in found.uniform)


@pytest.mark.parametrize(
    "budget, expected",
    [
        (Budget(bits=4.5), r"Verified, take the recipe: its whole run has 2\.0\d \(.*\) times"),
        (Budget(max_memory=1), r"Take int8wo, not the recipe \(memory above 0.00 MB\): "),
        (Budget(min_tok_s=30), r"Take int8wo, not the recipe \(it decodes 2\d.* tok/s\): "),
        (Budget(max_kl=1), r"Take int8wo, not the recipe \(it is no smaller\): "),
    ],
)
def test_both_run_before_the_recipe_is_taken(budget, expected, tmp_path, monkeypatch, capsys):
    """Steps of 100 and of 50 ms, in the same memory."""
    World.of(Behaviour(0.1, noise=0.002), Behaviour(0.05, noise=0.002)).install(monkeypatch)
    shapes, path = load_config("tiny").linear_shapes(), str(tmp_path / "mix.json")
    recipe.write(path, recipe.make("tiny", shapes, {"*": "int4wo-64"}))
    found = SimpleNamespace(uniform=[SimpleNamespace(name="int8wo")])
    assert verify(RunConfig(device="cpu"), found, budget, path) == 0
    assert re.match(expected, capsys.readouterr().out)


def test_the_frontier_is_below_uniform_schemes_and_files(quick, in_tmp):
    """A file of int4wo-64: at its bits and at others."""
    config = RunConfig(quantization="int4wo-64", device="cpu", save="saved")
    load(make_plan(config), lambda done, total: None, lambda line: None)
    words = "recipe frontier saved --device cpu --bits 3.5 --json new.json"
    table = worked(*words.split()).stdout
    points = json.loads(Path("new.json").read_text())["points"]
    assert [round(p["bits"], 1) for p in points] == sorted([3.5] * 3 + [4.5] * 4)
    small, large = ({p["kind"]: p["kl"] for p in points if (p["bits"] > 4) == large}
                    for large in (False, True))  # fmt: skip
    assert small["recipe"] < 1.05 * small["calibrated"] < small["uniform"]
    assert large["recipe"] < large["calibrated"] < large["uniform"] == large["file"]
    assert all(p["name"] in table for p in points)


def test_the_damage_is_not_estimated_on_what_judges():
    plan = make_plan(RunConfig(device="cpu"))
    tokens = calibration_tokens(plan, None)
    judged = Texts(plan, None, search.JUDGED_TOKENS)
    read = [part.ids for look in range(6) for part in judged.look(look, None)]
    seen = {tuple(ids[i : i + 8]) for ids in read for i in range(len(ids) - 8)}
    own = [tuple(row[i : i + 8]) for row in tokens.tolist() for i in range(1, len(row) - 8)]
    assert tokens.shape == (8, 256) and tokens.dtype == torch.int64
    assert sum(ids in seen for ids in own) < 0.02 * len(own)  # what Python modules share


def test_a_uniform_scheme_is_taken_where_the_recipe_is_not_better(quick, monkeypatch):
    """The choice is given damage that is wrong: of every scheme the inverse."""
    damages = search.damages
    monkeypatch.setattr(
        search, "damages",
        lambda *given: {key: 1 / (value + 1e-9) for key, value in damages(*given).items()},
    )  # fmt: skip
    result = made("--bits", "5", "--uncalibrated")
    assert "the recipe's KL is not lower beyond doubt" in result.stdout
    assert "take the recipe" not in result.stdout


@pytest.mark.parametrize("start", [0, 100_000])
def test_a_text_that_judges_is_refused(tmp_path, start):
    """Its beginning, or a later part, behind lines that are of this file alone."""
    own = "".join(f"Line {i} of a text that nobody else has written down.\n" for i in range(40))
    judging = (EMBEDDED / "heldout.txt").read_text()[start : start + 20_000]
    path, plan = tmp_path / "text.txt", make_plan(RunConfig(device="cpu"))
    path.write_text(own)
    tokens = calibration_tokens(plan, str(path))
    assert 1 <= len(tokens) <= 8 and tokens.shape[1] == 256
    path.write_text(own + judging)
    with pytest.raises(UsageError, match="has parts of heldout.txt, on which the recipe is judged"):
        calibration_tokens(plan, str(path))
