"""NUMA: which nodes memory is interleaved over, and which cores a rank keeps to."""

import os

import pytest

from quantbench import host
from quantbench.run import numa
from quantbench.run.environment import Place


@pytest.fixture
def calls(monkeypatch):
    """What would be set; no policy is set before."""
    made = {"nodes": [], "cores": []}
    monkeypatch.setattr(numa, "_policy", lambda: 0)
    monkeypatch.setattr(numa, "_interleave", lambda nodes: made["nodes"].append(list(nodes)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: made["cores"].append(cores))
    monkeypatch.setattr(host, "at_start", None)
    return made


def machine(cpus, has_memory):
    folder = "sys/devices/system/node"
    lists = {f"{folder}/node{node}/cpulist": text for node, text in enumerate(cpus)}
    return {f"{folder}/has_memory": has_memory, **lists}


def test_one_process_interleaves_and_runs_on_all_nodes(kernel_files, calls):
    cpus = ["0-1,4", "2-3", "64-65", ""]  # 64 is not allowed; the last node has no core
    kernel_files(machine(cpus, "0-3"))
    assert numa.share_nodes(None) == [0, 1]
    assert calls == {"nodes": [[0, 1]], "cores": []}


@pytest.mark.parametrize(
    "rank, ranks, nodes, cores",
    [(0, 2, [0], {0, 1}), (1, 2, [1], {2, 3}), (2, 4, [1], {2, 3}), (2, 3, [1], {2, 3})],
)
def test_a_rank_stays_on_its_nodes(kernel_files, calls, rank, ranks, nodes, cores):
    kernel_files(machine(["0-1", "2-3"], "0-1"))
    assert numa.share_nodes(Place(rank, ranks, rank, ranks)) == nodes
    assert calls == {"nodes": [nodes], "cores": [cores]}
    assert host.cores() == 8  # of the machine: ranks divide them later


def test_ranks_share_all_nodes_evenly():
    assert [numa.share(range(8), rank, 3) for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


def test_one_node_or_a_policy_of_the_users_changes_nothing(kernel_files, calls, monkeypatch):
    assert numa.share_nodes(None) == []  # the system does not tell
    kernel_files(machine(["0-7"], "0"))
    assert numa.share_nodes(None) == []
    monkeypatch.setattr(numa, "_policy", lambda: 2)  # numactl --membind
    kernel_files(machine(["0-3", "4-7"], "0-1"))
    assert numa.share_nodes(None) == []
    assert calls == {"nodes": [], "cores": []}


@pytest.mark.skipif(numa._policy() != 0, reason="containers may forbid it; or numactl set one")
def test_the_system_takes_the_policy():
    """In a child process: interleaving over node 0 alone, which every machine has."""
    pid = os.fork()
    if pid == 0:
        numa._interleave([0])
        os._exit(numa._policy())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == numa.INTERLEAVE
