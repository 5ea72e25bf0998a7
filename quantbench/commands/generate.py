"""quantbench generate: generate text, and log speed and memory.

    python generate.py --quantization int8wo --compile                  # the embedded model
    python generate.py --checkpoint_path DIR --compile --interactive    # talk to your own
    python generate.py --checkpoint_path dummy:Llama-3.2-1B --compile   # speed without a download

The options are read here; generate.py, which needs torch, does the rest.
"""

import time

import click

from quantbench import environment
from quantbench.cli import OneLineErrors
from quantbench.log.config import RunConfig
from quantbench.log.options import options
from quantbench.progress import progress
from quantbench.run.checks import check

STARTED = time.perf_counter()  # start of the process, but for 0.1 s of Python and the imports above


@click.command(cls=OneLineErrors, epilog="The log is checked by: quantbench log check FILE")
@options()
def generate(config: RunConfig) -> None:
    """Generate text with a quantized Llama-family model and log its speed and memory."""
    started(config)


def started(config: RunConfig) -> None:
    """Run it, or start the ranks that do."""
    environment.prepare()
    check(config)
    if config.tp > 1 or environment.place():
        from quantbench.parallel import launch

        if environment.place() is None:
            launch.start(config)
            return
        config = launch.become_rank(config)
    with progress("Starting torch", lasting=False):
        from quantbench.generate import run
    run(config, STARTED)
