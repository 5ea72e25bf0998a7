"""What `estimate` needs before it predicts: the machine, and the architecture."""

from pathlib import Path

import torch

from quantbench import devices
from quantbench.errors import CheckpointError, MemoryShortage, UsageError
from quantbench.estimate import machines
from quantbench.estimate.predict import Estimate, Machine, Request
from quantbench.models.config import ModelConfig
from quantbench.models.loading import load_config
from quantbench.text import size

HERE = "here"


def machine_of(device: str, precision: str = "bfloat16") -> Machine:
    """This machine, whose speed is read now, for "here"; or the card of that name. Raises
    UsageError for a name that no data sheet has, MemoryShortage where the speed cannot be read."""
    if device != HERE:
        return machines.card(device)
    dtype: torch.dtype = getattr(torch, precision)
    return machines.here(devices.resolve("auto"), dtype)


def check_cache(estimate: Estimate, machine: Machine) -> list[str]:
    """A warning where the model lies in this machine's caches, whose speed is not read."""
    cache = devices.last_level_cache(machine.device) if machine.is_cpu else None
    weights = max(memory.weights for memory in estimate.memory.values())
    if cache is None or weights >= cache:
        return []
    return [
        f"weights of {size(weights)} fit into the last-level cache of {size(cache)}: steps may be "
        "several times as fast"
    ]


def model_of(checkpoint_path: str, num_layers: int | None) -> ModelConfig | str:
    """The architecture of a checkpoint, or of a config.json; the path itself where only
    transformers understands it."""
    path = Path(checkpoint_path)
    file = path / "config.json" if path.is_dir() else path
    described = f"dummy:{path}" if path.suffix == ".json" else checkpoint_path
    try:
        config = load_config(described)
    except CheckpointError:
        if not file.is_file() or file.suffix != ".json":
            raise
        from quantbench.estimate.counting_configs import config_fields

        config_fields(file)
        if num_layers:
            raise UsageError(
                f"--num_layers cuts models of generate.py; {file} is counted as transformers has "
                "it: leave it out, or write another number into a copy of the file"
            ) from None
        return str(file)
    return config.with_layers(num_layers) if num_layers else config


def check_context(request: Request) -> None:
    """Raise UsageError where a run needs more positions than the model has."""
    context = context_of(request.config)
    if context is not None and request.positions > context:
        raise UsageError(
            f"--context_depth {request.depth}, --sequence_length {request.prompt} and --new_tokens "
            f"{request.new_tokens} need {request.positions} positions; the model's context has "
            f"{context}: ask for fewer"
        )


def context_of(config: ModelConfig | str) -> int | None:
    """The positions of a model; None where a config.json of transformers does not say."""
    if not isinstance(config, str):
        return config.max_position
    from quantbench.estimate.counting_configs import config_fields

    fields = config_fields(config)
    said = (fields.get(key) for key in ("max_position_embeddings", "n_positions"))
    return next((number for number in said if isinstance(number, int) and number > 0), None)


def check_memory(estimate: Estimate, machine: Machine, ours: bool = True) -> None:
    """Raise MemoryShortage where a run needs more memory than the device has. ours: whether the
    model is one of ours, of which there are tables of what fits, and not one of transformers."""
    there, needed = machine.memory_bytes, estimate.peak_memory_bytes.value
    if there is not None and needed > there:
        memory = max(estimate.memory.values(), key=lambda phase: phase.total)
        tables = "--all_schemes and --what_fits show what fits"
        smaller = "take a smaller --batch_size or --sequence_length, or a --device with more"
        raise MemoryShortage(
            f"{estimate.device}: the run needs {size(needed)} (weights {size(memory.weights)}, KV "
            f"cache {size(memory.kv_cache)}, activations {size(memory.activations)}), "
            f"{size(needed - there)} more than the {size(there)} that it has; "
            f"{tables if ours else smaller}"
        )
