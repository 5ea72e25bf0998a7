"""How far `compare ab` can be trusted on this machine: real runs whose truth is known.

    python -m tests.compare.trust --list
    python -m tests.compare.trust --only "tiny" --minutes 15        # goes on where it was
    python -m tests.compare.trust                                    # every cell has its --runs

Each run is a comparison of arms that are the same but for a wait of a known share (slow_worker.py),
with fresh processes. Cells: {side by side, in turn} × {tiny, tiny compiled, tiny with 2 threads, a
shape of 0.25 B parameters, which fits into no cache, and TinyLlama's of 1.1 B} × {equal, 5 %, 30 %,
a heavy tail, 8 arms}. Time is shared equally among the cells asked for. Runs are kept in the file
and counted with their Clopper-Pearson bounds, by cell and over all of them. Thousands of runs are
trust_simulation.py's.
The command exits with 1 where a requirement is missed; on a machine that does other work, too, its
figures say little.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from quantbench.compare.figures.families import FALSE_VERDICTS, Interval
from quantbench.compare.figures.plan import shown
from quantbench.compare.sampling.comparison import Comparison
from quantbench.compare.sampling.process import COMMAND
from quantbench.compare.sampling.results import ArmResult, Results, Settings
from quantbench.log.about import About, about
from quantbench.log.config import RunConfig, argv
from quantbench.typed_json import from_json, to_json
from tests.compare.trust_simulation import COVERAGE, POWER, bounds

SLOW = (sys.executable, str(Path(__file__).parent / "slow_worker.py"))
LATE = 0.09  # of the steps of an arm with a heavy tail
TAIL = 0.18  # by which they make its mean longer; the baseline's steps all are by as much

SHORT = RunConfig(device="cpu", max_new_tokens=24, threads=1)
CONFIGS = {
    "tiny": SHORT,
    "0.25 B": dataclasses.replace(
        SHORT, checkpoint_path="dummy:Llama-3.2-1B", num_layers=4, quantization="int8wo"
    ),
    "tiny, 2 threads": dataclasses.replace(SHORT, threads=2),
    "tiny, compiled": dataclasses.replace(SHORT, compile=True),
    "TinyLlama": RunConfig(
        device="cpu",
        max_new_tokens=24,
        checkpoint_path="dummy:TinyLlama-1.1B-Chat-v1.0",
        quantization="int8wo",
    ),
}


@dataclass(frozen=True)
class Question:
    """The shares by which each arm's steps take longer, the baseline first; `late`: of which arms
    the share is that of a few late steps."""

    name: str
    shares: tuple[float, ...]
    late: tuple[int, ...] = ()


QUESTIONS = (
    Question("equal", (0.0, 0.0)),
    Question("5 %", (0.0, 0.05)),
    Question("30 %", (0.0, 0.30)),
    Question("heavy tail, equal means", (TAIL, TAIL), late=(1,)),
    Question("8 arms, one by 5 %", (0.0,) * 7 + (0.05,)),
)


@dataclass(frozen=True)
class Cell:
    """A condition."""

    mode: str
    model: str  # of CONFIGS
    question: Question

    @property
    def name(self) -> str:
        return f"{self.question.name}, {self.model}, {self.mode}"


CELLS = [
    Cell(mode, model, question)
    for model in CONFIGS
    for question in QUESTIONS
    for mode in ("side by side", "in turn")
]


@dataclass
class Run:
    """One comparison: what was so, and what it said."""

    cell: str
    seconds: float
    blocks: int
    ended: str | None
    truths: list[float]  # each candidate's seconds ÷ the baseline's
    intervals: list[Interval]  # of the candidates that did not fail
    failed: list[str]

    @property
    def false_verdict(self) -> bool:
        """Whether any arm is declared different where it is not, or in the wrong direction."""
        return any(
            interval.verdict not in (right(self.truths[interval.arm - 1]), "no difference shown")
            for interval in self.intervals
        )

    @property
    def covered(self) -> list[bool]:
        return [
            interval.low <= self.truths[interval.arm - 1] <= interval.high
            for interval in self.intervals
            if interval.confidence is not None
        ]

    @property
    def found(self) -> list[bool]:
        """Whether the right verdict was given, for each arm that does differ from the baseline."""
        truths = [(self.truths[interval.arm - 1], interval) for interval in self.intervals]
        return [interval.verdict == right(truth) for truth, interval in truths if truth != 1]


@dataclass
class Document:
    """The file."""

    about: About | None
    commands: list[str]
    requirements_missed: list[str]
    cells: list[dict[str, object]]
    runs: list[Run]


def right(truth: float) -> str:
    return "no difference shown" if truth == 1 else ("faster" if truth < 1 else "slower")


def one_run(cell: Cell, seed: int, processes: int, minutes: float) -> Run:
    """One comparison of the cell's arms."""
    question, started = cell.question, time.monotonic()
    config = dataclasses.replace(CONFIGS[cell.model], write_result="none")
    arms = [ArmResult(f"arm {n}", "", argv(config)) for n in range(len(question.shares))]
    settings = Settings(
        tokens=0,
        order_seed=seed,
        in_turn=cell.mode == "in turn",
        processes=processes,
        max_minutes=minutes,
    )
    results = Results(settings, arms, "none", in_turn=settings.in_turn)

    def command(number: int) -> Sequence[str]:
        share = question.shares[number]
        late = (str(LATE),) * (number in question.late)
        return (*SLOW, str(share), *late) if share else COMMAND

    Comparison(results, None, lambda line: None, command).run()
    if results.ended == "interrupted":
        raise KeyboardInterrupt
    base = question.shares[0]
    return Run(
        cell=cell.name,
        seconds=round(time.monotonic() - started, 1),
        blocks=results.blocks,
        ended=results.ended,
        truths=[(1 + share) / (1 + base) for share in question.shares[1:]],
        intervals=list(shown(results.looks).values()),
        failed=[f"{arm.name}: {arm.failed}" for arm in arms if arm.failed],
    )


