"""quantbench collect: comparisons of several machines in one table.

    quantbench recommend --checkpoint_path DIR --share here.json    # on each machine
    quantbench collect here.json there.json

Each row has its machine; an edited file is refused.
"""

import click

from quantbench.answer import shared
from quantbench.cli import Command
from quantbench.errors import UsageError
from quantbench.log.kinds import Choice
from quantbench.report.shared_tables import collected


@click.command(cls=Command)
@click.argument("paths", metavar="FILE...", nargs=-1)
@click.option("--format", "form", type=Choice(("md",)), metavar="md", help="Print Markdown")
def collect(paths: tuple[str, ...], form: str | None) -> None:
    """Make one table of the FILEs that recommend --share wrote on several machines."""
    if not paths:
        raise UsageError("which files? quantbench collect FILE FILE, of recommend --share FILE")
    files = {path: shared.read(path) for path in paths}
    by_digest: dict[str, str] = {}
    for path, file in files.items():
        if (first := by_digest.setdefault(file.digest, path)) != path:
            raise UsageError(f"{path} holds the same measurement as {first}: leave one out")
    click.echo(collected([*files.values()], form == "md"))
