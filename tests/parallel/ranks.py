"""Four processes on this machine, connected by gloo, for the tests of models that ranks share.

    pool.run(2, function, *arguments)       # function(ranks, *arguments) on two of them

They are started once for all tests, and forked from a process that has imported torch before.
"""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZE = 4
PATIENCE = 300  # seconds for one call, of a machine that is busy; a hang takes for ever
of_size: dict[int, Any] = {}  # in a rank: its place, by the number of ranks


def join(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from quantbench.ops.ranks import ALONE, Ranks

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    of_size[1] = ALONE
    for size in range(2, SIZE + 1):
        group = dist.new_group(range(size))
        if rank < size:
            of_size[size] = Ranks(rank, size, group.group_name)


def call(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(of_size[size], *arguments)


class Pool:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quantbench.run.loading", "tests.parallel.work"])
        self.ranks = [context.Pool(1, join, (rank, str(folder))) for rank in range(SIZE)]

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank. Raises what the first one that failed raised."""
        given = size, function, *arguments
        calls = [rank.apply_async(call, given) for rank in self.ranks[:size]]
        return [each.get(PATIENCE) for each in calls]

    def close(self) -> None:
        for rank in self.ranks:
            rank.terminate()
