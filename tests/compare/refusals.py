"""How a command refuses."""

from click.testing import Result


def one_line(result: Result) -> str:
    """The message of the one error that a command ended with."""
    message = str(getattr(result.exception, "message", result.exception))
    assert not isinstance(result.exception, SystemExit) and "\n" not in message
    return message
