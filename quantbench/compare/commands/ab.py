"""quantbench ab: compare schemes: speed, memory, quality, and how sure a difference is.

    quantbench ab --compile --arm "--quantization none" --arm "--quantization int8wo"
    quantbench ab --arms all --checkpoint_path DIR --output results
    quantbench ab --resume results --max_minutes 30  # more of the same

The first arm is the baseline. Each runs in a process of its own: compare/sampling/comparison.py.
"""

import dataclasses
import json
import os
import sys
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import files, host
from quantbench.cli import Command, OptionOfOptions
from quantbench.compare.arguments import refuse_beside, split_precision
from quantbench.compare.figures.choices import Limits
from quantbench.compare.figures.recommendation import recommend
from quantbench.compare.figures.row import Row
from quantbench.compare.figures.rows import best_of, rows
from quantbench.compare.limit_options import limit_options, limits
from quantbench.compare.output import html as page
from quantbench.compare.output import tables as report
from quantbench.compare.sampling.answers import PlannedRuns, SchemeNames
from quantbench.compare.sampling.arm import NOT_IN_ARMS, Arm, every_scheme, make_arms, read_arms
from quantbench.compare.sampling.comparison import SAMPLES, SAMPLES_IN_TURN, Comparison
from quantbench.compare.sampling.process import Process
from quantbench.compare.sampling.results import FILE, MOST_BESIDE, Results, Settings
from quantbench.compare.sampling.schedule import PROCESSES, PROCESSES_OF_MANY
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log import log
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import options
from quantbench.progress import say
from quantbench.run import threads
from quantbench.run.facts import make_record
from quantbench.text import one_line

UNUSED = tuple(name for name in NOT_IN_ARMS if name not in ("write_result", "debug"))
DEFAULT = Settings()
# What --resume takes beside the folder, by click's names, and what is said of any other option.
OF_RESUMED = ("resume", "precisions", "max_minutes", "processes", "form", "show", "max_memory",
              "max_perplexity_increase", "min_tok_s", "debug")  # fmt: skip
RESUMED = (
    "--resume goes on with the arms of that folder: the only other options are --precision, "
    "--processes, --max_minutes, --format, --open and the limits of the answer"
)
# Fewer than generate.py's: a difference shows in the number of processes, not in their length.
MAX_NEW_TOKENS = 32
Formats = Mapping[str, Callable[[Results, Sequence[Row]], str]]
Conclude = Callable[[Results, Sequence[Row]], None]
FORMATS: Formats = {
    "md": report.markdown,
    "csv": lambda results, rows: report.as_csv(rows),
    "json": lambda results, rows: json.dumps(results.as_json(rows), indent=1),
    "answer": lambda results, rows: report.answer(results),
}
MANY = f"{PROCESSES}; {PROCESSES_OF_MANY} with more than {MOST_BESIDE} arms"


