"""How much memory a run takes besides its model: libraries, kernels, what torch and Python keep."""

import json
import subprocess
import tempfile
from pathlib import Path

from benchlog.config import RunConfig
from errors import QuantbenchError
from run import launch

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


def resting_bytes(device: str, precision: str, scheme: str) -> int:
    """Peak memory of generating with a model of next to no bytes, in a process of its own: bytes of
    the first kind that devices.peak_memory has. Raises QuantbenchError where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        model, output = Path(folder, "config.json"), Path(folder, "run.json")
        model.write_text(json.dumps(SMALL))
        config = RunConfig(
            checkpoint_path=f"dummy:{model}",
            quantization=scheme,
            device=device,
            precision=precision,
            prefill_size=32,
            max_new_tokens=4,
            num_samples=1,
            write_result="none",
            output_json_path=str(output),
        )
        ran = subprocess.run(launch.command(config), capture_output=True, text=True)
        if ran.returncode:
            why = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise QuantbenchError(f"a run of a small model failed: {why}")
        peaks = json.loads(output.read_text())["peak_memory_bytes"]["generate"]
    return int(next(iter(peaks.values()), 0))
