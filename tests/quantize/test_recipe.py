"""Recipes: which scheme each layer gets, and that its numbers are that scheme's."""

import functools
import random
from pathlib import Path

import pytest
import torch

from quantbench import models
from quantbench.compare.limits import Limits
from quantbench.compare.menu import menu
from quantbench.log.config import RunConfig, argv
from quantbench.log.log import read as read_log
from quantbench.log.options import parse as options
from quantbench.models.formats import open_checkpoint
from quantbench.models.loading import load_config
from quantbench.ops.ranks import ALONE
from quantbench.quantize import recipe
from quantbench.quantize.gptq import refined
from quantbench.quantize.observe import observed, products
from quantbench.quantize.registry import SCHEMES as SCHEME_OF
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import Int8Embedding, parse
from quantbench.run import calibration
from quantbench.run.calibration import token_ids
from quantbench.run.plan import make_plan
from quantbench.run.sizes import size_of
from tests import seeds
from tests.models import hugging_face
from tests.parallel import work
from tests.programs import command, worked

CPU = torch.device("cpu")
SHAPES = load_config("tiny").linear_shapes()
SCHEMES = ("none", "int8wo", "int8dq", "fp6", "int4wo-32", "uintx-3-64", "mxfp4", "embed-int8")
IDS = torch.arange(64)[None]
SMALL = ("int4wo-32", "uintx-3-64", "mxfp4", "int4wo-32-gptq", "mxfp4-awq")
CALIBRATED = ("int4wo-32-gptq", "uintx-3-64-gptq", "int4wo-64-awq", "mxfp4-awq")
MIXED = {
    "layers.1.feed_forward.w2": "none",
    "layers.*.w2": "int8wo",
    "layers.*": "int4wo-32",
    "output": "int8wo",
    "tok_embeddings": "embed-int8",
}


def file_of(folder, schemes, model="tiny", **more):
    path = str(folder / "mix.json")
    recipe.write(path, recipe.make(model, load_config(model).linear_shapes(), schemes, **more))
    return path


def drawn(schemes=SCHEMES):
    """A scheme for each layer, drawn anew in every run."""
    of = {layer: random.choice(schemes) for layer in SHAPES}
    return of | {"tok_embeddings": random.choice(("none", "embed-int8"))}


def test_a_recipe_is_read_as_it_was_written(tmp_path):
    made = recipe.make("tiny", SHAPES, MIXED, "int8", {"made by": ["a", 1]})
    recipe.write(str(tmp_path / "a.json"), made)
    again = parse(str(tmp_path / "a.json"))
    assert again.of_layers("tiny", SHAPES) == made and again.about == made.about
    assert again.name == made.name == f"recipe-{made.digest}"
    assert parse(str(again)) == again and str(again) == f"{tmp_path}/a.json@{made.digest}"


def test_the_digest_is_that_of_what_a_recipe_does():
    def digest(schemes=MIXED, cache="int8", about=None):
        return recipe.make("tiny", SHAPES, schemes, cache, about).digest

    assert digest() == digest(about={"made": 1})
    for other in (dict(reversed(MIXED.items())), MIXED | {"output": "fp6"}):
        assert digest(other) != digest()
    assert digest(cache=None) != digest()


def test_an_exact_name_counts_first_and_then_the_first_pattern():
    made = dict(recipe.make("tiny", SHAPES, MIXED).layers)
    assert {name: str(spec) for name, spec in made.items() if name.startswith("layers.1.")} == {
        "layers.1.attention.wqkv": "int4wo-32",
        "layers.1.attention.wo": "int4wo-32",
        "layers.1.feed_forward.w13": "int4wo-32",
        "layers.1.feed_forward.w2": "none",
    }
    assert str(made["layers.0.feed_forward.w2"]) == "int8wo"
    assert made["tok_embeddings"] == Int8Embedding() and made.keys() - SHAPES == {"tok_embeddings"}


