"""Four processes on this machine, connected by gloo, for the tests of models that ranks share.

    pool.run(2, function, *arguments)       # function(ranks, *arguments) on two of them

They are started once for all tests, and forked from a process that has imported torch before.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZE = 4
PATIENCE = 300  # seconds for one call, of a machine that is busy; a hang takes for ever


def serve(rank: int, folder: str, requests: Connection) -> None:
    import torch
    import torch.distributed as dist

    from quantbench.ops.ranks import ALONE, Ranks

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    groups = {size: dist.new_group(range(size)) for size in range(2, SIZE + 1)}
    while True:
        try:
            size, function, arguments = requests.recv()
        except (EOFError, ConnectionResetError):
            return
        ranks = Ranks(rank, size, groups[size].group_name) if size > 1 else ALONE
        try:
            requests.send((function(ranks, *arguments), None))
        except BaseException as error:
            requests.send((error, traceback.format_exc()))


class Pool:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["quantbench.run.loading", "tests.parallel.work"])
        self.processes, self.pipes = [], []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(folder), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returned on each rank. Raises what the first one that failed raised."""
        pipes = self.pipes[:size]
        for pipe in pipes:
            pipe.send((size, function, arguments))
        results = []
        for pipe in pipes:
            assert pipe.poll(PATIENCE), "a rank does not answer"
            results.append(pipe.recv())
        for result, trace in results:
            if trace:
                raise AssertionError(trace) from result
        return [result for result, _ in results]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            process.kill()