class ShortOutput(Command):
    """A Command that takes -o for --format."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--format" if word == "-o" else word for word in args])


@click.command(cls=ShortOutput)
@click.option(
    *("--arm", "texts"),
    cls=OptionOfOptions,
    multiple=True,
    metavar="OPTIONS",
    help="Options of generate.py that this arm has; the first arm is the baseline",
)
@click.option("--arms", metavar="all", help="Add an arm for every scheme that runs here")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="X|NAME",
    help="Stop when intervals are this narrow, as 2% or 0.02 [2%]; for the dtype there is --dtype",
)
@click.option(
    "--max_minutes",
    type=click.FloatRange(0),
    help=f"Measure for at most so long; loading does not count [{DEFAULT.max_minutes}]",
)
@click.option(
    "--processes", type=click.IntRange(1), help=f"Start each arm at most N times [{MANY}]"
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    help=f"Samples of each process [{SAMPLES}, or {SAMPLES_IN_TURN} in turn; more of short ones]",
)
@click.option("--text", help="A text file to measure quality on, instead of the embedded one")
@click.option(
    "--tokens",
    type=click.IntRange(0),
    default=DEFAULT.tokens,
    help=f"Measure quality on so many tokens; 0: not at all [{DEFAULT.tokens}]",
)
@click.option("--in_turn", is_flag=True, help="Load arms in turn, though they fit side by side")
@click.option(
    "--order_seed", type=int, default=0, help="Seed of the order in which arms take turns [0]"
)
@click.option(
    "--allow_different", is_flag=True, help="Compare arms of other models or prompts, too"
)
@click.option("--output", metavar="DIR", help="Put results, report and picture here, a new folder; "
              "quantized arms, too, until the run has ended")  # fmt: skip
@limit_options
@click.option("--resume", metavar="DIR", help="Go on with what --output DIR left")
@click.option("--open", "show", is_flag=True, help="Show report.html of --output in the browser")
@click.option("--format", "form", type=click.Choice([*FORMATS]), metavar="|".join(FORMATS),
              help="Print this instead of the tables; -o, too")  # fmt: skip
@options(without=UNUSED, by_alias=("precision",), defaults={"max_new_tokens": MAX_NEW_TOKENS})
@click.pass_context
def ab(
    context: click.Context,
    /,
    texts: tuple[str, ...],
    arms: str | None,
    precisions: tuple[str, ...],
    max_minutes: float | None,
    processes: int | None,
    samples: int | None,
    text: str | None,
    tokens: int,
    in_turn: bool,
    order_seed: int,
    allow_different: bool,
    output: str | None,
    max_memory: str | None,
    max_perplexity_increase: str | None,
    min_tok_s: str | None,
    resume: str | None,
    show: bool,
    form: str | None,
    **given: Any,
) -> None:
    """Compare ARMs: sample them in turns until the difference is known."""
    if show and not (output or resume):
        raise UsageError("--open shows the report that --output DIR writes: give --output, too")
    asked = limits(max_memory, max_perplexity_increase, min_tok_s)
    narrow, dtype = split_precision(precisions)
    common = RunConfig(**(given | ({"precision": dtype} if dtype else {})))
    stops: dict[str, Any] = {
        "precision": narrow,
        "max_minutes": max_minutes,
        "processes": processes,
    }
    stops = {name: value for name, value in stops.items() if value is not None}
    if resume:
        refuse_beside(context, OF_RESUMED, RESUMED)
        if dtype:
            raise UsageError(f"--precision {dtype}: {RESUMED}")
        folder: Path | None = Path(resume)
        results = Results.load(Path(resume))
        if results.recommendation:
            asked = limits(
                max_memory, max_perplexity_increase, min_tok_s, results.recommendation.limits
            )
        results.go_on(stops, f"--resume {resume}")
    else:
        settings = Settings(
            tokens=tokens,
            text=text,
            in_turn=in_turn,
            samples=samples,
            order_seed=order_seed,
            **stops,
        )
        chosen = _arms(common, texts, arms, allow_different)
        warn_of_threads(chosen)
        check_text(text, tokens)
        folder = new_folder(output) if output else None
        results = Results.begin(settings, chosen, common.write_result)
    check_log(results.write_result, folder, results.settings.text)
    code = compare(results, folder, form, asked, extend=bool(resume and stops))
    if show and folder:
        open_report(folder)
    sys.exit(code)


def compare(
    results: Results,
    folder: Path | None,
    form: str | None = None,
    asked: Limits | None = None,
    conclude: Conclude | None = None,
    formats: Formats | None = None,
    extend: bool = False,
) -> int:
    """Run, report and log; the exit code, 1 where an arm failed.

    form: of `formats`. asked: limits of what is recommended. conclude: puts the answer into the
    results, in the place of a recommendation. extend: as Comparison takes it.
    """
    if folder:
        _make(folder)
    results.save(folder)
    try:
        Comparison(results, folder, say, extend=extend).run()
    except UsageError:
        if folder:
            (folder / FILE).unlink(missing_ok=True)
        raise
    if results.ended == "interrupted" and results.rounds == 0:
        raise KeyboardInterrupt
    arm_rows = rows(results)
    if results.rounds > results.logged_rounds:  # also of an interrupted block: what was measured
        _log(results, arm_rows)
    if conclude:
        conclude(results, arm_rows)
    else:
        results.recommendation = recommend(arm_rows, asked or Limits(), best_of(results))
    results.save(folder, arm_rows)
    if folder:  # before stdout, which may be closed
        report.write(folder, results, arm_rows)
        say(f"Wrote {', '.join(report.FILES)} into {folder}")
    show = (formats or FORMATS)[form] if form else report.terminal
    click.echo(show(results, arm_rows).rstrip("\n"))
    if failure := results.failure():
        say(f"error: {one_line(failure)}")
        return 1
    return 0


def _arms(
    common: RunConfig, texts: Sequence[str], every: str | None, allow_different: bool
) -> list[Arm]:
    if every is None:
        return make_arms(common, texts, allow_different)
    if every != "all":
        raise UsageError(f"--arms takes all; given: {every!r}; one arm is --arm OPTIONS")
    read_arms(common, texts)  # what is wrong is told before torch is imported
    worker = Process()
    try:
        schemes = worker.answer(SchemeNames, "schemes", argv=argv(common)).schemes
        added = every_scheme(common, texts, schemes)[len(texts) :]
        argvs = [argv(arm.config, said=True) for arm in read_arms(common, added)]
        plans = worker.answer(PlannedRuns, "plans", argvs=argvs).runs
    finally:
        worker.close()
    able = [text for text, plan in zip(added, plans, strict=True) if plan.problem is None]
    if added and not able:
        failure = UsageError if plans[0].kind == "usage" else QuantbenchError
        raise failure(plans[0].problem or "")
    for problem in dict.fromkeys(plan.problem for plan in plans if plan.problem):
        say(f"Not measured: {problem}")
    made = make_arms(common, [*texts, *able], allow_different)
    say(f"{len(made)} arms; how long they take is known when the first ones are measured")
    return made


def warn_of_threads(arms: Sequence[Arm]) -> None:
    """Say once for each arm what its worker would say where nobody reads it."""
    for arm in arms:
        cores, ranks = host.cores(), arm.config.tp
        chosen = threads.choose(arm.config.threads, cores, os.environ, ranks)
        on_cpu = arm.config.device in ("auto", "cpu")
        for warning in (chosen.warning(), threads.crowded(ranks, cores) if on_cpu else None):
            if warning:
                say(f"{arm.name}: {warning}")


def check_text(text: str | None, tokens: int | None = None) -> None:
    """UsageError unless it can be read, and is used; the worker says whether it is long enough."""
    if text is None:
        return
    if tokens == 0:
        raise UsageError("--text: with --tokens 0 no quality is measured: leave one of them out")
    files.read_text("--text", text)


def new_folder(path: str) -> Path:
    """The folder of --output. Raises UsageError unless it is new or empty, LogError where it cannot
    be made."""
    folder = Path(path)
    files.check_folder("--output", folder)
    if (folder / FILE).exists():
        raise UsageError(f"--output {path} holds a comparison: --resume {path} goes on with it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output {path} is neither new nor an empty folder")
    return folder


def check_log(write_result: str, folder: Path | None, text: str | None = None) -> None:
    """Raise UsageError or LogError unless the log can be appended to, and is no file that the
    comparison reads or writes: --text, the folder of --output, and what is written there."""
    log.check(write_result)
    if write_result == "none":
        return
    files.refuse_coinciding({"--write_result": write_result}, {"--text": text})
    if folder is None:
        return
    files.refuse_folder("--write_result", write_result, "--output", folder)
    written = {os.path.realpath(folder / name) for name in (FILE, *report.WRITTEN)}
    if os.path.realpath(write_result) in written:
        raise UsageError(
            f"--write_result {write_result} is a file that --output {folder} writes; give another"
        )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"--output {folder}: {error.strerror}") from None


def open_report(folder: Path) -> None:
    path = folder / page.FILE
    if not webbrowser.open(path.resolve().as_uri()):
        say(f"--open: there is no browser here; the report is {path}")


def _log(results: Results, arm_rows: Sequence[Row]) -> None:
    """Append a line to the log for every arm that was measured to the end."""
    results.logged_rounds = results.rounds
    if results.write_result == "none":
        return
    count = 0
    for arm, row in zip(results.arms, arm_rows, strict=True):
        run, tok_s = arm.facts.run if arm.facts else None, row.tok_s
        if arm.failed is None and run and tok_s is not None and row.peak_memory_bytes:
            config = dataclasses.replace(run.config, num_samples=len(arm.samples))
            run = dataclasses.replace(run, config=config)
            record = make_record(run, tok_s, row.peak_memory_bytes["generate"])
            log.append(Path(results.write_result), record.render())
            count += 1
    say(f"Appended {count} line{'s' * (count != 1)} to {results.write_result}")
