"""quantbench recipe: the scheme of each layer that keeps most quality within a budget.

    quantbench recipe --checkpoint_path DIR --bits 4.5 --output mix.json
    quantbench recipe --checkpoint_path DIR --max_memory 4GB --context_depth 8000
    quantbench recipe --checkpoint_path DIR --max_kl 0.03       # the smallest that is good
    quantbench recipe export mix.json                           # in llama.cpp's words
    quantbench recipe frontier model-Q4_K_M.gguf                # KL against bytes

One backward pass estimates what each scheme does to the predictions in each layer, an integer
programme chooses, and the KL divergence of the whole recipe is measured against that of the best
uniform scheme. --quantization mix.json then runs it.
"""

import sys
from typing import Any

import click

from quantbench import files
from quantbench.cli import Command, Group
from quantbench.errors import UsageError
from quantbench.log import shell
from quantbench.log.config import RunConfig
from quantbench.log.kinds import ByteSize, Number, OneOf
from quantbench.log.options import options
from quantbench.log.origin import report_output, write_json
from quantbench.progress import say
from quantbench.quality.thresholds import KL, SCALE
from quantbench.report.columns import aligned
from quantbench.run import checks

OF_GENERATE = (
    *("checkpoint_path", "num_layers", "device", "precision", "threads", "kv_cache", "batch_size"),
    *("prefill_size", "max_new_tokens", "context_depth", "cache_size"),
)
FORMATS = ("llama.cpp",)
BITS = 3.0, 3.5, 4.0, 4.5, 5.0, 6.1  # of `frontier`
A_WEIGHT = Number(what="bits a weight, such as 4.5", most="32")


@click.group(cls=Group, invoke_without_command=True)
@click.option("--bits", type=A_WEIGHT, metavar="N",
              help="At most N bits for a weight of the linear layers, scales included")  # fmt: skip
@click.option("--max_memory", type=ByteSize(), help="Peak memory while generating, at most, as 4GB")
@click.option("--min_tok_s", type=Number(what="tokens per second", most="1e9"), metavar="X",
              help="Decode at least so fast; times every scheme's layers here")  # fmt: skip
@click.option("--max_kl", type=KL, metavar="NATS",
              help=f"The smallest model of at most this KL divergence; {SCALE}")  # fmt: skip
@click.option("--text", metavar="FILE",
              help="Estimate the damage on this text [what calibrates schemes]")  # fmt: skip
@click.option("--uncalibrated", is_flag=True,
              help="No -gptq: the recipe loads faster, and llama.cpp can have it")  # fmt: skip
@click.option("--verify", is_flag=True,
              help="Run the recipe and the best uniform scheme in turns, as ab does")  # fmt: skip
@click.option("--output", metavar="FILE", help="Write the recipe here, for --quantization")
@options(*OF_GENERATE)
def recipe(
    text: str | None,
    uncalibrated: bool,
    verify: bool,
    output: str | None,
    config: RunConfig,
    **limits: Any,
) -> None:
    """Choose a scheme for each layer, within a budget of bits, memory, time or quality."""
    if click.get_current_context().invoked_subcommand:
        return
    if not any(limits.values()):
        raise UsageError("recipe takes a budget: --bits, --max_memory, --min_tok_s or --max_kl")
    checks.refuse_random_weights(config.checkpoint_path, "recipes")
    checks.check_options(config)
    if text is not None:
        files.read_text("--text", text)
    kept = files.Output("--output", output, files.is_json, "JSON of a recipe")
    files.check_outputs([kept], {"--text": text, "--checkpoint_path": config.checkpoint_path})
    if output is not None and not output.endswith(".json"):
        raise UsageError(f"--output {output}: --quantization takes recipes that end in .json")
    if verify and output is None:
        raise UsageError("--verify runs the recipe from its file: give --output FILE, too")
    from quantbench.recipe import search, table  # torch takes its seconds after the options

    budget = search.Budget(**limits)
    found = search.search(config, budget, text, not uncalibrated)
    click.echo(table.report(found))
    if output is None:
        return
    search.write(found, output)
    say(f"Wrote {output}")
    if verify and found.better and found.uniform:
        from quantbench.recipe.verifying import verify as verified

        sys.exit(verified(config, found, budget, output))
    names = [*(rival.name for rival in found.uniform[:1]), output]
    arms = [word for name in names for word in ("--arm", shell.join(["--quantization", name]))]
    ab = shell.join(["quantbench", "ab", "--checkpoint_path", config.checkpoint_path, *arms])
    click.echo(f"\nSpeed and memory: {ab}")


@recipe.command(cls=Command)
@click.argument("paths", metavar="[FILE]...", nargs=-1)
@click.option("--bits", type=A_WEIGHT, multiple=True, default=BITS, metavar="N",
              help=f"A recipe of N bits a weight [{', '.join(map(str, BITS))}]")  # fmt: skip
@click.option("--json", "json_path", metavar="PATH", help="Write all points here, too")
@options("checkpoint_path", "device", "threads")
def frontier(
    paths: tuple[str, ...], bits: tuple[float, ...], json_path: str | None, config: RunConfig
) -> None:
    """Measure KL against bytes: recipes, uniform schemes, and quantized FILEs of the same
    weights."""
    checks.check_options(config)
    files.check_outputs([report_output(json_path)])
    from quantbench.recipe import frontier as made

    found = made.frontier(config, bits, paths)
    if json_path:
        write_json(json_path, found)
        say(f"Wrote {json_path}")
    click.echo(aligned(made.COLUMNS, found.points))


@recipe.command(cls=Command)
@click.argument("file", type=click.Path())
@click.option("--format", type=OneOf(FORMATS), default=FORMATS[0], expose_value=False,
              help=f"The program that is to read it [{FORMATS[0]}]")  # fmt: skip
@options("checkpoint_path")
def export(file: str, config: RunConfig) -> None:
    """Print the recipe in FILE as llama-quantize's --tensor-type-file."""
    from quantbench.models.formats import open_checkpoint
    from quantbench.models.formats.names import hugging_face
    from quantbench.quantize.recipe import read
    from quantbench.recipe.export import tensor_types

    model = open_checkpoint(config.checkpoint_path)
    held = read(file, option="FILE").of_layers(model.name, model.config().linear_shapes())
    click.echo(tensor_types(held, hugging_face), nl=False)
