"""A sweep on a Ray cluster: what a task asks for, and what becomes of one whose node is lost."""

import threading
import time

import pytest
from click.testing import CliRunner

from quantbench.__main__ import commands
from quantbench.compare.sampling import latency_ray
from quantbench.compare.sampling.latency_plan import LatencyPlan, Load, PlannedArm
from quantbench.compare.sampling.latency_results import LatencyResults
from quantbench.errors import UsageError


def load(ranks=1, *argv):
    return Load("tiny", PlannedArm("a", "", list(argv)), ranks)


NODES = [{"CPU": 8.0}, {"CPU": 4.0, "memory": 1e9}]
CARDS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 1.0}]
NEEDS = [
    (load(), NODES, {"CPU": 4}),  # all cores of the smaller node
    (load(6), NODES, {"CPU": 8}),  # of the one that has a core for each rank
    (load(2, "--threads", "2"), NODES, {"CPU": 4}),
    (load(1, "--threads", "3"), NODES, {"CPU": 3}),
    (load(2), CARDS, {"GPU": 2, "CPU": 2}),
    (load(4, "--device", "cuda"), CARDS, {"GPU": 4, "CPU": 4}),
    (load(2, "--device", "cpu"), CARDS, {"CPU": 16}),
]


@pytest.mark.parametrize(("task", "nodes", "needs"), NEEDS)
def test_what_a_task_asks_for(task, nodes, needs):
    assert latency_ray.needed(task, nodes, "head:1") == needs


def test_a_task_that_no_node_can_take():
    with pytest.raises(UsageError, match="--tp 9: .* 9 CPUs of one node, .* head:1 has 8$"):
        latency_ray.needed(load(9), NODES, "head:1")
    with pytest.raises(UsageError, match="8 GPUs of one node, .* has 4$"):
        latency_ray.needed(load(8), CARDS, "head:1")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "--ray 127.0.0.1:1: there is no Ray; `ray start --head` starts one"),
        ("nowhere", "--ray takes HOST:PORT, ray://HOST:PORT or auto; given: 'nowhere'"),
        ("host:port", "--ray takes HOST:PORT"),
    ],
)
def test_an_address_where_no_ray_is(address, message, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    words = ["latency", "--ray", address, "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(commands, words)
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle(cluster, tmp_path):
    """Three tasks on two nodes: one's node is killed, one's process ends at every attempt."""
    from tests.compare.ray_work import work

    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=2) for _ in range(2))}
    arms = [PlannedArm(name, name, []) for name in ("slow", "fast", "lost")]
    plan = LatencyPlan([str(tmp_path)], arms, [1], [100, 200], [1, 2])
    results, said = LatencyResults(plan), []

    def kill():
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not (tmp_path / "slow").exists():
            time.sleep(0.05)
        time.sleep(0.5)
        name = (tmp_path / "slow").read_text().split()[0]
        cluster.remove_node(nodes[name], allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    latency_ray.run(results, cluster.address, lambda: None, said.append, work=work)
    killer.join()
    assert results.ended == "complete" and len(results.tables) == 6
    tried = {
        arm: [line.split() for line in (tmp_path / arm).read_text().splitlines()]
        for arm in ("slow", "fast", "lost")
    }
    assert [len(tried[arm]) for arm in ("slow", "fast", "lost")] == [2, 1, 2]
    assert {threads for lines in tried.values() for _, threads in lines} == {"2"}
    assert tried["slow"][0][0] != tried["slow"][1][0]  # the other node took it
    for table in results.tables:
        assert [cell.batch_size for cell in table.cells] == [1, 2]
        if table.arm == "lost":
            reasons = {cell.reason for cell in table.cells}
            assert len(reasons) == 1 and "lost 2 times: the Ray worker was lost" in reasons.pop()
        else:
            assert all(len(cell.samples) == 10 and not cell.reason for cell in table.cells)
            last = tried[table.arm][-1][0]
            assert table.carried.machine.startswith(f"Ray node {last[:8]} ")
    assert sum("it is tried once more" in line for line in said) == 2
