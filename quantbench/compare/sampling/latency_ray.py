"""A sweep of latencies on a Ray cluster: each (model, arm, ranks) is a task.

    run(results, "head:6379", keep, say, timeout=None)

A task asks for all the cores of a node, or for a GPU for each rank, so nothing measures beside it.
It measures all of its tables itself, so that no table is of two machines. Where its node or its
process is lost, it is tried once more; then its cells have the reason. Ray is imported only here.
"""

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantbench.bench.process import environment
from quantbench.compare.figures.latency import Cell
from quantbench.compare.progress import duration
from quantbench.compare.sampling.latency_plan import LatencyPlan, Load
from quantbench.compare.sampling.latency_progress import name
from quantbench.compare.sampling.latency_results import Carried, LatencyResults, TableResult
from quantbench.compare.sampling.latency_sweep import Sweep
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.about import machine
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.text import counted
from quantbench.typed_json import from_json, to_json

ATTEMPTS = 2
CONNECT = 5.0  # seconds to reach the address
GPU, CPU = "GPU", "CPU"
Work = Callable[[str, float | None], str]


def measure(plan: str, timeout: float | None) -> str:
    """The task that Ray runs on a node: measure a plan of one load. Takes the plan as JSON, and
    returns the tables as JSON."""
    results = LatencyResults(from_json(LatencyPlan, json.loads(plan)))
    (load,) = results.plan.loads
    Sweep(results, lambda: None, lambda line: None, timeout=timeout).run()
    here = f"{machine()}, {node()}"
    config = parse(load.arm.argv)
    for table in results.tables:
        # A table whose model could not be loaded names the node on which that failed.
        carried = table.carried or Carried(here, config.device, f"torch.{config.precision}")
        table.carried = dataclasses.replace(carried, machine=here)
    return json.dumps(to_json(results.tables))


def node() -> str:
    """A name for the node of the cluster on which this process runs."""
    import ray

    return f"Ray node {ray.get_runtime_context().get_node_id()[:8]} on {socket.gethostname()}"


def run(
    results: LatencyResults,
    address: str,
    keep: Callable[[], None],
    say: Callable[[str], None],
    timeout: float | None = None,
    work: Work = measure,
) -> None:
    """Measure what is left of the plan; `results.ended` says how it ended.

    keep: called when a task has ended. work: what a task does. Raises UsageError where there is no
    Ray, or no node for a task; QuantbenchError where the package is missing.
    """
    ray = connect(address)
    try:
        _Tasks(ray, results, address, keep, say, timeout, work).run()
        results.ended = "complete"
    except KeyboardInterrupt:
        results.ended = "interrupted"
    finally:
        ray.shutdown()


def connect(address: str) -> Any:
    """The module ray, connected. Raises UsageError, one line, where no Ray is."""
    try:
        import ray
    except ImportError:
        raise QuantbenchError(
            "--ray needs the package ray, which is not installed: pip install '.[ray]'"
        ) from None
    missing = (
        f"--ray {address}: there is no Ray; `ray start --head` starts one and says its address"
    )
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"--ray takes HOST:PORT, ray://HOST:PORT or auto; given: {address!r}")
        try:
            socket.create_connection((host, int(port)), CONNECT).close()
        except OSError as error:
            raise UsageError(f"{missing} ({error.strerror or error})") from None
    try:
        ray.init(
            address=address,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": _variables()},
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"{missing} ({why})") from None
    return ray


