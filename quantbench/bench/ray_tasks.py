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
from quantbench.bench.cells import Cells, begin, is_left
from quantbench.bench.process import environment
from quantbench.bench.progress import duration
from quantbench.bench.store import EVENTS, KEYS, Ended, Left, Ready, Repeated, Store, Turn
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.about import machine
from quantbench.log.config import RunConfig
from quantbench.text import counted
from quantbench.typed_json import from_json, to_json

ATTEMPTS = 2
CONNECT = 5.0  # seconds to reach the address
GPU, CPU = "GPU", "CPU"
Work = Callable[[str, float | None], str]


class Recorder(Store):
    """A store that keeps every event for who asked, in the place of a folder."""

    def __init__(self, plan: CellPlan) -> None:
        super().__init__(begin(plan), None)
        self.events: list[object] = []

    def add(self, event: object) -> None:
        super().add(event)
        self.events.append(event)


def measure(task: str, timeout: float | None) -> str:
    """The task that Ray runs on a node: measure some cells of a plan. Takes {"plan": …, "cells":
    numbers} as JSON, and returns the events as JSON."""
    asked = json.loads(task)
    plan = from_json(CellPlan, asked["plan"])
    kept, here = Recorder(plan), f"{machine()}, {node()}"
    Cells(kept, plan, asked["cells"], timeout, machine=here).run()
    return json.dumps([{KEYS[type(event)]: to_json(event)} for event in kept.events])


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
        _Tasks(ray, store, plan, address, say, timeout, work).run()
    except KeyboardInterrupt:
        why = "interrupted"
    finally:
        ray.shutdown()
    store.add(Ended(why, time.monotonic() - started))


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


Group = tuple[str, int]  # a model, and a number of ranks


class _Tasks:
    """The Ray tasks of one session: submitted, waited for, and submitted once more if lost."""

    def __init__(
        self,
        ray: Any,
        store: Store,
        plan: CellPlan,
        address: str,
        say: Callable[[str], None],
        timeout: float | None,
        work: Work,
    ) -> None:
        self.ray, self.store, self.plan, self.address = ray, store, plan, address
        self.say, self.timeout = say, timeout
        self.remote = ray.remote(max_retries=0)(work)
        self.pending: dict[Any, tuple[Group, int]] = {}  # the task, and which attempt it is
        self.cells: dict[Group, list[int]] = {}
        for number, cell in enumerate(plan.cells):
            if not is_left(store.results, plan, number):
                continue
            if store.results.arms[number].turns:
                raise UsageError(
                    "--resume: a cell is half measured on one machine, and --ray would finish it "
                    "on another: resume it there, without --ray"
                )
            place = cell.place
            self.cells.setdefault((place.model, place.ranks), []).append(number)

    def run(self) -> None:
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        needs = {group: self._needed(group, nodes) for group in self.cells}
        started = time.monotonic()
        for group in self.cells:
            self._submit(group, needs[group], 1)
        self.say(f"{counted(len(needs), 'task')} on {counted(len(nodes), 'Ray node')}")
        ended = 0
        try:
            while self.pending:
                (task,), _ = self.ray.wait(list(self.pending), num_returns=1)
                group, attempt = self.pending.pop(task)
                name = f"{group[0]}, {counted(group[1], 'rank')}"
                try:
                    self._take(self._result(task))
                except Lost as error:
                    if attempt < ATTEMPTS:
                        self.say(f"{name}: {error}; it is tried once more")
                        self._submit(group, needs[group], attempt + 1)
                        continue
                    self._give_up(group, f"lost {attempt} times: {error}")
                except TaskFailed as error:
                    self._give_up(group, str(error))
                ended += 1
                left = (time.monotonic() - started) / ended * (len(needs) - ended)
                where = self.store.results.arms[self.cells[group][0]].machine or "no node"
                time_left = f"; about {duration(left)} left" if ended < len(needs) else ""
                done = f"{ended} of {counted(len(needs), 'task')}"
                self.say(f"{done}: {name}, {where}{time_left}")
        finally:
            for task in self.pending:
                self.ray.cancel(task, force=True)

    def _submit(self, group: Group, need: Mapping[str, float], attempt: int) -> None:
        variables = _variables()
        configs = self._configs(group)
        if GPU not in need and all(config.threads is None for config in configs):
            variables["OMP_NUM_THREADS"] = str(int(need[CPU]) // group[1])
        options = {"num_cpus": need[CPU], "num_gpus": need.get(GPU, 0)}
        task = self.remote.options(**options, runtime_env={"env_vars": variables})
        given = json.dumps({"plan": to_json(self.plan), "cells": self.cells[group]})
        self.pending[task.remote(given, self.timeout)] = (group, attempt)

    def _configs(self, group: Group) -> list[RunConfig]:
        return [self.plan.cells[n].config(self.plan.decode_length) for n in self.cells[group]]

    def _needed(self, group: Group, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
        every = [needed(group[1], c, nodes, self.address) for c in self._configs(group)]
        return {kind: max(one.get(kind, 0) for one in every) for kind in every[0]}

    def _result(self, task: Any) -> list[object]:
        """The events that a task returned. Raises Lost if its node or process ended, TaskFailed if
        it raised an error."""
        exceptions = self.ray.exceptions
        try:
            lines = json.loads(self.ray.get(task))
            return [from_json(EVENTS[key], value) for line in lines for key, value in line.items()]
        except exceptions.RayTaskError as error:
            lines = str(error).strip().splitlines()
            raise TaskFailed(f"the Ray task failed: {lines[-1] if lines else error}") from None
        except exceptions.RayError as error:
            kind = type(error).__name__
            raise Lost(f"the Ray worker was lost ({kind})") from None

    def _take(self, events: Sequence[object]) -> None:
        """Add a task's events. Its cycles and processes come after those that are there."""
        cycles = self.store.results.cycles
        processes = [arm.processes for arm in self.store.results.arms]
        for event in events:
            match event:
                case Turn() | Repeated():
                    event = dataclasses.replace(event, cycle=event.cycle + cycles)
            match event:
                case Turn() | Ready():
                    process = event.process + processes[event.arm]
                    event = dataclasses.replace(event, process=process)
                case Ended():
                    continue
            self.store.add(event)

    def _give_up(self, group: Group, reason: str) -> None:
        for number in self.cells[group]:
            self.store.add(Left(number, reason, failed=True))


class Lost(Exception):
    """The node or the process of a task ended before the task did; another attempt may succeed."""


class TaskFailed(Exception):
    """A task raised an error, which another attempt would raise again."""


def needed(
    ranks: int, config: RunConfig, nodes: Sequence[Mapping[str, float]], address: str
) -> dict[str, float]:
    """The CPUs and GPUs that a task asks Ray for. nodes: the resources of each node.

    On GPUs: one, and a core, for each rank. Else --threads for each rank, or if that is not given
    all cores of the smallest node that has one for each. Raises UsageError if no node has that.
    """
    on_gpus = config.device.startswith("cuda")
    if config.device == "auto":
        on_gpus = any(node.get(GPU, 0) for node in nodes)
    kind = GPU if on_gpus else CPU
    counts = sorted(int(node.get(kind, 0)) for node in nodes)
    least = ranks * (config.threads or 1 if kind == CPU else 1)
    fitting = [count for count in counts if count >= least]
    if not fitting:
        raise UsageError(
            f"--tp {ranks}: a task needs {counted(least, kind)} of one node, and the largest Ray "
            f"node at {address} has {max(counts, default=0)}"
        )
    if kind == GPU:
        return {GPU: ranks, CPU: ranks}
    return {CPU: least if config.threads else fitting[0]}