def summary(name: str, runs: Sequence[Run]) -> dict[str, object]:
    """Counts and bounds of some runs."""
    covered = [one for run in runs for one in run.covered]
    found = [one for run in runs for one in run.found]
    row: dict[str, object] = {
        "cell": name,
        "runs": len(runs),
        "blocks_mean": round(sum(run.blocks for run in runs) / len(runs), 1),
        "seconds_mean": round(sum(run.seconds for run in runs) / len(runs)),
        "false_verdicts": bounds(sum(run.false_verdict for run in runs), len(runs)),
    }
    if covered:
        row["coverage_shown"] = bounds(sum(covered), len(covered))
    if found:
        row["found"] = bounds(sum(found), len(found))
    return row


def failures(row: dict[str, object]) -> list[str]:
    """Requirements of which these runs show that they are missed: the whole of the Clopper-Pearson
    interval lies on the wrong side."""
    demanded = {
        "false_verdicts": lambda share: share["low"] <= FALSE_VERDICTS,
        "coverage_shown": lambda share: share["high"] >= COVERAGE,
        "found": lambda share: share["high"] >= POWER,
    }
    return [
        f"{row['cell']}: {key} {row[key]['count']} of {row[key]['of']}"
        for key, holds in demanded.items()
        if key in row and not holds(row[key])
    ]


def counted(runs: Sequence[Run], commands: list[str]) -> Document:
    """The file's contents."""
    by_cell = {cell.name: [run for run in runs if run.cell == cell.name] for cell in CELLS}
    rows = [summary(name, some) for name, some in by_cell.items() if some]
    rows += [summary("all cells", runs)] if runs else []
    missed = [line for row in rows for line in failures(row)]
    return Document(about(), commands, missed, rows, list(runs))


def read(path: Path) -> Document:
    if not path.exists():
        return counted([], [])
    return from_json(Document, json.loads(path.read_text()))


def joined(documents: Sequence[Document]) -> Document:
    """The runs of all of them, about the first that has any."""
    measured = [document for document in documents if document.runs]
    commands = [command for document in measured for command in document.commands]
    runs = [run for document in measured for run in document.runs]
    return dataclasses.replace(counted(runs, commands), about=measured[0].about)


def save(document: Document, path: Path) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(to_json(document), indent=1) + "\n")
    scratch.replace(path)


def next_cell(cells: Sequence[Cell], runs: Sequence[Run], most: int) -> Cell | None:
    """The cell to run next: among those with fewer than `most` runs, the one that has had the least
    time; None when all have enough."""
    spent = {cell.name: [run.seconds for run in runs if run.cell == cell.name] for cell in cells}
    open_cells = [cell for cell in cells if len(spent[cell.name]) < most]
    return min(open_cells, key=lambda cell: sum(spent[cell.name]), default=None)


@click.command()
@click.option("--only", multiple=True, help="Cells whose name has all of these words in it.")
@click.option("--skip", multiple=True, help="Leave out cells whose name has one of these words.")
@click.option("--runs", default=40, show_default=True, help="Of each cell.")
@click.option("--minutes", default=math.inf, help="Begin no run after so many; go on later.")
@click.option("--processes", default=40, show_default=True, help="Of each arm, at most.")
@click.option("--run_minutes", default=2.0, show_default=True, help="--max_minutes of each run.")
@click.option("--file", "path", default="docs/data/trust_real.json", show_default=True)
@click.option("--join", multiple=True, help="Only add the runs of such a FILE.")
@click.option("--list", "listing", is_flag=True, help="Name the cells and what they have.")
def main(
    only: tuple[str, ...],
    skip: tuple[str, ...],
    runs: int,
    minutes: float,
    processes: int,
    run_minutes: float,
    path: str,
    join: tuple[str, ...],
    listing: bool,
) -> None:
    """See above."""
    file, started = Path(path), time.monotonic()
    cells = [cell for cell in CELLS if all(word in cell.name for word in only)]
    cells = [cell for cell in cells if not any(word in cell.name for word in skip)]
    document = read(file)
    if listing:
        for cell in cells:
            click.echo(f"{cell.name}: {sum(run.cell == cell.name for run in document.runs)} runs")
        return
    if join:
        save(joined([document, *map(read, map(Path, join))]), file)
        return
    document.commands.append(about().command)
    while (cell := next_cell(cells, document.runs, runs)) is not None:
        if time.monotonic() > started + 60 * minutes:
            break
        run = one_run(cell, len(document.runs), processes, run_minutes)
        document = counted([*document.runs, run], document.commands)
        save(document, file)
        said = ", ".join(f"{one.verdict} {one.ratio:.3f}" for one in run.intervals)
        click.echo(f"{run.cell}: {said}; {run.blocks} blocks, {run.seconds:.0f} s")
    for row in document.cells:
        click.echo(json.dumps(row))
    sys.exit("\n".join(document.requirements_missed) if document.requirements_missed else 0)


if __name__ == "__main__":
    main()
