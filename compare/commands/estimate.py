"""python -m compare estimate: what a run would cost; and estimates held against what was measured.

    python -m compare estimate audit published.rst      # what is wrong with a published table
    python -m compare estimate --validate published.rst --device "NVIDIA RTX A6000"
    python -m compare estimate --validate results.json --rst table.rst

An estimate is held out if nothing was fitted to its case. The rows of a published table are each
estimated by two constants that are fitted to the other rows of its card (docs/estimates.md).
"""

import json

import click

import files
from cli import Command
from errors import UsageError
from text import shown


@click.command(cls=Command)
@click.argument("words", metavar="[audit] [FILE...]", nargs=-1)
@click.option("--validate", metavar="FILE",
              help="Results, or a published table (.rst); more may follow")  # fmt: skip
@click.option("--device", metavar="NAME", help="A card for which a table's models are predicted")
@click.option("--rst", "rst_path", metavar="PATH", help="Write the table here, too")
@click.option("--json", "json_path", metavar="PATH", help="Write the cases here, too")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def estimate(
    words: tuple[str, ...],
    validate: str | None,
    device: str | None,
    rst_path: str | None,
    json_path: str | None,
    debug: bool,
) -> None:
    """Audit a published table of measured and estimated runs, or hold estimates against results."""
    files.check_output("--rst", rst_path, _is_text, "reStructuredText")
    files.check_output("--json", json_path, files.is_json, "JSON")
    if words[:1] == ("audit",):
        if validate is not None or device is not None or rst_path or json_path:
            raise UsageError("estimate audit takes files alone, and no option")
        if not words[1:]:
            raise UsageError("estimate audit takes published tables (.rst); none is given")
        from compare.output.published import audited

        click.echo(audited(words[1:]))
    elif validate is not None:
        from compare.output.published import validated

        text, cases = validated([validate, *words], device)
        if rst_path:
            files.write_text("--rst", rst_path, text)
        if json_path:
            files.write_text("--json", json_path, json.dumps(cases, indent=1) + "\n")
        click.echo(text, nl=False)
    elif words:
        raise UsageError(f"estimate takes audit FILE, or --validate FILE; given: {shown(words[0])}")
    else:
        raise UsageError("estimate takes audit FILE, or --validate FILE; nothing is given")


def _is_text(head: bytes) -> bool:
    return head.startswith((b"Held out", b"Calibrated on"))
