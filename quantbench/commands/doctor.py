"""quantbench doctor: what this machine has, and what is slow here and why, for a bug report.

quantbench doctor                       # some seconds; minutes where the C++ kernels are not built
quantbench doctor --json doctor.json    # the same, to attach
"""

import os
import platform
import time
from collections.abc import Iterator
from typing import Any

import click

from quantbench import environment, files, host
from quantbench.cli import Command
from quantbench.log.origin import about, cards, processor, report_output, write_json
from quantbench.run import machine
from quantbench.text import aligned, counted

WATCHED = 1.0  # seconds for which other processes are watched


@click.command(cls=Command)
@click.option("--json", "json_path", metavar="PATH", help="Write it here, too")
def doctor(json_path: str | None) -> None:
    """Say what this machine has, what is slow here, and why."""
    files.check_outputs([report_output(json_path)])
    environment.prepare()
    found, problems = examined()
    write_json(json_path, {**found, "slow": problems})
    origin = about()
    named = {**origin.versions, "commit": origin.commit, **found}
    rows = [[name, ", ".join(map(str, _listed(value))) or "-"] for name, value in named.items()]
    click.echo(aligned(rows, left={0, 1}))
    click.echo("\nSlow here:" if problems else "\nNothing was found that is slow here.")
    for sentence in problems:
        click.echo(f"- {sentence}")


def examined() -> tuple[dict[str, Any], list[str]]:
    """What there is, None where it is not known or not there; and what is slow, in sentences."""
    import torch  # takes its seconds after the options

    from quantbench.ops.cpu import build, compiler
    from quantbench.run.bandwidth import BYTES, BandwidthProbe

    allowed = host.affinity() or ()
    words, refusal, free = compiler.command(), build.refusal(), host.free_memory()
    threads = environment.choose_threads(None, host.cores(), os.environ)
    torch.set_num_threads(threads.count or torch.get_num_threads())
    before = machine.Counters.read()
    time.sleep(WATCHED)
    use, speed = machine.Counters.read().since(before), None
    caveat: str | None = "too little memory is free to measure its speed"
    if free is None or free > 2 * BYTES:
        probe = BandwidthProbe(torch.device("cpu"))
        speed, caveat = round(probe.measure() / 1e9, 2), probe.caveat
    found = {
        "system": platform.platform(),
        "processor": processor(),
        "cores": threads.cores,
        "slow_cpus_left_out": len(allowed) - len(host.fast(allowed)),
        "threads": torch.get_num_threads(),
        "cards": cards(),
        "torch_cuda": torch.version.cuda,
        "compiler": compiler.version(words).partition("\n")[0] if words else None,
        "instruction_set": None if refusal else build.isa(),
        "free_gb": free and round(free / 1e9, 2),
        "read_gb_per_s": speed,
        "huge_pages": environment.system_huge_pages(),
    }

    def slow() -> Iterator[str]:
        if refusal:
            yield f"plain torch unpacks quantized weights at every step: {refusal}"
        if asked := os.environ.get("QUANTBENCH_ISA"):
            yield f"QUANTBENCH_ISA={asked} keeps the C++ kernels from choosing"
        elif found["instruction_set"] == "portable":
            yield "the processor has no instruction set for which the C++ kernels have fast loops"
        if found["huge_pages"] == "never":
            yield f"weights are in pages of 4 KB: /{environment.HUGE_PAGES} is never, not madvise"
        if warning := threads.warning():
            yield warning
        if threads.count and threads.cores and threads.count < threads.cores:
            yield f"the environment leaves {threads.count} of {counted(threads.cores, 'core')}"
        if (use.other_cores or 0) + (use.stolen_cores or 0) > machine.MOST_TAKEN * use.cores:
            yield f"in one second {' and '.join(use.others())}"
        if caveat:
            yield caveat
        if found["cards"] and not torch.cuda.is_available():
            yield f"torch cannot use the card: built for CUDA {torch.version.cuda or '(no)'}"

    return found, list(slow())


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]
