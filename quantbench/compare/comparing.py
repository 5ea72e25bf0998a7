"""What ab and recommend share: measure, conclude, log, report.

results = Results.begin(settings, arms, "benchmarks.txt")
code = compare(results, folder, limits, lambda rows, best: recommend(rows, limits, best))
"""

import dataclasses
import json
import os
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import environment, files, host
from quantbench.bench import store
from quantbench.bench.session import Rule, Session
from quantbench.bench.store import Results, Store
from quantbench.cli import ended_by
from quantbench.compare import html as page
from quantbench.compare import machine_floor
from quantbench.compare import tables as report
from quantbench.compare.compare_options import OF_RESUMED, RESUMED
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits, limits
from quantbench.compare.recommend import Recommendation
from quantbench.compare.row import Row
from quantbench.compare.rows import rows as rows_of
from quantbench.compare.stop import Enough
from quantbench.errors import UsageError
from quantbench.help_text import refuse_beside
from quantbench.log import log
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.run.facts import make_record
from quantbench.text import counted, one_line
from quantbench.typed_json import from_json, to_json

FILE = "results.json"  # the report's figures; meta.json and samples.jsonl are what was measured
Conclude = Callable[..., Recommendation]  # from the rows, and best=Best


# Ends of a session after which there is nothing to go on with, if the rule agrees.
FINISHED = ("answered", "processes", "baseline failed", "nothing to compare")


def compare(
    results: Results,
    folder: Path | None,
    asked: Limits,
    conclude: Conclude,
    form: str | None = None,
    show: bool = False,
    rule: Rule | None = None,
    spent: float = 0.0,
) -> int:
    """Measure, report and log; the exit code, 1 where an arm failed.

    form: md, csv, json or answer, in the place of the tables. show: the page of `folder`.
    rule: which arms are timed, and until when; None: all. spent: seconds of the command so far.
    """
    before, results.limits = len(results.arms[0].turns), to_json(asked)
    if not before:  # --resume has the floor of its beginning, whose turns the file knows by now
        results.settings = dataclasses.replace(results.settings, floor=machine_floor.known())
    kept, rule = Store(results, folder), rule or Enough(asked)  # the folder is ours from now on
    try:
        if results.ended not in FINISHED or not isinstance(rule.next(results), str):
            Session(kept, rule, spent=spent).run()
    except KeyboardInterrupt:  # before any turn
        if folder:
            say(f"{ended_by()}; nothing was timed; quantbench ab --resume {folder} goes on")
        raise
    found = Compared(results)
    rows = rows_of(results, found)
    if len(results.arms[0].turns) > before:
        _log(results, rows)
        if not before:
            machine_floor.learn(found)
    answer = conclude(rows, best=found.best)
    if results.ended == "interrupted":
        count = counted(sum(len(arm.turns) for arm in results.arms), "turn")
        into = (
            f"kept in {folder}; quantbench ab --resume {folder} goes on"
            if folder
            else "compared below"
        )
        say(f"{ended_by()}; {count} {'is' if count == '1 turn' else 'are'} {into}")
    if folder:  # before stdout, which may be closed
        report.write(folder, results, rows, answer)
        text = as_json(results, rows, answer)
        files.write_text("--output", folder / FILE, text, follow=False)
        say(f"Wrote {', '.join((FILE, *report.WRITTEN))} into {folder}")
    kept.file.close()
    shown: dict[str | None, Callable[[], str]] = {
        None: lambda: report.terminal(results, rows, answer),
        "md": lambda: report.markdown(results, rows, answer),
        "csv": lambda: report.as_csv(rows),
        "json": lambda: as_json(results, rows, answer),
        "answer": lambda: report.below(results, rows, answer),
    }
    click.echo(shown[form]().rstrip("\n"))
    failure = results.failure()
    if failure:
        say(f"error: {one_line(failure)}")
    if show and folder and not webbrowser.open((folder / page.FILE).resolve().as_uri()):
        say(f"--open: there is no browser here; the report is {folder / page.FILE}")
    return int(failure is not None)


def as_json(results: Results, rows: Sequence[Row], answer: Recommendation) -> str:
    return json.dumps(to_json(content(results, rows, answer)), indent=1) + "\n"


