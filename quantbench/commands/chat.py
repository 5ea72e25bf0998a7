"""quantbench chat: talk to a model in its own chat template; as generate --interactive.

quantbench chat --checkpoint_path DIR
quantbench chat --checkpoint_path DIR --quantization int8wo
"""

import dataclasses

import click

from quantbench.cli import OneLineErrors
from quantbench.commands import generate
from quantbench.log.config import RunConfig
from quantbench.log.options import options


@click.command(cls=OneLineErrors)
@options(without=("interactive",))
def chat(config: RunConfig) -> None:
    """Talk to a quantized Llama-family model in the terminal."""
    generate.started(dataclasses.replace(config, interactive=True))
