"""What `estimate` needs before it predicts: the machine, and the architecture."""

from dataclasses import replace
from pathlib import Path

import torch

from quantbench import devices, environment
from quantbench.errors import CheckpointError, MemoryShortage, QuantbenchError, UsageError
from quantbench.estimate.calibration import MOST, config_of_run, is_measured, request_of, runs
from quantbench.estimate.cards import card
from quantbench.estimate.counting_configs import config_fields
from quantbench.estimate.datasheets import known
from quantbench.estimate.here import here
from quantbench.estimate.predict import Machine, Request, predict
from quantbench.estimate.validate import Estimator, Fields
from quantbench.generate import Generator, Sampling
from quantbench.log import origin
from quantbench.log.config import RunConfig
from quantbench.models.config import ModelConfig
from quantbench.models.llama import Transformer
from quantbench.models.loading import load_config
from quantbench.models.picture import is_picture_model
from quantbench.progress import say
from quantbench.text import size

# What an estimate is held against: keys of a run's JSON.
MEASURED = {
    "prompt_seconds": "time_to_first_token_s",
    "tokens_per_second": "tok_s_all_rows",
    "joules_per_token": "joules_per_token",
}


def machine_of(
    device: str, calibration: str | None = None, calibrated_on: str | None = None
) -> Machine:
    """This machine for "here"; or the card of that name, with what the runs in the file
    `calibration` reached on the card `calibrated_on`. Raises UsageError for a name that no data
    sheet has."""
    if calibrated_on is not None and calibration is None:
        raise UsageError("--calibrated_on names the card of --calibration's runs: give both")
    if device == "here":
        if calibration is not None:
            raise UsageError("--calibration is for a --device CARD; here the model is measured")
        return here(generator_of)
    if calibration is None:
        return card(device)
    return card(device, runs(calibration, calibrated_on or card(device).name))


def run_estimator() -> Estimator:
    """Estimates runs of results: by the data sheet of their card; or here, on the first layers of
    their model, if they ran on this machine. Of others, and of what has no estimate, nothing."""
    machines: dict[tuple[str, int | None], Machine] = {}
    own = {str(devices.describe(torch.device("cpu"))["name"]), origin.machine()}

    def estimated(content: Fields, names: Fields) -> dict[str, dict[str, float]]:
        figures = {name: content.get(key) for name, key in MEASURED.items()}
        config, where = config_of_run(content), names.get("device", "")
        if config is None or not is_measured(figures["prompt_seconds"]):
            return {}
        step, peaks = content.get("decode_tok_s"), content.get("peak_memory_bytes")
        figures["token_seconds"] = 1 / step if is_measured(step) else None
        peak = peaks.get("generate") if isinstance(peaks, dict) else None
        if isinstance(peak, dict):
            figures["peak_memory_bytes"] = next(iter(peak.values()), None)
        unknown = config.expert_memory or config.speculate != RunConfig.speculate
        request = None if unknown else request_of(config, content.get("model"))
        if request is None or not (where in own or known(where)):
            return {}
        prompt = content.get("prompt_tokens")
        if type(prompt) is int and 0 < prompt <= MOST:
            request = replace(request, prompt=prompt)
        if where in own:
            environment.use_threads(config)  # those of this run, which are measured here
        machine = where, config.threads if where in own else None
        if machine not in machines:
            machines[machine] = machine_of("here" if where in own else where)
        try:
            estimate = vars(predict(request, machines[machine]))
        except QuantbenchError as error:
            say(f"{names.get('model')} {request.scheme}: not estimated: {error}")
            return {}
        return {
            name: {"measured": value, "estimated": estimate[name].value}
            for name, value in figures.items()
            if is_measured(value) and estimate[name].value is not None
        }

    return estimated


def generator_of(model: Transformer, request: Request) -> Generator:
    """The Generator of a run of generate.py: compiled on a card, where Python is slower."""
    run, compiles = RunConfig(), model.tok_embeddings.weight.device.type != "cpu"
    generator = Generator(
        model,
        request.batch,
        max(2, request.positions),
        request.kv_cache,
        compile_decode=compiles,
        sampling=Sampling(run.temperature, run.top_k),
    )
    if request.depth:
        generator.fill_randomly(request.depth)
    return generator


def model_of(checkpoint_path: str, num_layers: int | None) -> ModelConfig | str:
    """The architecture of a checkpoint, or of a config.json; the path itself where only
    transformers understands it."""
    path = Path(checkpoint_path.removeprefix("dummy:"))
    file = path / "config.json" if path.is_dir() else path
    described = f"dummy:{path}" if path.suffix == ".json" else checkpoint_path
    try:
        if file.is_file() and file.suffix == ".json" and is_picture_model(config_fields(file)):
            return str(file)  # transformers counts its text model, and says that it is not all
        config = load_config(described)
    except CheckpointError:
        if not file.is_file() or file.suffix != ".json":
            raise
        config_fields(file)
        if num_layers:
            raise UsageError(
                f"--num_layers cuts models of generate.py; {file} is counted as transformers has "
                "it: leave it out, or write another number into a copy of the file"
            ) from None
        return str(file)
    return config.with_layers(num_layers)


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
    fields = config_fields(config)
    said = (fields.get(key) for key in ("max_position_embeddings", "n_positions"))
    return next((number for number in said if isinstance(number, int) and number > 0), None)


def check_memory(request: Request, machine: Machine) -> None:
    """Raise MemoryShortage where a run needs more memory than the device has."""
    memory = max(machine.memories(request).values(), key=lambda phase: phase.total)
    there, needed = machine.memory_bytes, memory.total
    if there is not None and needed > there:
        tables = "--all_schemes and --what_fits show what fits"
        smaller = "take a smaller --batch_size or --sequence_length, or a --device with more"
        raise MemoryShortage(
            f"{machine.name}: the run needs {size(needed)} (weights {size(memory.weights)}, KV "
            f"cache {size(memory.kv_cache)}, activations {size(memory.activations)}), "
            f"{size(needed - there)} more than the {size(there)} that it has; "
            f"{smaller if isinstance(request.config, str) else tables}"
        )
