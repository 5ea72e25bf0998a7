"""A sweep of latencies: every cell of a plan that has no figures yet is measured.

    Sweep(results, keep, say, start).run()     # results.ended says how it ended

Each (model, arm, ranks) has a worker process, which loads the model once and measures its cells one
after the other, short prompts first. What goes wrong with a cell is that cell's reason; the others
go on, in a new process if the old one has ended.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from quantbench.bench import ranks
from quantbench.bench.process import Process, WorkerFailed
from quantbench.compare.figures.latency import Cell, LatencySample
from quantbench.compare.sampling.latency_answers import CellReady, Described, Runs
from quantbench.compare.sampling.latency_plan import Load
from quantbench.compare.sampling.latency_progress import LatencyProgress
from quantbench.compare.sampling.latency_results import Carried, LatencyResults, TableResult
from quantbench.run.energy import Energy, NotCounted, pooled

WORKER = "quantbench.compare.sampling.latency_worker"
CHUNK = 1.0  # seconds of runs between two messages of a worker, at least one run
GOES_ON = ("memory", "usage", "refused")  # kinds of failures after which a worker can go on
Left = list[tuple[int, int]]  # cells: sequence length, batch size


def start(number_of_ranks: int) -> Process:
    return Process(ranks.command(number_of_ranks, WORKER))


class Sweep:
    """One session of a sweep: from what `results` lacks to the end of the plan, or to Ctrl-C."""

    def __init__(
        self,
        results: LatencyResults,
        keep: Callable[[], None],
        say: Callable[[str], None],
        start: Callable[[int], Process] = start,
        timeout: float | None = None,
    ) -> None:
        """
        keep: called after every change of the results, to save them
        start: a function that starts a worker of so many ranks
        timeout: seconds after which a cell is given up; None: never
        """
        self.results, self.keep, self.say = results, keep, say
        self.start, self.timeout = start, timeout
        self.ended_at = 0.0  # time.perf_counter() when the last cell ended

    def run(self) -> None:
        """Measure until the plan is complete or Ctrl-C comes; `results.ended` says which."""
        results = self.results
        left = {load.key: results.left(load) for load in results.plan.loads}
        cells = [(load, *cell) for load in results.plan.loads for cell in left[load.key]]
        self.progress = LatencyProgress(results.plan, self.say, cells)
        results.ended = None
        try:
            with self.progress.ticking():
                for load in results.plan.loads:
                    self._measure(load, left[load.key])
            results.ended = "complete"
        except KeyboardInterrupt:
            results.ended = "interrupted"

    def _measure(self, load: Load, left: Left) -> None:
        while left:
            worker = self.start(load.ranks)
            try:
                left = self._session(worker, load, left)
            finally:
                worker.close()

    def _session(self, worker: Process, load: Load, left: Left) -> Left:
        """Measure with this worker; the cells that are left when it cannot go on."""
        self.progress.loading(load)
        try:
            left, carried = self._load(worker, load, left)
        except WorkerFailed as error:
            for cell in left:
                self._give_up(load, *cell, str(error))
            return []
        self.ended_at = time.perf_counter()
        for number, (length, size) in enumerate(left):
            table = self.results.begin(load, length)
            if table.carried is None or not table.cells:
                table.carried = carried
            try:
                self._cell(worker, load, table, size)
            except WorkerFailed as error:
                self._give_up(load, length, size, str(error))
                if error.kind not in GOES_ON or load.ranks > 1:  # ranks end for any failure
                    return left[number + 1 :]
        return []

    def _load(self, worker: Process, load: Load, left: Left) -> tuple[Left, Carried | None]:
        """Load the model, unless no cell can be measured; the cells that can be."""
        argv = [*load.arm.argv, "--checkpoint_path", load.model]
        described = worker.answer(
            Described,
            "describe",
            argv=argv,
            cells=left,
            decode_length=self.results.plan.decode_length,
        )
        for length, _ in left:
            self.results.begin(load, length).model = described.model
        for refusal in described.refusals:
            self._give_up(load, refusal.sequence_length, refusal.batch_size, refusal.reason)
        refused = {(r.sequence_length, r.batch_size) for r in described.refusals}
        left = [cell for cell in left if cell not in refused]
        return left, worker.answer(Carried, "load") if left else None

    def _give_up(self, load: Load, length: int, size: int, reason: str) -> None:
        """Give a cell the reason why it has no figures; samples from before the failure stay."""
        table = self.results.begin(load, length)
        samples = next((cell.samples for cell in table.cells if cell.batch_size == size), [])
        self.results.put(load, length, Cell(size, samples, reason))
        self.progress.finish(length, size, measured=False)
        self.keep()

    # ------------------------------------------------------------------------- a cell

    def _cell(self, worker: Process, load: Load, table: TableResult, size: int) -> None:
        """Measure one cell: warm-ups, then runs. Raises WorkerFailed."""
        plan, length = self.results.plan, table.sequence_length
        samples: list[LatencySample] = []
        counted: list[Energy | NotCounted] = []
        seconds = compiling = 0.0
        try:
            with self._deadline(worker):
                self.progress.measuring(load, length, size)
                given = {"sequence_length": length, "batch_size": size}
                ready = worker.answer(CellReady, "cell", **given)
                compiling = ready.compile_seconds
                table.carried = _described(table, size, ready)
                cell = Cell(size, samples, estimate=ready.estimate)
                for some in self._runs(worker, plan.warmups):
                    seconds += _seconds(some.samples)
                for some in self._runs(worker, plan.runs, counted):
                    seconds += _seconds(some.samples)
                    samples += some.samples
                    cell = _with_energy(cell, counted, plan.decode_length)
                    self.results.put(load, length, cell)
                    self.progress.measuring(load, length, size, len(samples) / plan.runs)
                    self.keep()
        finally:
            now = time.perf_counter()
            table.spent.add(now - self.ended_at, seconds, compiling)
            self.ended_at = now
        self.progress.finish(length, size)

    def _runs(
        self, worker: Process, count: int, energies: list[Energy | NotCounted] | None = None
    ) -> Iterator[Runs]:
        """energies: where the runs' energy is to be counted, which is added to it. What cannot be
        counted once takes long to find out, and is not tried again."""
        while count > 0:
            metered = energies is not None and not any(isinstance(e, NotCounted) for e in energies)
            given = {"count": count, "seconds": CHUNK, "metered": metered}
            some = worker.answer(Runs, "runs", **given)
            if energies is not None and some.energy is not None:
                energies.append(some.energy)
            yield some
            count -= len(some.samples)

    @contextlib.contextmanager
    def _deadline(self, worker: Process) -> Iterator[None]:
        """End the worker when the cell takes longer than the timeout."""
        expired = threading.Event()

        def end() -> None:
            expired.set()
            worker.kill()

        timer = threading.Timer(self.timeout or math.inf, end)
        if self.timeout:
            timer.start()
        try:
            yield
        except WorkerFailed:
            if not expired.is_set():
                raise
            reason = f"timed out: it takes longer than --timeout {self.timeout:g} s"
            raise WorkerFailed(reason) from None
        finally:
            timer.cancel()


def _with_energy(cell: Cell, energies: Sequence[Energy | NotCounted], decode_length: int) -> Cell:
    """The cell with the energy of its runs so far, if all of them could be counted."""
    if not energies:
        return cell
    counted = [one for one in energies if isinstance(one, Energy)]
    if len(counted) < len(energies):
        return dataclasses.replace(cell, joules_per_token=None, energy=energies[-1])
    every = pooled(counted)
    each = every.joules / (cell.batch_size * decode_length)
    return dataclasses.replace(cell, joules_per_token=each, energy=every)


def _seconds(samples: Sequence[LatencySample]) -> float:
    return math.fsum(sample.prefill_seconds + sample.decode_seconds for sample in samples)


def _described(table: TableResult, size: int, ready: CellReady) -> Carried:
    """How the table's model ran, this cell's decoder and compilation included."""
    carried = table.carried
    assert carried is not None
    decoder, compiled = carried.decoder, list(carried.compiled)
    decoder = _with(decoder, ready.decoder, size)
    if ready.compile_seconds:
        if ready.compiled or not compiled:
            compiled.append(f"for batch size {size}")
        else:
            compiled[-1] = f"{compiled[-1]}, {size}".replace("size ", "sizes ")
    return dataclasses.replace(carried, decoder=decoder, compiled=compiled)


def _with(known: str | None, decoder: str, size: int) -> str:
    """The decoders so far and this cell's, where it is another: "cpu-step; modules at batch size
    32"."""
    last = (known or "").rpartition("; ")[2].partition(" ")[0]
    if known is None or last == decoder:
        return known or decoder
    return f"{known}; {decoder} at batch size {size}"
