"""Where memory and threads belong on a machine whose memory is in several nodes.

    share_nodes(place())   # before weights are loaded and threads are started

One process reads its weights with the cores of all nodes, so pages are interleaved over them (Linux
would put all on the node of the thread that loads). Each rank of --tp gets nodes of its own, or one
that it shares with other ranks, and stays on their cores. A policy or an affinity that the user has
set, by numactl or otherwise, is kept.
"""

import ctypes
import os
import platform
from collections.abc import Sequence

from quantbench import host
from quantbench.run.environment import Place

INTERLEAVE = 3  # MPOL_INTERLEAVE of linux/mempolicy.h
SET, GET = {"x86_64": (238, 239), "aarch64": (237, 236)}.get(platform.machine(), (0, 0))
MAX_NODES = 1024


def share_nodes(place: Place | None) -> list[int]:
    """Interleave this process's memory over its nodes; keep a rank on their cores. Returns the
    nodes; none where there is one for all, or where the user has set a policy."""
    known = host.nodes()
    if len(known) < 2 or not SET or _policy() != 0:
        return []
    allowed = os.sched_getaffinity(0)
    nodes = {node: cpus & allowed for node, cpus in known.items() if cpus & allowed}
    if len(nodes) < 2:
        return []
    mine = share(sorted(nodes), place.local_rank, place.local_size) if place else sorted(nodes)
    if place:
        host.at_start = allowed
        os.sched_setaffinity(0, set().union(*(nodes[node] for node in mine)))
    _interleave(mine)
    return mine


def share(nodes: Sequence[int], rank: int, ranks: int) -> list[int]:
    """A rank's nodes: an equal share of them, at least one."""
    first, last = (len(nodes) * r // ranks for r in (rank, rank + 1))
    return list(nodes[first : max(last, first + 1)])


def _policy() -> int:
    """The process's memory policy; 0: none was set. -1: the system does not tell."""
    mode = ctypes.c_int(-1)
    failed = ctypes.CDLL(None).syscall(GET, ctypes.byref(mode), None, 0, None, 0)
    return -1 if failed else mode.value


def _interleave(nodes: Sequence[int]) -> None:
    words = (ctypes.c_ulong * (MAX_NODES // 64))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    ctypes.CDLL(None).syscall(SET, INTERLEAVE, words, MAX_NODES)