def content(results: Results, rows: Sequence[Row], answer: Recommendation) -> dict[str, object]:
    """What results.json holds: figures, answer and origin; samples are in samples.jsonl."""
    return {
        "settings": results.settings,
        "ended": results.ended,
        "bandwidth": results.bandwidth,
        "arms": [
            {"name": arm.name, "argv": arm.argv, "facts": arm.facts, "quality": arm.quality}
            for arm in results.arms
        ],
        "rows": list(rows),
        "answer": answer,
        "about": results.about,  # not first: no --json of another command replaces the file
    }


def _log(results: Results, rows: Sequence[Row]) -> None:
    """Append a line to the log for every arm that was measured to the end."""
    if results.write_result == "none":
        return
    count = 0
    for arm, row in zip(results.arms, rows, strict=True):
        run = arm.run
        if arm.failed is None and run and row.tok_s is not None and row.peak_memory_bytes:
            config = dataclasses.replace(run.config, num_samples=len(arm.samples))
            run = dataclasses.replace(run, config=config)
            record = make_record(run, row.tok_s, row.peak_memory_bytes["generate"])
            log.append(Path(results.write_result), record.render())
            count += 1
    say(f"Appended {count} line{'s' * (count != 1)} to {results.write_result}")


# ------------------------------------------------------------------------------- what is refused


def warn_of_threads(arms: Iterable[tuple[str, RunConfig]]) -> None:
    """Say once for each arm what its worker would say where nobody reads it."""
    for name, config in arms:
        cores, ranks = host.cores(), config.tp
        chosen = environment.choose_threads(config.threads, cores, os.environ, ranks)
        on_cpu = config.device in ("auto", "cpu")
        for warning in (chosen.warning(), environment.crowded(ranks, cores) if on_cpu else None):
            if warning:
                say(f"{name}: {warning}")


def check_open(show: bool, folder: str | None) -> None:
    """UsageError where --open has no report to show."""
    if show and not folder:
        raise UsageError("--open shows the report that --output DIR writes: give --output, too")


def prepared(write_result: str, settings: Mapping[str, Any], output: str | None) -> Path | None:
    """The folder of --output. Raises UsageError or LogError unless it is new, the log can be
    appended to, and --text can be read and is used; the worker says whether it is long enough."""
    text = settings.get("text")
    if text is not None:
        if settings.get("tokens") == 0:
            raise UsageError(
                "--text: with --tokens 0 no quality is measured: leave one of them out"
            )
        files.read_text("--text", text)
    folder = new_folder(output)
    _check_log(write_result, folder, text)
    return folder


def new_folder(path: str | None) -> Path | None:
    """The folder of --output. Raises UsageError unless it is new or empty, LogError where it cannot
    be made."""
    if path is None:
        return None
    folder = Path(path)
    files.check_folder("--output", folder)
    if (folder / store.META).exists():
        raise UsageError(
            f"--output {path} holds a comparison: quantbench ab --resume {path} goes on with it"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--output {path} is neither new nor an empty folder")
    return folder


def _check_log(write_result: str, folder: Path | None, text: str | None) -> None:
    """Raise UsageError or LogError unless the log can be appended to, and is no file that the
    comparison reads or writes: --text, the folder of --output, and what is written there."""
    log.check(write_result)
    if write_result == "none":
        return
    files.refuse_coinciding({"--write_result": write_result}, {"--text": text})
    if folder is None:
        return
    files.refuse_folder("--write_result", write_result, "--output", folder)
    names = (FILE, store.META, store.SAMPLES, *report.WRITTEN)
    if os.path.realpath(write_result) in {os.path.realpath(folder / name) for name in names}:
        raise UsageError(
            f"--write_result {write_result} is a file that --output {folder} writes; give another"
        )


def resumed(path: str, changes: Mapping[str, Any], given: dict[str, Any]) -> tuple[Results, Limits]:
    """What --output left, with settings of when to stop changed; and its limits, changed by those
    in `given`. Raises UsageError where it is another commit's or machine's, its log cannot be
    appended to, or an option was given that would change what is measured."""
    refuse_beside(OF_RESUMED, RESUMED)
    results = store.load(Path(path))
    results.settings = dataclasses.replace(results.settings, **changes)
    store.same_origin(results, f"--resume {path}")
    _check_log(results.write_result, Path(path), results.settings.text)
    return results, limits(given, from_json(Limits, results.limits))
