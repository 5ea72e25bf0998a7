"""How many cells of a sweep of latencies are done, and the time left."""

from collections.abc import Callable, Sequence

from quantbench.compare.progress import Progress
from quantbench.compare.sampling.latency_plan import LatencyPlan, Load
from quantbench.text import counted

STEP_TOKENS = 32  # a decoding step takes about as long as this many tokens of a prompt


class LatencyProgress(Progress):
    """Counts the cells of one session; work is in tokens of a prompt."""

    def __init__(
        self, plan: LatencyPlan, say: Callable[[str], None], cells: Sequence[tuple[Load, int, int]]
    ) -> None:
        """cells: the (load, sequence length, batch size) that are to be measured."""
        self.plan, self.cells, self.finished = plan, len(cells), 0
        self.part = 0.0  # of the current cell that is in `done`
        super().__init__(say, sum(self._work(length, size) for _, length, size in cells))

    def loading(self, load: Load) -> None:
        self._at(f"loading {name(load, self.plan)}", now=True)

    def measuring(self, load: Load, length: int, size: int, share: float = 0.0) -> None:
        """share: the part of the cell's runs that is done, 0 to 1."""
        part = share * self._work(length, size)
        self.done, self.part = self.done + part - self.part, part
        self._at(f"{name(load, self.plan)}: prompts of {length}, batch size {size}")

    def finish(self, length: int, size: int, measured: bool = True) -> None:
        """Count a cell as finished. One that was given up (not `measured`) took no time."""
        work = self._work(length, size)
        if measured:
            self.done += work - self.part
        else:
            self.done -= self.part
            self.total -= work
        self.part, self.finished = 0.0, self.finished + 1
        self._at(self.what)

    def _at(self, what: str, now: bool = False) -> None:
        self.where = f"{self.finished} of {counted(self.cells, 'cell')}"
        self.at(what, now)

    def _work(self, length: int, size: int) -> float:
        plan = self.plan
        steps = STEP_TOKENS * (plan.decode_length - 1)
        return (plan.warmups + plan.runs) * (size * length + steps)


def name(load: Load, plan: LatencyPlan) -> str:
    """A name for a load: its arm, and its model and ranks where the plan has several of these."""
    parts = [load.model] if len(plan.models) > 1 else []
    parts.append(load.arm.name)
    if len(plan.ranks) > 1:
        parts.append(counted(load.ranks, "rank"))
    return ", ".join(parts)
