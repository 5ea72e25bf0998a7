"""quantbench schemes: every quantization scheme's size, kernel here, and cost in quality.

quantbench schemes --list                   # what each is, in words; at once
quantbench schemes                          # and its bits, and the kernel that runs here
quantbench schemes --measure                # and KL and perplexity, on the embedded model
quantbench schemes --measure int8wo fp6     # of these alone
"""

from collections.abc import Sequence

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.help_text import refuse_beside, refuse_given
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Whole
from quantbench.log.options import options
from quantbench.log.origin import report_output, write_json
from quantbench.progress import say
from quantbench.quality.thresholds import TOKENS, check_tokens
from quantbench.quantize.spec import MEASURED, SHOWN, START_WITH, forms, parse
from quantbench.text import aligned

NOTE = (
    "\n* start with these. GGUF: the type of llama.cpp's files that it compares with.\n"
    "Losses in words are of models of billions of weights. Small ones lose more: SmolLM2-135M has "
    "a KL of 0.16 nats as fp6 and 0.39 as int4wo-64 (damaged); --measure gives that of a model."
)


@click.command(cls=Command)
@click.argument("names", metavar="[SCHEME]...", nargs=-1)
@click.option("--list", "only_names", is_flag=True, help="Say only what each is, in words")
@click.option("--measure", is_flag=True, help="Measure KL and perplexity, too, as quality does")
@click.option("--text", help="A text to measure on, instead of those of quality")
@click.option("--tokens", type=Whole(0), default=TOKENS,
              help=f"Read at most N tokens; 0: all [{TOKENS}]")  # fmt: skip
@click.option("--json", "json_path", metavar="PATH", help="Write the rows here, too")
@options("checkpoint_path", "device", "precision")
def schemes(
    names: tuple[str, ...],
    only_names: bool,
    measure: bool,
    text: str | None,
    tokens: int,
    json_path: str | None,
    config: RunConfig,
) -> None:
    """List the quantization SCHEMEs: bits per weight, and the kernel that runs on this device."""
    for name in names:
        parse(name)
    if only_names:
        refuse_beside(("names", "only_names", "debug"),
                      "--list measures and writes nothing: leave it out")  # fmt: skip
        click.echo(described(names or (*SHOWN, *MEASURED)))
        click.echo(NOTE)
        return
    if not measure:
        refuse_given(("text", "tokens"), "--measure reads it: give that, too")
    if text is not None:
        files.read_text("--text", text)
    check_tokens(tokens)
    files.check_outputs([report_output(json_path)], {"--text": text})
    # torch takes its seconds after the options
    from quantbench.compare import schemes as figures

    rows = figures.rows(config, names)
    if measure:
        figures.measure(config, rows, text, tokens, say)
    write_json(json_path, rows)
    click.echo(figures.table(rows))
    if not names:
        click.echo(f"{NOTE}\nForms: {', '.join(forms())}")


def described(names: Sequence[str]) -> str:
    """The schemes in words. It needs no torch."""
    rows = [["  scheme", "GGUF", "in words"]]
    for name in names:
        spec = parse(name)
        rows.append([f"{'*' if name in START_WITH else ' '} {name}", spec.gguf, spec.plain])
    return aligned(rows, left={0, 1, 2})
