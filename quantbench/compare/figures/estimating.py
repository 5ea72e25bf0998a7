"""What `estimate` needs before it predicts: the device's model of cost, and the architecture."""

from pathlib import Path

from quantbench import devices
from quantbench.errors import CheckpointError, MemoryShortage, UsageError
from quantbench.estimate import calibration_file
from quantbench.estimate.calibration import Calibration
from quantbench.estimate.calibration_file import of_this_machine
from quantbench.estimate.datasheets import DATASHEETS, find, known
from quantbench.estimate.predict import (
    Calibrated,
    Estimate,
    FromDatasheet,
    Machine,
    Request,
    efficiency_by_a5000,
    efficiency_of,
)
from quantbench.estimate.probe import speed_now
from quantbench.log.origin import versions
from quantbench.models.config import ModelConfig
from quantbench.models.loading import load_config
from quantbench.text import size

HERE = "here"
HOW_TO = "quantbench calibrate measures it, in some minutes"


def machine_of(device: str, calibration: str | None) -> Machine:
    """What predicts runs on `device`: "here", or the name of a card.

    calibration: the file that --calibration names. Raises UsageError for a device of which nothing
    is known, and for a file that is no calibration.
    """
    given = calibration_file.load(calibration) if calibration else None
    if device == HERE:
        return _here(given)
    sheet = known(device)
    old = given.warnings({}, versions()) if given else []  # the card may be in another machine
    if given is not None and given.name == (sheet.name if sheet else device):
        return Calibrated(given, old)
    sheet = sheet or find(device)
    if given is None:
        return FromDatasheet(sheet, efficiency_by_a5000(sheet))
    relative = known(given.name)
    if relative is None:
        raise UsageError(
            f"--calibration {calibration}: it is of {given.name}, which has no datasheet here, so "
            f"that it says nothing of {sheet.name}; give one of a card: {', '.join(DATASHEETS)}"
        )
    return FromDatasheet(sheet, efficiency_of(given, relative), old)


def _here(given: Calibration | None) -> Machine:
    where = devices.resolve("auto")
    calibration = given or of_this_machine(where.type)
    if calibration is None:
        raise UsageError(f"--device here: this machine is not calibrated; {HOW_TO}")
    warnings = calibration.warnings({"type": where.type, **devices.describe(where)}, versions())
    return Calibrated(calibration, warnings, None if given else speed_now(calibration, where))


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


def memory_of(machine: Machine) -> float | None:
    """Bytes of a device's memory; None where they are not known."""
    if isinstance(machine, FromDatasheet):
        return machine.sheet.memory
    if isinstance(machine, Calibrated):
        return machine.calibration.memory_bytes
    return None


def check_memory(estimate: Estimate, machine: Machine, ours: bool = True) -> None:
    """Raise MemoryShortage where a run needs more memory than the device has. ours: whether the
    model is one of ours, of which there are tables of what fits, and not one of transformers."""
    there, needed = memory_of(machine), estimate.peak_memory_bytes.value
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
