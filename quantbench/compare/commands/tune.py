"""quantbench tune: find the fastest setting of any options, if one is shown to be faster.

    quantbench tune --over threads=1,2 --over quantization=int8wo,int4wo-128
    quantbench tune --checkpoint_path DIR --compile --over kv_cache=dense,int8 --output tuned
    quantbench tune --resume tuned --max_minutes 30                # more of the same

The settings are every combination of the values. Those that come to the same plan are measured
once; the others are the arms of an ab, with the command line without --over, the default, as the
baseline.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantbench.compare.arguments import refuse_beside, split_precision
from quantbench.compare.commands import ab
from quantbench.compare.figures.choices import Limits, TuneAnswer
from quantbench.compare.figures.row import Row
from quantbench.compare.figures.tuning import answer
from quantbench.compare.limit_options import limit_options, limits
from quantbench.compare.output import tables, tune_tables
from quantbench.compare.sampling.answers import PlannedRuns
from quantbench.compare.sampling.comparison import SAMPLES, SAMPLES_IN_TURN
from quantbench.compare.sampling.grid import Setting, Tuned, group, read_grid, said
from quantbench.compare.sampling.process import Process
from quantbench.compare.sampling.results import Results, Settings
from quantbench.errors import UsageError
from quantbench.log import log
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import options
from quantbench.progress import say

DEFAULT = Settings()
FORMATS: ab.Formats = {
    **ab.FORMATS,
    "json": tune_tables.as_json,
    "answer": lambda results, rows: tables.answer(results),
}
SHOWN = {**FORMATS, "table": tune_tables.terminal}
# Options that may change what is predicted: with one of them in the grid, quality is measured.
NUMBERS = ("quantization", "precision", "kv_cache", "kv_cache_quantization", "calibration_text",
           "min_sqnr")  # fmt: skip


@click.command(cls=ab.ShortOutput)
@click.option("--over", "overs", multiple=True, metavar="OPTION=A,B",
              help="Try these values of an option of generate; once for each option")  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, metavar="X|NAME",
    help="Stop when intervals are this narrow, as 2% or 0.02 [2%]; for the dtype there is --dtype",
)  # fmt: skip
@click.option(
    "--max_minutes", type=click.FloatRange(0),
    help=f"Measure for at most so long; loading does not count [{DEFAULT.max_minutes}]",
)  # fmt: skip
@click.option("--processes", type=click.IntRange(1),
              help=f"Start each setting at most N times [{ab.MANY}]")  # fmt: skip
@click.option(
    "--samples", type=click.IntRange(1),
    help=f"Samples of each process [{SAMPLES}, or {SAMPLES_IN_TURN} in turn; more of short ones]",
)  # fmt: skip
@click.option("--text", help="A text file to measure quality on, instead of the embedded one")
@click.option("--tokens", type=click.IntRange(0),
              help="Measure quality on so many tokens; 0: not at all "
              f"[{DEFAULT.tokens} where the grid may change it]")  # fmt: skip
@click.option("--in_turn", is_flag=True, help="Load settings in turn, though they fit side by side")
@click.option("--order_seed", type=int, default=0,
              help="Seed of the order in which settings take turns [0]")  # fmt: skip
@click.option("--output", metavar="DIR", help="Put results, report and picture here, a new folder")
@limit_options
@click.option("--resume", metavar="DIR", help="Go on with what --output DIR left")
@click.option("--open", "show", is_flag=True, help="Show report.html of --output in the browser")
@click.option("--format", "form", type=click.Choice([*FORMATS]), metavar="|".join(FORMATS),
              help="Print this instead of the table; -o, too")  # fmt: skip
@options(without=ab.UNUSED, by_alias=("precision",), defaults={"max_new_tokens": ab.MAX_NEW_TOKENS})
@click.pass_context
def tune(
    context: click.Context,
    /,
    overs: tuple[str, ...],
    precisions: tuple[str, ...],
    max_minutes: float | None,
    processes: int | None,
    samples: int | None,
    text: str | None,
    tokens: int | None,
    in_turn: bool,
    order_seed: int,
    output: str | None,
    max_memory: str | None,
    max_perplexity_increase: str | None,
    min_tok_s: str | None,
    resume: str | None,
    show: bool,
    form: str | None,
    **given: Any,
) -> None:
    """Find the fastest of many settings, if it is shown to be faster than the default."""
    if show and not (output or resume):
        raise UsageError("--open shows the report that --output DIR writes: give --output, too")
    limited = (max_memory, max_perplexity_increase, min_tok_s)
    asked = limits(*limited)
    narrow, dtype = split_precision(precisions)
    named = {"precision": narrow, "max_minutes": max_minutes, "processes": processes}
    stops: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if resume:
        refuse_beside(context, ab.OF_RESUMED, "--resume goes on with the settings of that folder: "
                      "the other options are --precision, --processes, --max_minutes, --format and "
                      "the limits of the answer")  # fmt: skip
        if dtype:
            raise UsageError(f"--precision {dtype}: --resume goes on with the dtype of that folder")
        folder: Path | None = Path(resume)
        results = Results.load(Path(resume))
        if results.tune is None and results.recommendation is not None:
            raise UsageError(f"--resume {resume} is a comparison of ab: quantbench ab goes on")
        asked = limits(*limited, results.tune.limits) if results.tune else asked
        results.go_on(stops, f"--resume {resume}")
        log.check(results.write_result)
    else:
        common = RunConfig(**(given | ({"precision": dtype} if dtype else {})))
        grid = read_grid(common, overs)
        ab.check_text(text, tokens)
        folder = ab.new_folder(output) if output else None
        ab.check_log(common.write_result, folder, text)
        if tokens is None:
            numbers = any(axis.option in NUMBERS for axis in grid.axes)
            tokens = DEFAULT.tokens if numbers else 0
        settings = Settings(tokens=tokens, text=text, in_turn=in_turn, samples=samples,
                            order_seed=order_seed, **stops)  # fmt: skip
        tuned = planned(grid.settings())
        for line in said(tuned, len(grid.settings()) - 1):
            say(line)
        if len(tuned.able) == 1:
            same = nothing_to_measure(tuned, asked)
            click.echo(tune_tables.ALONE.get(form or "", TuneAnswer.text)(same).rstrip("\n"))
            return
        ab.warn_of_threads([one.arm for one in tuned.able])
        results = begin(settings, tuned, common.write_result)

    def conclude_tune(results: Results, rows: Sequence[Row]) -> None:
        results.tune = answer(results, rows, asked)

    extend = bool(resume and stops)
    code = ab.compare(
        results, folder, form or "table", conclude=conclude_tune, formats=SHOWN, extend=extend
    )
    if show and folder:
        ab.open_report(folder)
    sys.exit(code)


def planned(settings: Sequence[Setting]) -> Tuned:
    """What the settings come to, found out by a worker. Raises UsageError where none can run."""
    worker = Process()
    try:
        argvs = [argv(setting.config, said=True) for setting in settings]
        plans = worker.answer(PlannedRuns, "plans", argvs=argvs).runs
    finally:
        worker.close()
    return group(settings, plans)


def begin(settings: Settings, tuned: Tuned, write_result: str) -> Results:
    """The results of a comparison that has not begun."""
    results = Results.begin(settings, [one.arm for one in tuned.arms], write_result)
    for arm, one in zip(results.arms, tuned.arms, strict=True):
        arm.also = one.also or None
    return results


def nothing_to_measure(tuned: Tuned, asked: Limits) -> TuneAnswer:
    """The answer where there is one plan alone. Raises UsageError where others cannot run."""
    (only,) = tuned.able
    refused = [one.arm for one in tuned.arms if one.arm.problem is not None]
    if refused:
        raise UsageError(
            f"--over: no setting but {only.arm.name} can run here; {refused[0].name}: "
            f"{refused[0].problem}"
        )
    line = f"Keep {only.arm.name}: every setting comes to the same plan, so there is "
    return TuneAnswer(asked, [f"{line}nothing to measure"], None)
