"""The peak memory of a run, from shapes and what a run takes besides its model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantbench.compare.sampling import resting
from quantbench.devices import prefill_chunk
from quantbench.estimate.calibration import LeftBehind
from quantbench.estimate.counting import count_model
from quantbench.models.loading import load_config

ROOT = Path(__file__).parents[2]


def test_the_peak_of_a_run_is_its_model_s_and_what_every_run_takes(tmp_path):
    file = tmp_path / "run.json"
    options = "--num_layers 2 --quantization int8wo --prefill_size 128 --max_new_tokens 4"
    options += f" --num_samples 1 --device cpu --write_result none --output_json_path {file}"
    checkpoint = "dummy:Qwen3-0.6B"
    command = [sys.executable, "generate.py", "--checkpoint_path", checkpoint, *options.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    run = json.loads(file.read_text())
    count = count_model(
        load_config(checkpoint).with_layers(2),
        "int8wo",
        batch=1,
        tokens=128,
        cache_size=run["cache_size"],
        chunk=prefill_chunk(torch.device("cpu"), 1),
    )
    estimated = resting.resting_bytes("cpu", "bfloat16", "int8wo") + count.weight_bytes
    estimated += count.kv_cache_bytes + count.peak_activation_bytes
    estimated += LeftBehind().bytes(count.peak_activation_bytes, passes=1)
    (measured,) = run["peak_memory_bytes"]["generate"].values()
    assert abs(estimated / measured - 1) < 0.03


def test_what_prompts_leave_behind_is_beyond_the_rest(monkeypatch, tmp_path):
    """Of runs that keep a half of their activations after one pass, and four times as many bytes as
    these after two."""

    def run(fields, device, precision, scheme, prompt):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(fields))
        config = load_config(f"dummy:{file}")
        count = count_model(config, scheme, tokens=prompt, chunk=512, cache_size=prompt + 8)
        activations = count.peak_activation_bytes
        kept = activations * (0.5 if prompt == 512 else 4)
        peak = 10**9 + count.weight_bytes + count.kv_cache_bytes + activations + kept
        return resting._Run(int(peak), prompt + 8)

    monkeypatch.setattr(resting, "_run", run)
    left = resting.left_behind("bfloat16", "int8wo", 10**9)
    assert (left.one_pass, left.several) == pytest.approx((0.5, 4), rel=1e-3)
