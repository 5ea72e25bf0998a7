"""What `estimate` is asked on its command line, and the text and JSON that it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantbench.errors import KernelError, MemoryShortage, UsageError
from quantbench.kv_cache import CACHES
from quantbench.log import shell
from quantbench.log.config import RunConfig, argv
from quantbench.progress import progress, say
from quantbench.quantize.spec import COMPARED, SHOWN, parse_scheme
from quantbench.run import environment
from quantbench.typed_json import to_json

if TYPE_CHECKING:
    from quantbench.estimate.predict import Estimate, Machine, Request


@dataclass(frozen=True)
class Asked:
    """The options of a prediction, as they were typed. Raises UsageError, one line."""

    checkpoint_path: str
    device: str
    quantization: str
    kv_cache: str
    precision: str
    batch_size: int
    sequence_length: int
    new_tokens: int
    context_depth: int
    num_layers: int | None
    tp: int
    calibration: str | None = None
    calibrated_on: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantization", str(parse_scheme(self.quantization)))

    def verifying(self, schemes: Sequence[str]) -> str:
        """The command that measures these schemes on the device itself, on a card compiled; several
        take turns."""
        path, card = self.checkpoint_path, self.device != "here"
        if path.endswith(".json"):
            path = f"dummy:{path.removeprefix('dummy:')}"
        config = RunConfig(
            checkpoint_path=path,
            kv_cache=self.kv_cache, precision=self.precision, batch_size=self.batch_size,
            prefill_size=self.sequence_length, max_new_tokens=max(1, self.new_tokens),
            context_depth=self.context_depth, num_layers=self.num_layers, tp=self.tp, compile=card,
            device="cuda" if card else "auto",
        )  # fmt: skip
        words = argv(config, said=True, always=("checkpoint_path",))
        arms = [f"--quantization {scheme}" for scheme in schemes]
        if len(arms) == 1:
            return f"{shell.join(['quantbench', 'generate', *words])} {arms[0]}"
        words += [word for arm in arms for word in ("--arm", arm)]
        return shell.join(["quantbench", "ab", *words])


def predicted(asked: Asked, all_schemes: bool, memory: int | None) -> tuple[str, dict[str, Any]]:
    """The text for the terminal, and the JSON. Raises QuantbenchError for what cannot be estimated,
    and for a run that needs more memory than the device has."""
    environment.use_threads(RunConfig())
    from quantbench.answer import estimating
    from quantbench.estimate.counting_configs import doubts
    from quantbench.estimate.fits import what_fits_into
    from quantbench.estimate.predict import Request, predict
    from quantbench.report import estimate_tables as tables

    config = estimating.model_of(asked.checkpoint_path, asked.num_layers)
    machine = estimating.machine_of(asked.device, asked.calibration, asked.calibrated_on)
    if isinstance(config, str):
        machine.warnings.extend(doubts(config))
    request = Request(
        config,
        asked.quantization,
        asked.kv_cache,
        asked.batch_size,
        asked.sequence_length,
        asked.new_tokens,
        asked.tp,
        asked.context_depth,
        asked.precision,
    )
    if memory is not None:
        context = estimating.context_of(config)
        with progress("Counting what fits", lasting=False, unit="schemes") as report:
            fitting = what_fits_into(
                request, machine, memory, SHOWN, tuple(CACHES), context, report
            )
        text = tables.fitting(fitting, memory, asked.batch_size, context, machine.warnings)
        value = {"device": machine.name, "memory_bytes": memory, "fits": fitting}
        return text, to_json(value | {"warnings": machine.warnings})
    estimating.check_context(request)
    if all_schemes:
        if asked.device == estimating.HERE:
            say(f"Each of {len(COMPARED)} schemes is measured, in 10 to 30 seconds each")
        each = {name: _estimated(replace(request, scheme=name), machine) for name in COMPARED}
        text = tables.table(each, machine, machine.memory_bytes)
        value = {"device": machine.name, "schemes": each, "warnings": machine.warnings}
        schemes = [name for name, estimate in each.items() if not isinstance(estimate, str)]
    else:
        estimating.check_memory(request, machine)
        value = to_json(one := predict(request, machine))
        text, schemes = "\n".join(tables.lines(one)), [asked.quantization]
    if schemes and not isinstance(config, str):  # generate.py runs no model of transformers
        value["verify"] = asked.verifying(schemes)
        text += f"\nverify: {value['verify']}"
    return text, to_json(value)


def _estimated(request: "Request", machine: "Machine") -> "Estimate | str":
    """The estimate, or why the scheme cannot run. On this machine what does not fit is not
    measured."""
    from quantbench.answer import estimating
    from quantbench.estimate.here import Here
    from quantbench.estimate.predict import predict

    try:
        if isinstance(machine, Here):
            estimating.check_memory(request, machine)
        return predict(request, machine)
    except (KernelError, UsageError, MemoryShortage) as error:
        return str(error)
