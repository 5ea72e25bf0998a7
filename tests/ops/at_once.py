"""Calls from two threads at the same time."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


def check(function: Callable[..., torch.Tensor], problems: Sequence[Any], times: int) -> None:
    """function(*problem) is the same to the bit whether or not another thread is in it."""
    alone = [function(*problem) for problem in problems]
    wrong = []

    def repeat(index: int) -> None:
        for _ in range(times):
            if not torch.equal(function(*problems[index]), alone[index]):
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
