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

from quantbench.bench.process import environment
from quantbench.bench.store import Ended, Left, Results, Store, Turn, event_of
from quantbench.errors import QuantbenchError, UsageError
from quantbench.latency.cell_plan import CellPlan
from quantbench.latency.cells import Cells, begin, left
from quantbench.log.config import RunConfig
from quantbench.log.origin import machine
from quantbench.text import counted
from quantbench.typed_json import from_json, to_json

GPU, CPU = "GPU", "CPU"
Work = Callable[[str, float | None], str]
CODE = ("PYTHONPATH", "PYTHONSAFEPATH")  # variables by which a task finds a checkout


def measure(task: str, timeout: float | None) -> str:
    """The task that Ray runs on a node: measure some cells of a plan. Takes {"plan": …, "cells":
    numbers} as JSON, and returns the lines of its samples.jsonl."""
    import ray

    asked = json.loads(task)
    plan, node = from_json(CellPlan, asked["plan"]), ray.get_runtime_context().get_node_id()[:8]
    kept = Store(begin(plan), None)
    for number, arm in enumerate(kept.results.arms):
        arm.failed = None if number in asked["cells"] else "another task has it"
    where = f"{machine()}, Ray node {node} on {socket.gethostname()}"
    Cells(kept, plan, timeout, machine=where).run()
    kept.file.seek(0)
    return kept.file.read()


def run(
    store: Store, plan: CellPlan, address: str, say: Callable[[str], None],
    timeout: float | None = None, work: Work = measure,
) -> None:  # fmt: skip
    """Measure what is left of the plan; `results.ended` says how it ended. work: what a task does.
    Raises UsageError where there is no Ray or no node for a task, QuantbenchError without Ray."""
    ray, why, started = connect(address), "complete", time.monotonic()
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        remote, tasks, own = ray.remote(max_retries=1)(work), {}, environment()
        waiting = groups(store.results, plan)
        runs = [[store.results.arms[n].config for n in each] for each in waiting.values()]
        needs = [needed(configs, nodes, address) for configs in runs]  # before any task starts
        for ((model, ranks), numbers), need in zip(waiting.items(), needs, strict=True):
            variables = {name: own[name] for name in CODE if name in own}
            if GPU not in need:  # --threads goes before it
                variables["OMP_NUM_THREADS"] = str(int(need[CPU]) // ranks)
            options = {"num_cpus": need[CPU], "num_gpus": need.get(GPU, 0)}
            task = remote.options(**options, runtime_env={"env_vars": variables})
            given = json.dumps({"plan": to_json(plan), "cells": numbers})
            tasks[task.remote(given, timeout)] = f"{model}, {counted(ranks, 'rank')}", numbers
        count, pending = counted(len(tasks), "task"), list(tasks)
        say(f"{count} on {counted(len(nodes), 'Ray node')}")
        while pending:
            (task,), pending = ray.wait(pending, num_returns=1)
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
            say(f"{len(tasks) - len(pending)} of {count}: {name}, {where}")
    except KeyboardInterrupt:
        why = "interrupted"
    finally:
        ray.shutdown()  # which cancels the tasks that are left
    store.add(Ended(why, time.monotonic() - started))


def groups(results: Results, plan: CellPlan) -> dict[tuple[str, int], list[int]]:
    """The cells that are left of each model and number of ranks."""
    found: dict[tuple[str, int], list[int]] = {}
    for number in left(results):
        found.setdefault((plan.cells[number].model, plan.cells[number].ranks), []).append(number)
        if results.arms[number].turns:
            raise UsageError("--resume: a cell is half measured on one machine, and --ray would "
                             "finish it on another: resume it there, without --ray")  # fmt: skip
    return found


def take(store: Store, lines: str) -> None:
    """Add a task's events. Its cycles come after those that are there."""
    cycles = store.results.cycles
    for event in map(event_of, map(json.loads, lines.splitlines())):
        if isinstance(event, Turn):
            event = dataclasses.replace(event, cycle=event.cycle + cycles)
        if not isinstance(event, Ended):
            store.add(event)


def connect(address: str) -> Any:
    """The module ray, connected. Raises UsageError, one line, where no Ray is."""
    try:
        import ray
    except ImportError:
        raise QuantbenchError("--ray needs the package ray: pip install '.[ray]'") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UsageError(f"--ray takes HOST:PORT, ray://HOST:PORT or auto; given: {address!r}")
    try:
        if address != "auto":  # ray.init would wait for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise UsageError(f"--ray {address}: there is no Ray; `ray start --head` starts one and "
                         f"says its address ({why})") from None  # fmt: skip
    return ray


def needed(
    configs: Sequence[RunConfig], nodes: Sequence[Mapping[str, float]], address: str
) -> dict[str, float]:
    """What a task with these arms asks of one of these nodes. On GPUs: one, and a core, for each
    rank. Else --threads for each rank, or all cores of the smallest node that has one for each."""
    ranks, threads = configs[0].tp, [config.threads for config in configs]
    cards = ("cuda", "auto") if any(node.get(GPU, 0) for node in nodes) else ("cuda",)
    kind = GPU if any(config.device.startswith(cards) for config in configs) else CPU
    least = ranks * (1 if kind == GPU else max(each or 1 for each in threads))
    counts = sorted(int(node.get(kind, 0)) for node in nodes)
    fitting = [count for count in counts if count >= least]
    if not fitting:
        raise UsageError(f"--tp {ranks}: a task needs {counted(least, kind)} of one node, and the "
                         f"largest Ray node at {address} has {max(counts, default=0)}")  # fmt: skip
    if kind == GPU:
        return {GPU: ranks, CPU: ranks}
    return {CPU: least if all(threads) else fitting[0]}
