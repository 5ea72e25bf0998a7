"""quantbench roofline: how near to the limit of memory each scheme comes.

    quantbench roofline --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    quantbench roofline --schemes int8wo,fp6 --parts layers --json roofline.json

Decoding reads every weight once for each token, so memory's bandwidth sets the limit. First every
distinct shape among the model's linear layers is timed alone: GB/s, share of the bandwidth, and how
our kernel compares with the stock one. Then the whole model, each scheme in a process of its own:
tokens per second against what its bytes allow. Bandwidth is read before every cycle of turns.
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from quantbench import files
from quantbench.answer import decode_limit, layer_limit
from quantbench.arguments import names_of, refuse_given
from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.log.about import report_output, write_json
from quantbench.log.config import RunConfig
from quantbench.log.options import options
from quantbench.plans.compare_options import decoding, turn_options, turn_settings
from quantbench.progress import say
from quantbench.quantize import spec
from quantbench.quantize.recipe import Recipe
from quantbench.report import floor, limit_tables
from quantbench.report.columns import aligned

# Other than generate.py's.
DEFAULTS = {"checkpoint_path": "dummy:TinyLlama-1.1B-Chat-v1.0", "max_new_tokens": 33}
SCHEMES = spec.COMPARED
PARTS = ("layers", "model")
OF_MODEL = ("max_new_tokens", "cycles", "max_minutes", "processes")


@click.command(cls=Command)
@click.option("--schemes", metavar="A,B", help=f"Schemes to measure [{','.join(SCHEMES)}]")
@click.option("--parts", metavar="A,B",
              help=f"Single layers, the whole model, or both [{','.join(PARTS)}]")  # fmt: skip
@click.option("--only_ours", is_flag=True,
              help="Leave out torch's and torchao's kernels, which take memory, too")  # fmt: skip
@turn_options
@click.option("--json", "json_path", metavar="PATH", help="Write all of it here, too")
@options("device", "precision", "batch_size", "num_layers", defaults=DEFAULTS)
def roofline(
    schemes: str | None,
    parts: str | None,
    only_ours: bool,
    json_path: str | None,
    config: RunConfig,
    **given: Any,
) -> None:
    """Hold every scheme against the limit that memory's bandwidth sets."""
    specs = [spec.parse(name, "--schemes") for name in names_of("--schemes", schemes, SCHEMES)]
    for scheme in specs:
        if scheme.scheme is None or isinstance(scheme, spec.Int8Embedding | Recipe):
            raise UsageError(
                f"--schemes {scheme}: its layers are those of other schemes; name these"
            )
    # Full precision comes first: it is what the others are compared with.
    chosen = list(dict.fromkeys(["none", *map(str, specs)]))
    wanted = names_of("--parts", parts, PARTS, PARTS)
    if "model" not in wanted:
        refuse_given(OF_MODEL, "single layers are measured, and no whole model: "
                     "leave it out, or add model to --parts")  # fmt: skip
    settings, common = turn_settings(given), decoding(config)
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": common.checkpoint_path})
    kernels, layers = layer_limit.measured(common, chosen, "layers" in wanted, only_ours)
    report: dict[str, object] = {"config": common}
    if layers:
        report["layers"] = layers
        write_json(json_path, report)  # before stdout, which may be closed
        click.echo(aligned(limit_tables.LAYERS, layers))
        click.echo("\n" + "\n".join(limit_tables.layer_remarks(layers)))
    failed = any(row.why_not for row in layers)
    if "model" in wanted:
        arms = decode_limit.arms_of(_arms(common, kernels))
        comparison = decode_limit.measure(arms, settings)
        rows = decode_limit.with_stock(comparison)
        write_json(json_path, {**report, "model": rows, "comparison": comparison})
        click.echo("\n" * bool(layers) + aligned(limit_tables.MODELS, rows))
        remarks = limit_tables.model_remarks(rows, comparison.bandwidth)
        if comparison.ended == "max_minutes":
            remarks.append("--max_minutes was reached")
        if "cpu" in comparison.bandwidth:
            remarks += filter(None, [floor.warning(common, rows)])
        click.echo("\n" + "\n".join(remarks))
        failed = failed or any(row.failed for row in rows)
    if json_path:
        say(f"Wrote {json_path}")
    if failed:
        sys.exit(1)


def _arms(common: RunConfig, kernels: Mapping[str, Sequence[str]]) -> list[RunConfig]:
    """Every scheme on its best kernel, full precision first, and on the stock one if that is
    another. Pairs come before what is single, so that groups of an even number hold both of one."""

    def pair(scheme: str) -> list[RunConfig]:
        own = dataclasses.replace(common, quantization=scheme)
        return [own, *(dataclasses.replace(own, kernel=name) for name in kernels[scheme][1:])]

    (none, *of_none), *others = map(pair, kernels)
    pairs_first = sorted([*others, of_none], key=len, reverse=True)
    return [none, *itertools.chain.from_iterable(pairs_first)]
