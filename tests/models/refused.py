"""How a call refuses."""

from collections.abc import Callable

import pytest


def refusal(error: type[Exception], act: Callable[..., object], *arguments: object) -> str:
    """The one line of the error that act(*arguments) raises."""
    with pytest.raises(error) as raised:
        act(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)
