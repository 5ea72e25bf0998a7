"""quantbench caches: what each KV cache takes, and how fast attention reads it.

quantbench caches                      # Llama-3.2-1B's heads, 65536 positions
quantbench caches --checkpoint_path dummy:Meta-Llama-3-8B --context_depth 8192
"""

import click

from quantbench import files
from quantbench.cli import Command, quiet
from quantbench.log.about import report_output, write_json
from quantbench.log.config import RunConfig
from quantbench.run import environment


@click.command(cls=Command)
@click.option(
    "--checkpoint_path",
    default="dummy:Llama-3.2-1B",
    help="Whose heads and layers [dummy:Llama-3.2-1B]",
)
@click.option("--context_depth", type=click.IntRange(1), default=65536,
              help="Positions to attend over [65536]")  # fmt: skip
@click.option("--batch_size", type=click.IntRange(1), default=1, help="Sequences at once [1]")
@click.option("--device", default="auto", help="cpu, cuda, xpu, mps [auto]")
@click.option("--precision", "--dtype", "precision", default="bfloat16",
              help="bfloat16, float16, float32 (or --dtype) [bfloat16]")  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(1), default=15, help="How often each cache is timed [15]"
)
@click.option("--json", "json_path", metavar="PATH", help="Write every timing here, too")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def caches(
    checkpoint_path: str,
    context_depth: int,
    batch_size: int,
    device: str,
    precision: str,
    rounds: int,
    json_path: str | None,
    debug: bool,
) -> None:
    """Measure decode attention alone, over every kind of KV cache, against memory's speed."""
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": checkpoint_path})
    environment.prepare()
    quiet(debug)
    # torch takes its seconds after the options
    from quantbench.bench import cache_timing

    environment.use_threads(RunConfig(device=device))
    report = cache_timing.measured(
        checkpoint_path, context_depth, batch_size, device, precision, rounds
    )
    if json_path:
        write_json(json_path, report)
    click.echo(cache_timing.table(report))
