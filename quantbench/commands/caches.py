"""quantbench caches: what each KV cache takes, and how fast attention reads it.

quantbench caches                      # Llama-3.2-1B's heads, 65536 positions
quantbench caches --checkpoint_path dummy:Meta-Llama-3-8B --context_depth 8192
"""

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.log.about import report_output, write_json
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Whole
from quantbench.log.options import options
from quantbench.run import environment

MODEL = "dummy:Llama-3.2-1B"  # its heads and layers


@click.command(cls=Command)
@click.option("--context_depth", type=Whole(1), default=65536,
              help="Positions to attend over [65536]")  # fmt: skip
@click.option("--rounds", type=Whole(1), default=15, help="How often each cache is timed [15]")
@click.option("--json", "json_path", metavar="PATH", help="Write every timing here, too")
@options("batch_size", "device", "precision", defaults={"checkpoint_path": MODEL})
def caches(context_depth: int, rounds: int, json_path: str | None, config: RunConfig) -> None:
    """Measure decode attention alone, over every kind of KV cache, against memory's speed."""
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": config.checkpoint_path})
    environment.prepare()
    # torch takes its seconds after the options
    from quantbench.bench import cache_timing

    environment.use_threads(config)
    report = cache_timing.measured(config, context_depth, rounds)
    write_json(json_path, report)
    click.echo(cache_timing.table(report))
