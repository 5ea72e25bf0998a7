"""What Gemma 4 alone has: shared caches, tensors that are not read, and how it is kept."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig

from quantbench import models
from quantbench.estimate.counting_models import count_model
from quantbench.estimate.predict import Request
from quantbench.generate import Generator
from quantbench.kv_cache import CACHES
from quantbench.models.loading import load_model
from quantbench.models.presets import preset
from quantbench.run.sizes import kv_cache_bytes
from tests.models import test_families
from tests.models.hugging_face import assert_near, drawn, edit_config, rewritten
from tests.programs import ROOT, command, worked

TOKENS = torch.randint(96, (2, 30), generator=torch.Generator().manual_seed(0))


def saved(folder, family="gemma4 shared"):
    made = test_families.made(family)
    made.save_pretrained(folder)
    return str(folder), made


def test_a_shared_cache_is_held_and_counted_once(tmp_path):
    model = load_model(saved(tmp_path)[0])
    config = model.config
    assert [spec.shared for spec in config.layers] == [False] * 4 + [True] * 2
    for kind in ("dense", "int8", "int4"):
        if kind == "int4" and config.head_dim % 32:
            continue
        caches = Generator(model, 2, 30, kind).caches
        held = sum(cache.nbytes for cache in caches)
        assert held == kv_cache_bytes(config, 2, 30, torch.float32, CACHES[kind])
        assert held == sum(b.nbytes for c in caches[:4] for b in c.buffers())
    # Positions × rows × key and value: two layers with a window of 8, two with all of 30.
    numbers = 2 * 2 * config.num_kv_heads * 2 * (8 * config.head_dim + 30 * config.full_head_dim)
    assert sum(c.nbytes for c in Generator(model, 2, 30).caches) == 4 * numbers


def test_a_quantized_cache_is_near_the_exact_one(tmp_path):
    path, _ = saved(tmp_path)
    model = load_model(path)
    exact = model(TOKENS)
    for chunk in (30, 1):
        generator = Generator(model, 2, 30, "int8")
        parts = enumerate(TOKENS.split(chunk, 1))
        found = torch.cat([generator.forward(part, i * chunk) for i, part in parts], 1)
        assert 0 < (found - exact).norm() < 0.05 * exact.norm()


def test_keys_and_values_of_layers_that_share_are_not_read(tmp_path):
    """Published files hold them all the same; transformers ignores them."""
    path, made = saved(tmp_path)
    with rewritten(tmp_path) as tensors:
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.full((3, 3), torch.nan)
    assert_near(load_model(path)(TOKENS), made(TOKENS).logits)


def test_a_config_of_the_first_files_is_that_of_later_ones(tmp_path):
    path, _ = saved(tmp_path)
    config = models.load(path).config
    edit_config(tmp_path, per_layer_config=None, global_head_dim=config.full_head_dim)
    assert models.load(path).config == config


@pytest.mark.parametrize("family", sorted(test_families.GEMMA_4S))
def test_it_is_quantized_saved_and_reloaded(family, tmp_path):
    path, _ = saved(tmp_path / "whole", family)
    (tmp_path / "whole" / "model.safetensors").unlink()  # random weights need no tokenizer
    options = "--quantization int8wo --precision float32 --device cpu --num_samples 1".split()
    options += "--max_new_tokens 4 --write_result none --prefill_size 20".split()
    kept, lines = str(tmp_path / "kept"), tmp_path / "runs.jsonl"
    for checkpoint, more in ((f"dummy:{path}/config.json", ["--save", kept]), (kept, [])):
        given = ("--checkpoint_path", checkpoint, *more, "--output_json_path", lines, *options)
        worked("generate", *given)
    first, again = map(json.loads, lines.read_text().splitlines())
    assert (first["scheme"], first["decoder"]) == (again["scheme"], again["decoder"])
    assert first["weight_bytes"] == again["weight_bytes"]
    fresh = models.load(f"dummy:{path}/config.json", precision=torch.float32, quantization="int8wo")
    assert torch.equal(models.load(kept, precision=torch.float32)(TOKENS), fresh(TOKENS))


@pytest.mark.parametrize("family", sorted(test_families.GEMMA_4S))
def test_schemes_apply_to_its_own_matrices(family, tmp_path):
    path, _ = saved(tmp_path, family)
    exact, quantized = load_model(path), models.load(path, quantization="int8wo")
    names = {name for name, m in exact.named_modules() if isinstance(m, torch.nn.Linear)}
    assert names == set(exact.config.linear_shapes())
    types = {type(quantized.get_submodule(name)) for name in names}
    assert torch.nn.Linear not in types
    expected, found = exact(TOKENS), quantized(TOKENS).float()
    assert 0 < (found - expected).norm() < 0.3 * expected.norm()  # other experts may be chosen


def test_recipes_and_calibration_refuse_layers_that_read_others(tmp_path):
    config = test_families.made("gemma4 shared").config.to_dict()
    words = {"vocab_size": 4096, "vocab_size_per_layer_input": 4096}
    words["hidden_size_per_layer_input"] = 32
    drawn(AutoConfig.for_model(**config | words)).save_pretrained(tmp_path)
    shutil.copy(ROOT / "models" / "tiny" / "tokenizer.model", tmp_path)
    words = "--quantization", "int4wo-32-gptq", "--device", "cpu", "--num_samples", "1"
    done = command("generate", "--checkpoint_path", tmp_path, *words, "--write_result", "none")
    assert "not calibrated one by one" in done.stderr, done.stderr
    done = command("recipe", "--bits", "5", "--checkpoint_path", tmp_path, "--device", "cpu")
    assert done.exit_code == 2 and "read what others computed" in done.stderr


def test_its_estimates_count_every_layer():
    """A step reads all weights but embeddings, whatever layers share."""
    for name in ("gemma-4-E2B", "gemma-4-31B"):
        config = preset(name)
        count = count_model(Request(config, "none"), torch.device("cpu"), tokens=1, depth=64)
        matrices = sum(rows * columns for rows, columns in config.linear_shapes().values())
        assert count.kv_cache_bytes == kv_cache_bytes(
            config, 1, 65, torch.bfloat16, CACHES["dense"]
        )
        assert count.weight_bytes >= 2 * matrices