def test_each_layer_is_that_of_its_scheme(tmp_path):
    schemes = drawn()
    full, made = (
        models.load("tiny", precision=torch.bfloat16, quantization=how)
        for how in ("none", file_of(tmp_path, schemes))
    )
    for name, scheme in schemes.items():
        alone = Quantizer(parse(scheme), CPU, torch.bfloat16)(name, full.get_submodule(name))
        x = torch.arange(9) if name == "tok_embeddings" else torch.randn(3, SHAPES[name][1])
        x = x if name == "tok_embeddings" else x.bfloat16()
        assert torch.equal(made.get_submodule(name)(x), alone(x)), (name, scheme)


def numbers(model, name):
    """A linear layer's weight (K, N) as its kernel has it."""
    return model.get_submodule(name)(torch.eye(SHAPES[name][1]))


def test_a_recipe_of_one_calibrated_scheme_is_that_scheme(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "HESSIAN_ROWS", 2)
    for scheme in seeds.sample(CALIBRATED, 2):
        path = file_of(tmp_path, {"*": scheme})
        found, alone = (models.load("tiny", quantization=how) for how in (path, scheme))
        with seeds.naming(scheme):
            assert all(torch.equal(numbers(found, name), numbers(alone, name)) for name in SHAPES)
            assert torch.equal(found(IDS), alone(IDS))  # norms too


def test_a_layer_is_calibrated_on_what_the_layers_before_it_make(tmp_path, monkeypatch):
    """By GPTQ, the first matrix of a block: on the inputs that the loaded mixture gives it. AWQ of
    the matrix behind it would change its rows."""
    monkeypatch.setattr(calibration, "HESSIAN_ROWS", 8)
    name, gptq = "layers.3.attention.wqkv", parse("uintx-3-64-gptq")
    behind = {"layers.3.attention.wo": "int4wo-32"}
    path = file_of(tmp_path, drawn(SMALL) | behind | {name: str(gptq)})
    made, full = (models.load("tiny", quantization=how) for how in (path, "none"))
    tokenizer, w = open_checkpoint("tiny").tokenizer(4096), full.get_submodule(name).weight.data
    rounded, same = SCHEME_OF[type(gptq)].quantize(w, gptq), []
    ids = token_ids(None, tokenizer, CPU, 8)
    for model in (made, full):
        layer = {name: model.get_submodule(name)}
        hessian = observed(layer, functools.partial(model, ids), products)[name]
        expected = refined(w, rounded, hessian).dequantize().T
        same.append(((numbers(made, name) - expected).abs() < 1e-6).float().mean())
    assert same[0] > max(0.97, same[1] + 0.03)  # codes may hang on the last bit of x


def test_a_layers_size_is_its_schemes(tmp_path):
    """Bits per weight, from those of the schemes alone."""
    schemes, config = drawn() | {"tok_embeddings": "none"}, load_config("tiny")
    spec = parse(file_of(tmp_path, schemes)).of_layers("tiny", SHAPES)
    bits = {name: size_of(config, parse(name), CPU, torch.bfloat16).bits_per_weight
            for name in SCHEMES}  # fmt: skip
    found = size_of(config, spec, CPU, torch.bfloat16)
    counts = {layer: N * K for layer, (N, K) in SHAPES.items()}
    expected = sum(counts[layer] * bits[schemes[layer]] for layer in SHAPES)
    assert found.bits_per_weight == pytest.approx(expected / sum(counts.values()), rel=0.02)


def test_a_tied_output_shares_the_embeddings_memory(tmp_path):
    folder, _ = hugging_face.saved("qwen-3", tmp_path)
    config = load_config(str(folder))
    schemes = {"layers.*": "int4wo-32", "output": "int8wo", "tok_embeddings": "embed-int8"}
    path = file_of(tmp_path, schemes, str(folder))
    model = models.load(str(folder), quantization=path)
    assert model.tok_embeddings.weight.data.packed.data_ptr() == model.output.weight.data_ptr()
    spec = parse(path).of_layers(config.name, config.linear_shapes())
    size = size_of(config, spec, CPU, torch.float32)
    assert size.memory_bytes == size.model_bytes


