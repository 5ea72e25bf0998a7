"""The peak memory of a run, from shapes and what a run takes besides its model."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from compare.sampling.resting import resting_bytes
from devices import prefill_chunk
from estimate.counting import count_model
from estimate.resident import KEPT, kept_by_heap
from models.checkpoints.load import load_config

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
    estimated = resting_bytes("cpu", "bfloat16", "int8wo") + count.weight_bytes
    estimated += count.kv_cache_bytes + count.peak_activation_bytes
    estimated += kept_by_heap(128)
    (measured,) = run["peak_memory_bytes"]["generate"].values()
    assert abs(estimated / measured - 1) < 0.03


def test_the_heap_keeps_no_more_than_its_bound():
    assert kept_by_heap(512) == kept_by_heap(5000) == KEPT == 4 * kept_by_heap(128)
