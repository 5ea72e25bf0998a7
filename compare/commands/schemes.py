"""python -m compare schemes: every quantization scheme's size, kernel here, and cost in quality.

python -m quantize                          # the same command; names, bits, kernels here
python -m quantize --measure                # and perplexity, on the embedded model
python -m quantize --measure int8wo fp6     # of these alone
"""

import click

import files
from benchlog.config import RunConfig
from cli import Command, quiet, say
from compare.fidelity.defaults import TOKENS
from compare.sampling.results import write_json
from quantize.spec import forms, parse


@click.command(cls=Command)
@click.argument("names", metavar="[SCHEME]...", nargs=-1)
@click.option("--measure", is_flag=True, help="Measure perplexity on held-out text, too")
@click.option("--checkpoint_path", default="tiny", help="Whose shapes and weights [tiny]")
@click.option("--device", default="auto", help="cpu, cuda, xpu, mps [auto]")
@click.option("--precision", default="bfloat16", help="bfloat16, float16, float32 [bfloat16]")
@click.option("--text", help="A text to measure on, instead of the embedded held-out one")
@click.option("--tokens", type=click.IntRange(0), default=TOKENS,
              help=f"How many of its tokens; 0: all [{TOKENS}]")  # fmt: skip
@click.option("--json", "json_path", metavar="PATH", help="Write the rows here, too")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def schemes(
    names: tuple[str, ...],
    measure: bool,
    checkpoint_path: str,
    device: str,
    precision: str,
    text: str | None,
    tokens: int,
    json_path: str | None,
    debug: bool,
) -> None:
    """List the quantization SCHEMEs: bits per weight, and the kernel that runs on this device."""
    for name in names:
        parse(name)
    base = RunConfig(
        checkpoint_path=checkpoint_path, device=device, precision=precision, calibration_text=text
    )
    if text is not None:
        files.read_text("--text", text)
    files.check_output("--json", json_path, files.is_json, "JSON")
    quiet(debug)
    from compare.figures import schemes as figures  # torch takes its seconds after the options

    rows = figures.rows(base, names, measure, tokens, say)
    if json_path:
        write_json(json_path, rows)
    click.echo(figures.table(rows))
    if not names:
        click.echo(f"\nForms: {', '.join(forms())}")
