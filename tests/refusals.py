"""How a command refuses."""

from click.testing import Result

from quantbench.errors import QuantbenchError


def one_line(result: Result) -> str:
    """The message of the one error that a command ended with: printed by one that stands alone, and
    raised by one of a group, which prints it."""
    if isinstance(result.exception, QuantbenchError):
        message = str(result.exception)
    else:
        assert result.exit_code in (1, 2)
        message = result.stderr.splitlines()[-1].removeprefix("error: ")
    assert "\n" not in message and "Traceback" not in result.stderr
    return message
