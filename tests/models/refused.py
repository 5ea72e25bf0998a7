"""How a call refuses."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def refusal(error: type[Exception], act: Callable[..., object], *arguments: object) -> str:
    """The one line of the error that act(*arguments) raises."""
    with pytest.raises(error) as raised:
        act(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def refuses(act: Callable[..., object], table: Iterable[tuple[dict[str, Any], str]]) -> None:
    """act(**given) raises a RuntimeError, as an operator does, for each (given, its message)."""
    for given, message in table:
        with pytest.raises(RuntimeError, match=message):
            act(**given)
