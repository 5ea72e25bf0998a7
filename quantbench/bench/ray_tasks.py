"""Cells of `latency` on a Ray cluster: each model and number of ranks is a task.

    run(store, plan, "head:6379", say, timeout=None)

A task asks for all the cores of a node, or for a GPU for each rank, so nothing measures beside it.
It measures all arms in turns, so that no comparison is of two machines, and returns the events of
its session. Where its node or its process is lost, it is tried once more; then its cells have the
reason. Ray is imported only here.
"""

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantbench.bench.cell_plan import CellPlan
from quantbench.bench.cells import Cells, begin, left
from quantbench.bench.process import environment
from quantbench.bench.store import Ended, Left, Results, Store, Turn, event_of
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.about import machine
from quantbench.log.config import RunConfig
from quantbench.text import counted
from quantbench.typed_json import from_json, to_json

CONNECT = 5.0  # seconds to reach the address
GPU, CPU = "GPU", "CPU"
Work = Callable[[str, float | None], str]


def measure(task: str, timeout: float | None) -> str:
    """The task that Ray runs on a node: measure some cells of a plan. Takes {"plan": …, "cells":
    numbers} as JSON, and returns the lines of its samples.jsonl."""
    asked = json.loads(task)
    plan = from_json(CellPlan, asked["plan"])
    kept = Store(begin(plan), None)
    for number, arm in enumerate(kept.results.arms):
        arm.failed = None if number in asked["cells"] else "another task has it"
    Cells(kept, plan, timeout, machine=f"{machine()}, {node()}").run()
    kept.file.seek(0)
    return kept.file.read()


def node() -> str:
    """A name for the node of the cluster on which this process runs."""
    import ray

    return f"Ray node {ray.get_runtime_context().get_node_id()[:8]} on {socket.gethostname()}"


def run(
    store: Store,
    plan: CellPlan,
    address: str,
    say: Callable[[str], None],
    timeout: float | None = None,
    work: Work = measure,
) -> None:
    """Measure what is left of the plan; `results.ended` says how it ended.

    work: what a task does. Raises UsageError where there is no Ray, or no node for a task;
    QuantbenchError where the package is missing.
    """
    ray, why, started = connect(address), "complete", time.monotonic()
    try:
        tasks = _started(ray, store, plan, address, timeout, work)
        count, waiting = counted(len(tasks), "task"), list(tasks)
        say(f"{count} on {counted(sum(node['Alive'] for node in ray.nodes()), 'Ray node')}")
        while waiting:
            (task,), waiting = ray.wait(waiting, num_returns=1)
            name, numbers = tasks[task]
            try:
                take(store, ray.get(task))
                where = store.results.arms[numbers[0]].machine or "no node"
            except ray.exceptions.RayTaskError as error:
                where = f"the Ray task failed: {str(error).strip().splitlines()[-1]}"
            except ray.exceptions.RayError as error:
                where = f"lost twice: the Ray worker was lost ({type(error).__name__})"
            for number in left(store.results, numbers):
                store.add(Left(number, where, failed=True))
            say(f"{len(tasks) - len(waiting)} of {count}: {name}, {where}")
    except KeyboardInterrupt:
        why = "interrupted"
    finally:
        ray.shutdown()  # which cancels the tasks that are left
    store.add(Ended(why, time.monotonic() - started))


def _started(
    ray: Any, store: Store, plan: CellPlan, address: str, timeout: float | None, work: Work
) -> dict[Any, tuple[str, list[int]]]:
    """The tasks, each with its name and cells."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    remote = ray.remote(max_retries=1)(work)  # where the node or the process of the task is lost
    waiting, tasks = groups(store.results, plan), {}
    runs = [[store.results.arms[n].config for n in each] for each in waiting.values()]
    needs = [needed(configs, nodes, address) for configs in runs]  # all, before any task starts
    for (group, numbers), need in zip(waiting.items(), needs, strict=True):
        variables = _variables()
        if GPU not in need:  # --threads goes before it
            variables["OMP_NUM_THREADS"] = str(int(need[CPU]) // group[1])
        options = {"num_cpus": need[CPU], "num_gpus": need.get(GPU, 0)}
        task = remote.options(**options, runtime_env={"env_vars": variables})
        given = json.dumps({"plan": to_json(plan), "cells": numbers})
        tasks[task.remote(given, timeout)] = (f"{group[0]}, {counted(group[1], 'rank')}", numbers)
    return tasks


def groups(results: Results, plan: CellPlan) -> dict[tuple[str, int], list[int]]:
    """The cells that are left of each model and number of ranks. Raises UsageError where one is
    half measured."""
    found: dict[tuple[str, int], list[int]] = {}
    for number in left(results):
        cell = plan.cells[number]
        found.setdefault((cell.model, cell.ranks), []).append(number)
        if results.arms[number].turns:
            raise UsageError(
                "--resume: a cell is half measured on one machine, and --ray would finish it "
                "on another: resume it there, without --ray"
            )
    return found


def take(store: Store, lines: str) -> None:
    """Add a task's events. Its cycles come after those that are there."""
    cycles = store.results.cycles
    for line in lines.splitlines():
        event = event_of(json.loads(line))
        if isinstance(event, Turn):
            event = dataclasses.replace(event, cycle=event.cycle + cycles)
        if not isinstance(event, Ended):
            store.add(event)


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


def needed(
    configs: Sequence[RunConfig], nodes: Sequence[Mapping[str, float]], address: str
) -> dict[str, float]:
    """The CPUs and GPUs that a task with these arms asks Ray for. nodes: each node's resources.

    On GPUs: one, and a core, for each rank. Else --threads for each rank, or if that is not given
    all cores of the smallest node that has one for each. Raises UsageError if no node has that.
    """
    ranks, devices = configs[0].tp, {config.device for config in configs}
    on_gpus = any(device.startswith("cuda") for device in devices)
    on_gpus |= "auto" in devices and any(node.get(GPU, 0) for node in nodes)
    kind = GPU if on_gpus else CPU
    counts = sorted(int(node.get(kind, 0)) for node in nodes)
    threads = [config.threads for config in configs]
    least = ranks * (max(own or 1 for own in threads) if kind == CPU else 1)
    fitting = [count for count in counts if count >= least]
    if not fitting:
        raise UsageError(
            f"--tp {ranks}: a task needs {counted(least, kind)} of one node, and the largest Ray "
            f"node at {address} has {max(counts, default=0)}"
        )
    if kind == GPU:
        return {GPU: ranks, CPU: ranks}
    return {CPU: least if all(threads) else fitting[0]}
