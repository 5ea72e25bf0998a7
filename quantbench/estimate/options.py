"""The options of `estimate`, and the text and JSON that it prints."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quantbench import environment
from quantbench.errors import KernelError, MemoryShortage, UsageError
from quantbench.estimate import answer as estimating
from quantbench.estimate import tables
from quantbench.estimate.counting_configs import doubts
from quantbench.estimate.fits import what_fits_into
from quantbench.estimate.here import Here
from quantbench.estimate.predict import Machine, Request, RunEstimate, predict
from quantbench.kv_cache import CACHES
from quantbench.log import shell
from quantbench.log.config import RunConfig, argv
from quantbench.progress import progress, say
from quantbench.quantize.spec import COMPARED, SHOWN, parse_scheme
from quantbench.typed_json import to_json


def predicted(
    checkpoint_path: str,
    device: str,
    quantization: str,
    sequence_length: int,
    new_tokens: int,
    calibration: str | None,
    calibrated_on: str | None,
    all_schemes: bool,
    memory: int | None,
    **given: Any,
) -> tuple[str, dict[str, Any]]:
    """The text for the terminal, and the JSON. given: further options that generate.py has, too.
    Raises QuantbenchError for what cannot be estimated, and for a run that needs more memory than
    the device has."""
    scheme, on_card = str(parse_scheme(quantization)), device != "here"
    if checkpoint_path.endswith(".json"):
        checkpoint_path = f"dummy:{checkpoint_path.removeprefix('dummy:')}"
    run = RunConfig(
        checkpoint_path=checkpoint_path, prefill_size=sequence_length,
        max_new_tokens=max(1, new_tokens), compile=on_card, device="cuda" if on_card else "auto",
        **given,
    )  # fmt: skip
    environment.use_threads(RunConfig())
    config = estimating.model_of(checkpoint_path, run.num_layers)
    machine = estimating.machine_of(device, calibration, calibrated_on)
    if isinstance(config, str):
        machine.warnings.extend(doubts(config))
    request = Request.of(run, config, scheme, sequence_length, new_tokens=new_tokens)
    if memory is not None:
        context = estimating.context_of(config)
        with progress("Counting what fits", lasting=False, unit="schemes") as report:
            fitting = what_fits_into(
                request, machine, memory, SHOWN, tuple(CACHES), context, report
            )
        text = tables.fitting(fitting, memory, run.batch_size, context, machine.warnings)
        value = {"device": machine.name, "memory_bytes": memory, "fits": fitting}
        return text, to_json(value | {"warnings": machine.warnings})
    estimating.check_context(request)
    if all_schemes:
        if not on_card:
            say(f"Each of {len(COMPARED)} schemes is measured, in 10 to 30 seconds each")
        each = {name: _estimated(replace(request, scheme=name), machine) for name in COMPARED}
        text = tables.table(each, machine, machine.memory_bytes)
        value = {"device": machine.name, "schemes": each, "warnings": machine.warnings}
        schemes = [name for name, estimate in each.items() if not isinstance(estimate, str)]
    else:
        estimating.check_memory(request, machine)
        value = to_json(one := predict(request, machine))
        text, schemes = "\n".join(tables.lines(one)), [scheme]
    if schemes and not isinstance(config, str):  # generate.py runs no model of transformers
        value["verify"] = verifying(run, schemes)
        text += f"\nverify: {value['verify']}"
    return text, to_json(value)


def verifying(run: RunConfig, schemes: Sequence[str]) -> str:
    """The command that measures these schemes on the device itself; several take turns."""
    words = argv(run, said=True, always=("checkpoint_path",))
    arms = [f"--quantization {scheme}" for scheme in schemes]
    if len(arms) == 1:
        return f"{shell.join(['quantbench', 'generate', *words])} {arms[0]}"
    return shell.join(["quantbench", "ab", *words, *(w for arm in arms for w in ("--arm", arm))])


def _estimated(request: Request, machine: Machine) -> RunEstimate | str:
    """The estimate, or why the scheme cannot run. On this machine what does not fit is not
    measured."""
    try:
        if isinstance(machine, Here):
            estimating.check_memory(request, machine)
        return predict(request, machine)
    except (KernelError, UsageError, MemoryShortage) as error:
        return str(error)
