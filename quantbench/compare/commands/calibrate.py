"""quantbench calibrate: measure this machine, so that `estimate` can predict runs on it.

quantbench calibrate                         # minutes, with nothing else running
quantbench calibrate --json machine.json     # to predict its runs on another machine
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantbench import files
from quantbench.cli import Command, quiet, say
from quantbench.compare.arguments import names_of
from quantbench.errors import UsageError
from quantbench.log.config import PRECISIONS
from quantbench.quantize.spec import COMPARED, parse_scheme
from quantbench.run import environment, launch

if TYPE_CHECKING:
    from quantbench.estimate.calibration import Calibration
    from quantbench.generate import Generator
    from quantbench.models.llama import Transformer


@click.command(cls=Command)
@click.option("--device", default="auto", help="cpu, cuda, xpu, mps, or auto [auto]")
@click.option(
    "--precision", default="bfloat16", help=f"Unquantized dtype: {', '.join(PRECISIONS)} [bfloat16]"
)
@click.option("--schemes", metavar="A,B", help=f"Schemes to measure [{','.join(COMPARED)}]")
@click.option("--json", "json_path", metavar="PATH", help="Write it here [the cache folder]")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def calibrate(
    device: str, precision: str, schemes: str | None, json_path: str | None, debug: bool
) -> None:
    """Measure this machine, for `estimate`: products, attention, memory, steps and prompts.

    It takes some minutes, and what else runs meanwhile is in its figures. Nothing is written where
    they contradict the device's datasheet.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--precision takes {', '.join(PRECISIONS)}; given: {precision!r}")
    names = [str(parse_scheme(name)) for name in names_of("--schemes", schemes, COMPARED)]
    files.check_output("--json", json_path, files.json_with("date"), "calibration")
    environment.prepare()
    quiet(debug)
    import torch

    from quantbench import devices
    from quantbench.compare.sampling.resting import left_behind, resting_bytes
    from quantbench.estimate import calibration_file, datasheets, exchanging, machine, power, probe
    from quantbench.estimate.plausible import refuse
    from quantbench.log.config import RunConfig
    from quantbench.run.machine import Counters

    where = devices.resolve(device)
    path = Path(json_path) if json_path else calibration_file.default_path()
    if json_path is None:
        files.check_folder("the folder of this machine's calibration", path.parent)
    environment.use_threads(RunConfig(device=device))
    before = Counters.read()
    settings = probe.Settings(where, getattr(torch, precision), names)
    measured = machine.measure(settings, make_generator, say)
    use = Counters.read().since(before)  # what follows has processes of its own
    say("What two ranks exchange, power, and memory besides the model …")
    try:
        measured = replace(measured, exchanges=exchanging.measured(where, precision))
    except launch.RankFailed as error:  # all but --tp can be estimated without them
        say(f"What ranks exchange is not in it: {error}")
    resting = resting_bytes(where.type, precision, names[0])
    measured = replace(measured, power=power.measured(settings, make_generator), base_bytes=resting)
    if where.type == "cpu":
        say("What prompts leave behind in memory: ten runs of some seconds …")
        measured = replace(measured, left_behind=left_behind(precision, names[0], resting))
    refuse(measured, datasheets.known(measured.name))
    if json_path is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    measured.save("--json", str(path))
    again = ": calibrate again with nothing else running" if probe.disturbed(use) else ""
    say(f"{use.sentence()} during {measured.seconds:.0f} s{again}")
    click.echo("\n".join(summary(measured)))
    say(f"Wrote {path}")


def make_generator(
    model: "Transformer", batch_size: int, cache_size: int, kv_cache: str
) -> "Generator":
    """A Generator as generate.py makes it; on an accelerator its step is compiled."""
    from quantbench.generate import Generator

    compiled = model.tok_embeddings.weight.device.type != "cpu"
    return Generator(model, batch_size, cache_size, kv_cache, compile_decode=compiled)


def summary(measured: "Calibration") -> list[str]:
    """A few lines about a calibration, for a person."""
    from quantbench.estimate.passes import CalibratedMachine, scatter

    machine, sure = CalibratedMachine(measured), scatter(measured)
    memory, speed = measured.bandwidth, measured.speed
    lines = [
        f"{measured.name}: reads memory at {speed.read / 1e9:.1f} GB/s, multiplies "
        f"{measured.precision} at {speed.multiply / 1e9:.0f} Gflop/s",
        f"a block of {memory[0].bytes >> 10} KiB is read at {memory[0].read / 1e9:.0f} GB/s; "
        f"copying moves {memory[-1].copy / 1e9:.1f} GB/s",
    ]
    for scheme in machine.curves.schemes:
        rate = machine.curves.weight_rate(scheme, 1)
        lines.append(
            f"{scheme}: a step reads weights at {rate / 1e9:.1f} GB/s, "
            f"{rate / speed.read:.0%} of memory's speed"
        )
    lines.append(
        f"models that were left out are predicted within {sure['token']:.1%} (steps) and "
        f"{sure['prompt']:.1%} (prompts), root mean square"
    )
    return lines
