"""How a command refuses."""

from click.testing import Result


def one_line(result: Result) -> str:
    """The message of the one error that a command ended with, which is its last line."""
    *before, last = result.stderr.splitlines()
    assert result.exit_code in (1, 2) and last.startswith("error: ")
    assert not any(line.startswith(("error: ", "Traceback")) for line in before)
    return last.removeprefix("error: ")
