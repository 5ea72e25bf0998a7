"""quantbench collect: comparisons of several machines in one table.

    quantbench recommend --checkpoint_path DIR --share here.json    # on each machine
    quantbench collect here.json there.json

Each row has its machine. results.json of --output is such a file, too.
"""

import click

from quantbench.cli import Command
from quantbench.compare import share_file
from quantbench.compare.shared_tables import collected
from quantbench.errors import UsageError
from quantbench.log.kinds import OneOf


@click.command(cls=Command)
@click.argument("paths", metavar="FILE...", nargs=-1)
@click.option("--format", "form", type=OneOf(("md",)), metavar="md", help="Print Markdown")
def collect(paths: tuple[str, ...], form: str | None) -> None:
    """Make one table of results.json FILEs, which recommend --share wrote on several machines."""
    if not paths:
        raise UsageError("which files? quantbench collect FILE FILE, of recommend --share FILE")
    files: dict[str, list[share_file.Comparison]] = {}
    for path in paths:
        own = share_file.read(path)
        if first := next((other for other in files if files[other] == own), None):
            raise UsageError(f"{path} holds the same measurement as {first}: leave one out")
        files[path] = own
    click.echo(collected([*files.values()], form == "md"))
