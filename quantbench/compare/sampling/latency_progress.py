"""What a sweep of latencies says while it runs: how many cells are done, and the time left.

    with LatencyProgress(plan, say) as progress:
        progress.begin([(load, length, size), …])   # the cells that are left
        progress.loading(load)
        progress.measuring(load, length, size, share=0.5)
        progress.done(load, length, size)

On a terminal a bar moves; elsewhere a line comes every few seconds. Both are drawn between runs, by
the process that waits for them: no thread takes time from what is measured.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from quantbench.cli import can_erase
from quantbench.compare.countdown import duration
from quantbench.compare.sampling.latency_plan import LatencyPlan, Load
from quantbench.text import counted

SECONDS_BETWEEN_LINES = 10.0  # where no bar can be drawn
SECONDS_BETWEEN_FRAMES = 0.2  # of the bar: to draw it more often would take time from the runs
STEP_TOKENS = 32  # a decoding step takes about as long as so many tokens of a prompt

Place = tuple[Load, int, int]  # a cell: sequence length, batch size
Key = tuple[tuple[str, str, int], int, int]


class LatencyProgress:
    """Counts and times the cells of one session, and shows how far the sweep has come."""

    def __init__(
        self,
        plan: LatencyPlan,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.say, self.clock = plan, say, clock
        self.left: dict[Key, float] = {}  # the share of each unfinished cell that is still to do
        self.total = 0
        self.spoken = clock() - SECONDS_BETWEEN_LINES
        self.cell_seconds = 0.0  # spent on cells so far, without loading
        self.work = 0.0  # done in these seconds, in units of `_work`
        self.load_seconds: list[float] = []
        self.loads_begun = 0
        self.what = ""
        self.at = clock()  # when the last step ended
        self.is_loading = False
        self.bar: Progress | None = None

    def __enter__(self) -> "LatencyProgress":
        if can_erase():
            columns = (
                TextColumn("{task.completed:.0f} of {task.total:.0f} cells"),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            console = Console(stderr=True)
            self.bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
            self.bar.start()
            self.task = self.bar.add_task("")
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            with contextlib.suppress(OSError):
                self.bar.stop()

    def begin(self, cells: Sequence[Place]) -> None:
        self.left = {(load.key, length, size): 1.0 for load, length, size in cells}
        self.total, self.at = len(cells), self.clock()

    def loading(self, load: Load) -> None:
        self._passed()
        self.is_loading, self.loads_begun = True, self.loads_begun + 1
        self.what = f"loading {name(load, self.plan)}"
        self._show(important=True)

    def measuring(self, load: Load, length: int, size: int, share: float = 0.0) -> None:
        """Say which cell is being measured. share: the part of its runs that is done, 0 to 1."""
        cell = (load.key, length, size)
        before = self.left.get(cell, 1 - share)
        self._passed((before - (1 - share)) * self._work(length, size))
        if cell in self.left:
            self.left[cell] = 1 - share
        what = f"prompts of {length}, batch size {size}"
        self.what = f"{name(load, self.plan)}: {what}"
        self._show()

    def done(self, load: Load, length: int, size: int, measured: bool = True) -> None:
        """Count a cell as finished. One that was given up (not `measured`) does not count for the
        estimate of the time that the others take."""
        share = self.left.pop((load.key, length, size), 0.0)
        self._passed(share * self._work(length, size) * measured)
        self._show()

    # ------------------------------------------------------------------------- time

    def seconds_left(self) -> float | None:
        """How long the rest will take, by the time that the runs so far took; None before there is
        any."""
        if not self.work or not self.cell_seconds:
            return None
        work = sum(share * self._work(n, size) for (_, n, size), share in self.left.items())
        loads = len({load for load, _, _ in self.left}) - 1  # one of them is loaded
        each = sum(self.load_seconds) / max(1, len(self.load_seconds))
        return work * self.cell_seconds / self.work + max(0, loads) * each

    def _work(self, length: int, size: int) -> float:
        """A cell's work in tokens of a prompt; a decoding step counts as STEP_TOKENS of them."""
        plan = self.plan
        steps = STEP_TOKENS * (plan.decode_length - 1)
        return (plan.warmups + plan.runs) * (size * length + steps)

    def _passed(self, work: float = 0.0) -> None:
        """Account for the time since the last call."""
        now = self.clock()
        if self.is_loading:
            self.load_seconds.append(now - self.at)
            self.is_loading = False
        else:
            self.cell_seconds += now - self.at
        self.work += work
        self.at = now

    def line(self) -> str:
        """Such as: 3 of 12 cells: int8wo: prompts of 100, batch size 4; about 2 min left"""
        done = self.total - len(self.left)
        left = self.seconds_left()
        time_left = "" if left is None else f"; about {duration(left)} left"
        return f"{done} of {counted(self.total, 'cell')}: {self.what}{time_left}"

    def _show(self, important: bool = False) -> None:
        now = self.clock()
        if self.bar:
            if important or now - self.spoken >= SECONDS_BETWEEN_FRAMES:
                self.spoken = now
                _, _, text = self.line().partition(": ")
                done = self.total - sum(self.left.values())
                self.bar.update(self.task, total=self.total, completed=done, description=text)
                self.bar.refresh()
        elif important or now - self.spoken >= SECONDS_BETWEEN_LINES:
            self.spoken = now
            self.say(self.line())


def name(load: Load, plan: LatencyPlan) -> str:
    """A name for a load: its arm, and its model and ranks where the plan has several of these."""
    parts = [load.model] if len(plan.models) > 1 else []
    parts.append(load.arm.name)
    if len(plan.ranks) > 1:
        parts.append(counted(load.ranks, "rank"))
    return ", ".join(parts)
