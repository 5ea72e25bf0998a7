"""Calls from two threads at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def check(function: Callable[..., torch.Tensor], problems: Sequence[Any], times: int) -> None:
    """function(*problem) is the same to the bit whether or not another thread is in it."""

    def same(problem: Any, alone: torch.Tensor) -> bool:
        return all(torch.equal(function(*problem), alone) for _ in range(times))

    alone = [function(*problem) for problem in problems]
    with ThreadPoolExecutor(len(problems)) as threads:
        assert all(threads.map(same, problems, alone))
