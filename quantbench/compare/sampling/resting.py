"""How much memory a run takes besides its model: libraries, kernels, what torch and Python keep;
and what prompts leave behind."""

import itertools
import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quantbench.devices import prefill_chunk
from quantbench.errors import QuantbenchError
from quantbench.estimate.calibration import LeftBehind
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.counting import count_model
from quantbench.log.config import RunConfig
from quantbench.models.config import ModelConfig
from quantbench.run import launch

SMALL = {  # so small that its weights, caches and activations come to a few MB
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
LAYERS, VOCABULARY = 2, 8192  # of calibration models here: so few that weights are soon made


def resting_bytes(device: str, precision: str, scheme: str) -> int:
    """Peak memory of generating with a model of next to no bytes, in a process of its own: bytes of
    the first kind that devices.peak_memory has. Raises QuantbenchError where that fails."""
    return _run(SMALL, device, precision, scheme, prompt=32).peak


def left_behind(precision: str, scheme: str, resting: int) -> LeftBehind:
    """What prompts of one pass and of two keep on the CPU, of all calibration models together: what
    their runs' peaks have beyond weights, caches, activations and `resting` bytes. Two runs of one
    model differ by 10 MB or more. Raises QuantbenchError."""
    chunk = prefill_chunk(torch.device("cpu"), 1)
    alive, left = {1: 0, 2: 0}, {1: 0, 2: 0}
    for whole, passes in itertools.product(MODELS.values(), alive):
        config = replace(whole, num_layers=LAYERS, vocab_size=VOCABULARY, qk_norm=False)
        run = _run(_fields(config), "cpu", precision, scheme, passes * chunk)
        count = count_model(
            config, scheme, tokens=passes * chunk, chunk=chunk, cache_size=run.cache_size,
            precision=getattr(torch, precision),
        )  # fmt: skip
        others = resting + count.weight_bytes + count.kv_cache_bytes + count.peak_activation_bytes
        alive[passes] += count.peak_activation_bytes
        left[passes] += run.peak - others
    return LeftBehind(*(max(0.0, left[passes] / alive[passes]) for passes in alive))


def _fields(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model without norms of heads."""
    return {
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
    }


class _Run(NamedTuple):
    peak: int  # bytes, of the first kind that devices.peak_memory has
    cache_size: int  # positions


def _run(fields: Mapping[str, Any], device: str, precision: str, scheme: str, prompt: int) -> _Run:
    """A run of a model of random weights, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model, output = Path(folder, "config.json"), Path(folder, "run.json")
        model.write_text(json.dumps(fields))
        config = RunConfig(
            checkpoint_path=f"dummy:{model}",
            quantization=scheme,
            device=device,
            precision=precision,
            prefill_size=prompt,
            max_new_tokens=4,
            num_samples=2,
            write_result="none",
            output_json_path=str(output),
        )
        ran = subprocess.run(launch.command(config), capture_output=True, text=True)
        if ran.returncode:
            why = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise QuantbenchError(f"a run of a small model failed: {why}")
        result = json.loads(output.read_text())
    peaks = result["peak_memory_bytes"]["generate"]
    return _Run(int(next(iter(peaks.values()), 0)), result["cache_size"])