def test_a_mixtures_experts_have_schemes_of_their_own(tmp_path):
    schemes = {"*.experts.*.w2": "int8wo", "*.experts.*": "int4wo-32", "*": "fp6"}
    path = file_of(tmp_path, schemes, "tiny_moe")
    loading, _ = work.load(ALONE, "tiny_moe", path)
    built = {name: scheme for name, (scheme, _) in loading.quantizer.layers.items()}
    assert built == {
        name: "fp6" if ".experts." not in name else "int8wo" if name.endswith("2") else "int4wo-32"
        for name in load_config("tiny_moe").linear_shapes()
    }


def test_the_recipes_cache_is_the_runs(tmp_path):
    path = file_of(tmp_path, {"*": "int8wo"}, kv_cache="int8")
    for words, cache in (([], "int8"), (["--kv_cache", "int8"], "int8")):
        plan = make_plan(options(["--quantization", path, *words]))
        assert plan.kv_cache == cache and "--kv_cache int8" in " ".join(argv(plan.config))


SHORT = ("generate", "--num_samples", "1", "--max_new_tokens", "4", "--temperature", "0")


def test_a_run_is_logged_saved_reloaded_and_replayed(in_tmp, monkeypatch):
    monkeypatch.setattr(calibration, "HESSIAN_ROWS", 4)
    path, digest = file_of(Path(), drawn((*SCHEMES, *CALIBRATED))), parse("mix.json").digest
    first = worked(*SHORT, "--quantization", path, "--save", "mine")
    again = worked(*SHORT, "--checkpoint_path", "mine")
    assert first.stdout.split("scheme")[0] == again.stdout.split("scheme")[0]  # the same text
    made = models.load("tiny", precision=torch.bfloat16, quantization=path)
    assert torch.equal(made(IDS), models.load("mine")(IDS))
    (_, logged), (_, reloaded) = read_log("benchmarks.txt").records
    assert logged.quant == reloaded.quant == f"recipe-{digest}"
    assert f"--quantization mix.json@{digest} " in logged.repro
    assert logged.model_size == reloaded.model_size
    replay = ("replay", "benchmarks.txt", "--line", "1")
    worked(*replay)
    file_of(Path(), {"*": "int8wo"})
    changed = command(*replay)
    assert changed.exit_code == 1 and f"now; expected is recipe-{digest}" in changed.stderr


def test_arms_of_recipes_are_compared(in_tmp):
    path = file_of(Path(), drawn())
    words = ("--max_new_tokens", "4", "--tokens", "64", "--processes", "1", "--half_width", "90%")
    arms = ("--arm", "--quantization none", "--arm", f"--quantization {path}")
    compared = worked("ab", *words, *arms, "--write_result", "log.txt")
    assert str(parse(path)) in compared.stdout
    assert parse(path).name in Path("log.txt").read_text()


def test_a_dry_run_tells_the_recipes_size(tmp_path):
    path = file_of(tmp_path, {"*": "int4wo-32"})
    plans = (worked("generate", "--dry_run", "--quantization", x) for x in (path, "int4wo-32"))
    sizes = [plan.stdout for plan in plans]
    bits = [next(line for line in s.splitlines() if line.startswith("bits per")) for s in sizes]
    assert bits[0] == bits[1] and f"as {path}" in sizes[0]


def test_recommend_takes_a_recipe_among_its_schemes(tmp_path):
    path = file_of(tmp_path, {"*": "int4wo-32"}, kv_cache="int8")
    names, needs = menu(RunConfig(), Limits(), ["int4wo-32", path])
    assert names[0] == "none" and set(names[1:]) == {"int4wo-32", str(parse(path))}
    assert needs[str(parse(path))].held < needs["int4wo-32"].held  # by the cache
