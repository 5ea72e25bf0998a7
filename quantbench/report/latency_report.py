"""Latency results as files for people: Markdown, and CSV with every sample.

    (folder / "report.md").write_text(report(results))
    (folder / "samples.csv").write_text(samples(results))

Every table of a sweep is a section: the table of parameters, the latencies, the rates, and why a
cell is NaN.
"""

import csv
import io
from collections.abc import Sequence

from quantbench.compare.figures.latency import (
    CONFIDENCE,
    INTERPOLATION,
    LEAST_RUNS,
    Cell,
    estimate_rows,
    latency_rows,
    rate_rows,
)
from quantbench.compare.sampling.latency_plan import LatencyPlan
from quantbench.compare.sampling.latency_results import LatencyResults, TableResult
from quantbench.report.latency_tables import NO_INTERVAL, Pairs, pairs_text, rows_text
from quantbench.run import energy
from quantbench.run.energy import Energy, NotCounted
from quantbench.text import counted, one_line

NOT_REACHED = "not measured yet; --resume goes on"
NOTE = (
    f"Percentiles are of sorted samples, by {INTERPOLATION}. Intervals of the averages are "
    f"{100 * CONFIDENCE:.0f} % by Student's t on their logarithms, over runs of one process; "
    f"{NO_INTERVAL} with fewer than {LEAST_RUNS}. An average rate is all work ÷ all time. "
    "TTFT: time to first token; TPOT: time per output token, the mean of a run's steps; ITL: "
    "latency between two tokens."
)
FIELDS = ("model", "arm", "ranks", "sequence_length", "batch_size", "run", "step", "seconds")


def report(results: LatencyResults) -> str:
    """All tables that have a cell, as one Markdown text."""
    sections = [section(table, results.plan) for table in results.tables]
    return "\n".join(sections) if sections else "Nothing was measured.\n"


def section(table: TableResult, plan: LatencyPlan) -> str:
    """One model, arm, number of ranks and sequence length."""
    every = cells(table, plan)
    tables = [
        pairs_text(parameters(table, plan)),
        rows_text("latency", latency_rows(every)),
        rows_text("throughput", rate_rows(every, table.sequence_length)),
    ]
    heading = f"# {_plain(table.checkpoint)}, {_plain(table.arm)}, " + ", ".join(
        [counted(table.ranks, "rank"), f"prompts of {counted(table.sequence_length, 'token')}"]
    )
    missing = [
        f"- batch size {cell.batch_size}: {_plain(cell.reason)}" for cell in every if cell.reason
    ]
    short = [
        f"- batch size {cell.batch_size}: {len(cell.samples)} of {counted(plan.runs, 'run')}"
        for cell in every
        if not cell.reason and len(cell.samples) < plan.runs
    ]
    parts = [heading, *tables, NOTE, *_estimates(every)]
    if missing:
        parts += ["NaN is what could not be measured:", "\n".join(missing)]
    if short:
        parts += ["Of fewer runs than planned:", "\n".join(short)]
    return "\n\n".join(parts) + "\n"


def _estimates(every: Sequence[Cell]) -> list[str]:
    """The estimate made before the first run, the measurement, and energy."""
    parts = []
    if rows := estimate_rows(every):
        parts.append(
            "Estimated before the first run, by the speed of this machine then. Measured is the "
            "average above; the error is (estimated − measured) ÷ measured."
        )
        parts.append(rows_text("estimates", rows))
    if joules := [line for cell in every if (line := _joules(cell))]:
        parts += ["Energy, the prompt's included:", "\n".join(joules)]
    return parts


def _joules(cell: Cell) -> str:
    """A cell's energy, measured and estimated; "" where neither is known."""
    idle = cell.energy.idle_watts if isinstance(cell.energy, Energy) else None
    why_not = cell.energy.why_not if isinstance(cell.energy, NotCounted) else None
    estimated = (cell.estimate or {}).get("joules_per_token")
    said = energy.sentence(cell.joules_per_token, idle, why_not, estimated)
    return f"- batch size {cell.batch_size}: {said}" if said else ""


def cells(table: TableResult, plan: LatencyPlan) -> list[Cell]:
    """A cell for each batch size of the plan; those that are not there have a reason."""
    measured = {cell.batch_size: cell for cell in table.cells}
    every = [measured.get(size, Cell(size, [])) for size in plan.batch_sizes]
    return [
        cell if cell.reason or cell.samples else Cell(cell.batch_size, [], NOT_REACHED)
        for cell in every
    ]


def parameters(table: TableResult, plan: LatencyPlan) -> Pairs:
    """Rows of the table of parameters: what describes a run."""
    name = table.model.name if table.model else table.checkpoint
    rows = [
        ("Model", name),
        ("Sequence Length", str(table.sequence_length)),
        ("Decode Length", str(plan.decode_length)),
        ("N Runs", str(plan.runs)),
        ("Warmups", str(plan.warmups)),
        ("Sampling", "the likeliest token; end of text is ignored"),
        ("Arm", table.arm),
        ("Tensor Parallel", counted(table.ranks, "rank")),
    ]
    carried = table.carried
    if carried is not None:
        rows += [
            ("Precision", carried.precision),
            ("Kernel", carried.kernel or "-"),
            ("Decoder", carried.decoder or "-"),
            ("Compiled", ", ".join(carried.compiled) or "nothing"),
            ("Device", carried.device),
            ("Machine", carried.machine),
        ]
    return tuple((what, _plain(value)) for what, value in rows)


def samples(results: LatencyResults) -> str:
    """CSV with a line for each prefill and each decoding step; a cell without samples has one line
    with its reason. Runs count from 1, in the order of arrival; step 0 is prefill. The last two
    columns, an estimate and (estimated − measured) ÷ measured, are empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*FIELDS, "reason", "estimated_seconds", "error"])
    for table in results.tables:
        for cell in cells(table, results.plan):
            key = [*table.key, cell.batch_size]
            reason = one_line(cell.reason or "")
            lines = [
                [run, step, repr(seconds), reason, *_against(cell, step, seconds)]
                for run, sample in enumerate(cell.samples, 1)
                for step, seconds in enumerate([sample.prefill_seconds, *sample.step_seconds])
            ]
            writer.writerows([*key, *line] for line in lines or [["", "", "NaN", reason, "", ""]])
    return text.getvalue()


def _against(cell: Cell, step: int, seconds: float) -> list[str]:
    """The estimate of a step of a run, 0 for the prompt, and its error."""
    name = "token_seconds" if step else "prompt_seconds"
    estimated = (cell.estimate or {}).get(name)
    return ["", ""] if estimated is None else [repr(estimated), repr(estimated / seconds - 1)]


def _plain(text: str) -> str:
    """A text from elsewhere on one line, without the characters that separate cells."""
    return one_line(text).replace("\\", "/").replace("|", "\\|")
