"""Cells on a Ray cluster: what a task asks for, and what becomes of one whose node is lost."""

import threading
import time

import pytest

from quantbench.bench.store import Store, Turn
from quantbench.errors import UsageError
from quantbench.latency import ray_tasks
from quantbench.latency.answer import tables
from quantbench.latency.cells import begin
from quantbench.log.config import RunConfig
from tests.latency.latencies import plan
from tests.programs import command, wait_for

NODES = [{"CPU": 8.0}, {"CPU": 4.0, "memory": 1e9}]
CARDS = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 1.0}]
NEEDS = [
    (1, {}, NODES, {"CPU": 4}),  # all cores of the smaller node
    (6, {}, NODES, {"CPU": 8}),  # of the one that has a core for each rank
    (2, {"threads": 2}, NODES, {"CPU": 4}),
    (1, {"threads": 3}, NODES, {"CPU": 3}),
    (2, {}, CARDS, {"GPU": 2, "CPU": 2}),
    (4, {"device": "cuda"}, CARDS, {"GPU": 4, "CPU": 4}),
    (2, {"device": "cpu"}, CARDS, {"CPU": 16}),
]


@pytest.mark.parametrize(("ranks", "options", "nodes", "needs"), NEEDS)
def test_what_a_task_asks_for(ranks, options, nodes, needs):
    assert ray_tasks.needed([RunConfig(tp=ranks, **options)], nodes, "head:1") == needs


def test_a_task_that_no_node_can_take():
    with pytest.raises(UsageError, match="--tp 9: .* 9 CPUs of one node, .* head:1 has 8$"):
        ray_tasks.needed([RunConfig(tp=9)], NODES, "head:1")
    with pytest.raises(UsageError, match="8 GPUs of one node, .* has 4$"):
        ray_tasks.needed([RunConfig(tp=8)], CARDS, "head:1")


def test_a_half_measured_cell_is_not_finished_on_another_machine():
    made = plan()
    kept = Store(begin(made), None)
    kept.add(Turn(0, 0, 0, "decode", 2, 0.04, [0.02, 0.02]))
    with pytest.raises(UsageError, match="half measured on one machine.* without --ray"):
        ray_tasks.groups(kept.results, made)


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
    done = command("latency", "--ray", address, "--output", tmp_path / "out")
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
    """Three tasks on two nodes: a node is killed, a process ends at every attempt."""
    from tests.latency.ray_work import work

    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=2) for _ in range(2))}
    models = [str(tmp_path / name) for name in ("slow", "fast", "lost")]
    for model in models:
        (tmp_path / model).mkdir()
    made = plan(models=models, batch_sizes=[1, 2], runs=4)
    kept, said = Store(begin(made), tmp_path / "out"), []

    def kill():
        wait_for((tmp_path / "slow" / "journal").exists, 200)
        time.sleep(0.5)
        name = (tmp_path / "slow" / "journal").read_text().split()[0]
        cluster.remove_node(nodes[name], allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    ray_tasks.run(kept, made, cluster.address, said.append, work=work)
    killer.join()
    measured = tables(kept.results, made)
    assert measured.ended == "complete" and len(measured.tables) == 6
    tried = [
        [line.split() for line in (tmp_path / model / "journal").read_text().splitlines()]
        for model in models
    ]
    assert [len(lines) for lines in tried] == [2, 1, 2]
    assert {threads for lines in tried for _, threads in lines} == {"2"}
    assert tried[0][0][0] != tried[0][1][0]  # the other node took it
    for table in measured.tables:
        assert [cell.batch_size for cell in table.cells] == [1, 2]
        if table.checkpoint == models[2]:
            reasons = {cell.reason for cell in table.cells}
            assert len(reasons) == 1 and "lost twice: the Ray worker was lost" in reasons.pop()
        else:
            assert all(len(cell.samples) == 4 and not cell.reason for cell in table.cells)
            last = tried[models.index(table.checkpoint)][-1][0]
            assert table.ran.machine.startswith(f"Ray node {last[:8]} ")
    assert len(said) == 4 and said[0] == "3 tasks on 3 Ray nodes"
