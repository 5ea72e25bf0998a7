"""quantbench experts: which experts of a mixture a text takes, and what is gained by that.

    quantbench experts profile --checkpoint_path tiny_moe
    quantbench experts profile --text code.txt --output code.json
    quantbench experts show code.json
    quantbench experts show code.json --against letters.json

`profile` counts how often each expert of each layer is chosen. generate's --expert_placement takes
the file, or `popularity` for what profile keeps when --output is left out. `show` prints the
counts, and how many assignments find their expert in fast memory under each placement.
"""

import dataclasses
from pathlib import Path

import click

from quantbench import environment, files
from quantbench.cli import Command, Group
from quantbench.errors import UsageError
from quantbench.experts import tables as report
from quantbench.experts.placement import hit_rates
from quantbench.experts.popularity import Popularity, keep, skews
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Whole
from quantbench.log.options import options
from quantbench.progress import progress, say
from quantbench.text import counted

CONTEXT = 1024  # positions of a window, or the model's context, if that is shorter


@click.group(cls=Group)
def experts() -> None:
    """Count how often each expert of a mixture is chosen, and show it."""


@experts.command(cls=Command)
@click.option("--text", metavar="FILE", help="A text to read, instead of the embedded held-out one")
@click.option("--tokens", type=Whole(2), metavar="N", help="Only its first N tokens [all]")
@click.option("--output", metavar="FILE", help="Write the counts here, as JSON [the cache folder]")
@options("quantization", "device", "precision", "num_layers",
         defaults={"checkpoint_path": "tiny_moe"})  # fmt: skip
def profile(text: str | None, tokens: int | None, output: str | None, config: RunConfig) -> None:
    """Run a model over a text, and count how often each expert of each layer is chosen."""
    config = dataclasses.replace(config, write_result="none")
    words = None if text is None else files.read_text("--text", text)
    counts = files.Output("--output", output, files.json_with("routers"), "JSON of such a command")
    files.check_outputs([counts], {"--text": text})
    popularity = _profiled(config, text, words, tokens)
    if output is None:
        output = str(keep(popularity))
    else:
        popularity.save("--output", output)
    click.echo("\n".join(report.lines(popularity, skews(popularity))))
    say(f"Wrote {output}")


def _profiled(
    config: RunConfig, text: str | None, words: str | None, tokens: int | None
) -> Popularity:
    """The counts of a text's first tokens. text: its path; None: the embedded text."""
    environment.prepare()
    import torch  # takes its seconds after the options were checked

    from quantbench.experts import routing
    from quantbench.models.formats import EMBEDDED
    from quantbench.run import loading
    from quantbench.run.plan import begin, make_plan

    plan = begin(make_plan(config))
    routing.routers_of(plan.architecture)  # a dense model is refused before its weights are read
    if words is None:
        words = files.read_text("", EMBEDDED / "heldout.txt")
    ids = plan.tokenizer.encode(words)
    if len(ids) < 2:
        raise UsageError(f"--text {text}: {counted(len(ids), 'token')}; give a longer text")
    if tokens and tokens > len(ids):
        raise UsageError(f"--tokens {tokens}: the text has {len(ids)}; give at most that")
    if config.checkpoint_path.startswith("dummy:"):
        say("Random weights: what they choose says nothing about the trained model")
    with progress(f"Loading {plan.name} as {plan.spec.name}") as report:
        model = loading.load(plan, report, say).model
    context = min(CONTEXT, plan.architecture.max_position)
    name = Path(text).name if text else "heldout.txt"
    with progress(f"Counting experts over {len(ids[:tokens])} tokens", unit="tokens") as report:
        chosen = torch.tensor(ids[:tokens], device=plan.device)
        return routing.profile(model, chosen, context, name, report)


@experts.command(cls=Command)
@click.argument("popularity")
@click.option("--against", metavar="FILE",
              help="Try placements on these counts, and not on the text's own halves")  # fmt: skip
def show(popularity: str, against: str | None) -> None:
    """Show what `profile` wrote: which experts are popular, and what a placement gains by it.

    A hit rate is the share of assignments whose expert is in fast memory.
    """
    counts = Popularity.load("", popularity)
    held_out = None
    if against is not None:
        held_out = Popularity.load("--against", against)
        held_out = held_out.of_model(counts.routers, "--against", against)
    first, second = counts.halves
    pairs = (
        [(first, second), (second, first)]
        if held_out is None
        else [(counts.counts, held_out.counts)]
    )
    rates = hit_rates(counts.routers, pairs)
    layers = skews(counts)
    lines = report.lines(counts, layers)
    lines += ["", *report.rate_lines(rates, held_out.text if held_out else None)]
    click.echo("\n".join(lines))
