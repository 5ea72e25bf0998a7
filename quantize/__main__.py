"""python -m quantize: every kind of scheme: its size, its kernel here, and its cost in quality.

python -m quantize                          # names, bits per weight, kernels on this device
python -m quantize --measure                # and perplexity, on the embedded model
python -m quantize --measure int8wo fp6     # of these alone
"""

import json
import sys
from pathlib import Path

import click

from benchlog.config import RunConfig
from errors import QuantbenchError
from quantize.spec import forms, parse

TOKENS = 1 << 14


@click.command()
@click.argument("schemes", nargs=-1)
@click.option("--measure", is_flag=True, help="Measure perplexity on held-out text, too.")
@click.option("--checkpoint_path", default="tiny", help="Whose shapes and weights. [tiny]")
@click.option("--device", default="auto", help="cpu, cuda, xpu, mps. [auto]")
@click.option("--precision", default="bfloat16", help="bfloat16, float16, float32. [bfloat16]")
@click.option("--text", help="A text to measure on, instead of the embedded held-out one.")
@click.option("--tokens", default=TOKENS, help=f"How many of its tokens; 0: all. [{TOKENS}]")
@click.option("--json", "json_path", help="Write the rows here, too.")
def main(
    schemes: tuple[str, ...],
    measure: bool,
    checkpoint_path: str,
    device: str,
    precision: str,
    text: str | None,
    tokens: int,
    json_path: str | None,
) -> None:
    """List the quantization SCHEMES: bits per weight, and the kernel that runs on this device."""
    try:
        for name in schemes:
            parse(name)
        given = {"checkpoint_path": checkpoint_path, "device": device, "precision": precision}
        base = RunConfig(**given, calibration_text=text)
        from compare.commands import (
            schemes as overview,  # torch takes its seconds after the options have been read
        )

        rows = overview.rows(
            base, schemes, measure, tokens, lambda line: click.echo(line, err=True)
        )
        click.echo(overview.table(rows))
        if json_path:
            Path(json_path).write_text(json.dumps(rows, indent=1) + "\n")
    except QuantbenchError as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(error.exit_code)
    if not schemes:
        click.echo(f"\nForms: {', '.join(forms())}")


if __name__ == "__main__":
    main()
