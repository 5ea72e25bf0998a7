"""How a command refuses."""

from click.testing import Result


def one_line(result: Result) -> str:
    """The message of the one error line that a command ended with, the last on stderr; above it is
    nothing but progress."""
    *before, last = result.stderr.splitlines()
    assert result.exit_code in (1, 2) and last.startswith("error: "), result.output
    assert not [line for line in before if line.startswith("error: ")], result.stderr
    assert "Traceback" not in result.output and "report it" not in last and len(last) < 1000
    return last.removeprefix("error: ")