def _variables() -> dict[str, str]:
    """The environment variables by which a task finds our code, where that is a checkout."""
    own = environment()
    return {name: own[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH") if name in own}


class _Tasks:
    """The Ray tasks of one session: submitted, waited for, and submitted once more if lost."""

    def __init__(
        self,
        ray: Any,
        results: LatencyResults,
        address: str,
        keep: Callable[[], None],
        say: Callable[[str], None],
        timeout: float | None,
        work: Work,
    ) -> None:
        self.ray, self.results, self.address = ray, results, address
        self.keep, self.say, self.timeout = keep, say, timeout
        self.remote = ray.remote(max_retries=0)(work)
        self.pending: dict[Any, tuple[Load, int]] = {}  # the task, and which attempt it is

    def run(self) -> None:
        loads = [load for load in self.results.plan.loads if self.results.left(load)]
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        needs = {load.key: needed(load, nodes, self.address) for load in loads}
        started = time.monotonic()
        for load in loads:
            self._submit(load, needs[load.key], 1)
        self.say(f"{counted(len(loads), 'task')} on {counted(len(nodes), 'Ray node')}")
        ended = 0
        try:
            while self.pending:
                (task,), _ = self.ray.wait(list(self.pending), num_returns=1)
                load, attempt = self.pending.pop(task)
                said = name(load, self.results.plan)
                try:
                    tables = self._result(task)
                except Lost as error:
                    if attempt < ATTEMPTS:
                        self.say(f"{said}: {error}; it is tried once more")
                        self._submit(load, needs[load.key], attempt + 1)
                        continue
                    tables = self._given_up(load, f"lost {attempt} times: {error}")
                except TaskFailed as error:
                    tables = self._given_up(load, str(error))
                self.results.replace(tables)
                self.keep()
                ended += 1
                left = (time.monotonic() - started) / ended * (len(loads) - ended)
                where = tables[0].carried.machine if tables[0].carried else "no node"
                time_left = f"; about {duration(left)} left" if ended < len(loads) else ""
                done = f"{ended} of {counted(len(loads), 'task')}"
                self.say(f"{done}: {said}, {where}{time_left}")
        finally:
            for task in self.pending:
                self.ray.cancel(task, force=True)

    def _submit(self, load: Load, need: Mapping[str, float], attempt: int) -> None:
        """Submit a task for a load. It measures every sequence length that has a cell left, and all
        cells of these lengths, so that one table is of one machine."""
        lengths = list(dict.fromkeys(length for length, _ in self.results.left(load)))
        plan = dataclasses.replace(
            self.results.plan,
            models=[load.model],
            arms=[load.arm],
            ranks=[load.ranks],
            sequence_lengths=lengths,
        )
        variables = _variables()
        if GPU not in need and parse(load.arm.argv).threads is None:
            variables["OMP_NUM_THREADS"] = str(int(need[CPU]) // load.ranks)
        options = {"num_cpus": need[CPU], "num_gpus": need.get(GPU, 0)}
        task = self.remote.options(**options, runtime_env={"env_vars": variables})
        reference = task.remote(json.dumps(to_json(plan)), self.timeout)
        self.pending[reference] = (load, attempt)

    def _result(self, task: Any) -> list[TableResult]:
        """The tables that a task returned. Raises Lost if its node or process ended, TaskFailed if
        it raised an error."""
        exceptions = self.ray.exceptions
        try:
            return from_json(list[TableResult], json.loads(self.ray.get(task)))
        except exceptions.RayTaskError as error:
            lines = str(error).strip().splitlines()
            raise TaskFailed(f"the Ray task failed: {lines[-1] if lines else error}") from None
        except exceptions.RayError as error:
            kind = type(error).__name__
            raise Lost(f"the Ray worker was lost ({kind})") from None

    def _given_up(self, load: Load, reason: str) -> list[TableResult]:
        lengths = dict.fromkeys(length for length, _ in self.results.left(load))
        sizes = self.results.plan.batch_sizes
        return [
            TableResult(*load.key, length, cells=[Cell(size, [], reason) for size in sizes])
            for length in lengths
        ]


class Lost(Exception):
    """The node or the process of a task ended before the task did; another attempt may succeed."""


class TaskFailed(Exception):
    """A task raised an error, which another attempt would raise again."""


def needed(load: Load, nodes: Sequence[Mapping[str, float]], address: str) -> dict[str, float]:
    """The CPUs and GPUs that a load's task asks Ray for. nodes: the resources of each node.

    On GPUs: one, and a core, for each rank. Else --threads for each rank, or if that is not given
    all cores of the smallest node that has one for each. Raises UsageError if no node has that.
    """
    config = parse(load.arm.argv)
    kind = GPU if _on_gpus(config, nodes) else CPU
    counts = sorted(int(node.get(kind, 0)) for node in nodes)
    least = load.ranks * (config.threads or 1 if kind == CPU else 1)
    fitting = [count for count in counts if count >= least]
    if not fitting:
        raise UsageError(
            f"--tp {load.ranks}: a task needs {counted(least, kind)} of one node, and the largest "
            f"Ray node at {address} has {max(counts, default=0)}"
        )
    if kind == GPU:
        return {GPU: load.ranks, CPU: load.ranks}
    return {CPU: least if config.threads else fitting[0]}


def _on_gpus(config: RunConfig, nodes: Sequence[Mapping[str, float]]) -> bool:
    if config.device != "auto":
        return config.device.startswith("cuda")
    return any(node.get(GPU, 0) for node in nodes)
