"""quantbench recommend: measure what may suit, and say which quantization to take.

    quantbench recommend --checkpoint_path DIR --max_memory 8GB
    quantbench recommend --checkpoint_path A --checkpoint_path B    # which model, too
    quantbench recommend --checkpoint_path org/name-GGUF:all        # which of its files
    quantbench recommend --from results --max_kl 0.1                # of an earlier run

A shorter ab: the quality of every scheme that runs here and may satisfy --max_memory is measured in
one process, and those that may win, six at most, take turns with none. Files of one model are
compared as they are: compare/uploads.py.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.bench.arm import make_arms
from quantbench.bench.store import Results, Settings, load
from quantbench.cli import Command
from quantbench.compare import answer_lengths, compare_options, uploads
from quantbench.compare.comparing import compare, content, prepared
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits, limit_options, limits
from quantbench.compare.menu import Need, check_models, menu, name_of
from quantbench.compare.recommend import Best, Recommendation, at_home, wrapped
from quantbench.compare.recommend import recommend as recommended
from quantbench.compare.row import Row
from quantbench.compare.rows import rows as rows_of
from quantbench.compare.share_file import HOLDS, Model
from quantbench.compare.share_file import write as write_shared
from quantbench.compare.shared_tables import across
from quantbench.compare.shortlist import MOST, Shortlist
from quantbench.compare.stop import Enough
from quantbench.compare.tables import below
from quantbench.errors import QuantbenchError, UsageError
from quantbench.help_text import names_of, refuse_beside
from quantbench.log import shell
from quantbench.log.config import RunConfig
from quantbench.log.options import options, parse
from quantbench.progress import say
from quantbench.report.columns import Columns, aligned
from quantbench.run import checks
from quantbench.text import counted, shown, size

UNUSED = (*compare_options.UNUSED, "quantization", "compile", "checkpoint_path")
OF_EARLIER = ("earlier", "checkpoints", "share", "answers", "debug", *vars(Limits()))
EARLIER = "--from times nothing: give limits, --share, --answers and --checkpoint_path alone"


@click.command(cls=Command)
@limit_options
@click.option("--from", "earlier", metavar="DIR", help="Answer from a results folder of ab")
@click.option("--schemes", metavar="A,B", help="Measure these; a recipe's file, too [every scheme]")
@click.option("--answers", is_flag=True,
              help="Measure lengths of answers, and seconds, of what is recommended")  # fmt: skip
@click.option("--same_model", is_flag=True,
              help="The --checkpoint_path are files of one model: compare them as they are"
)  # fmt: skip
@click.option("--share", metavar="FILE",
              help="Write results.json here, too, without folders, for collect")  # fmt: skip
@click.option("--checkpoint_path", "checkpoints", multiple=True, metavar="PATH",
              help="As in generate.py, or org/name-GGUF:all; several are compared by bits "
              "per byte [tiny]")  # fmt: skip
@compare_options.measuring_options
@options(without=UNUSED, defaults={"max_new_tokens": compare_options.MAX_NEW_TOKENS})
def recommend(
    checkpoints: tuple[str, ...],
    earlier: str | None,
    schemes: str | None,
    share: str | None,
    answers: bool,
    same_model: bool,
    output: str | None,
    config: RunConfig,
    **given: Any,
) -> None:
    """Which quantization to take: the fastest that keeps quality, the smallest, the best mix."""
    began = time.monotonic()
    asked, settings = limits(given), compare_options.settings_of(given)
    common = dataclasses.replace(config, compile=True)
    written = files.Output("--share", share, HOLDS, "results.json")
    if earlier is not None:
        refuse_beside(OF_EARLIER, EARLIER)
        files.check_outputs([written])
        results = load(Path(earlier), "--from")
        models = {parse(arm.argv).checkpoint_path for arm in results.arms if arm.argv}
        if not set(checkpoints) <= models:
            raise UsageError(f"--from {earlier} holds results of {', '.join(sorted(models))}, not "
                             f"of --checkpoint_path {', '.join(map(shown, checkpoints))}"
                             )  # fmt: skip
        found = Compared(results)
        rows = rows_of(results, found)
        answer = recommended(rows, asked, found.best, results.settings.reference)
        if share:
            write_shared("--share", share, [content(results, rows, answer)])
        if answer.nothing:
            more = f"; quantbench ab --resume {earlier} measures on"
            raise QuantbenchError(answer.nothing + more * (results.ended == "interrupted"))
        click.echo(below(results, rows, answer))
        if answers:
            answer_lengths.check(sorted(models))
            _say_lengths(rows, answer, Path(earlier))
        return
    if settings.get("tokens") == 0:
        raise UsageError("--tokens 0: without quality there is no recommendation; quantbench ab "
                         "--arms all compares speeds alone")  # fmt: skip
    files.check_outputs([written], {"--text": settings.get("text")})
    checkpoints = checkpoints or ("tiny",)
    every = [path for path in checkpoints if path.lower().endswith(":all")]
    if every and (same_model or len(checkpoints) > 1):
        raise UsageError(f"--checkpoint_path {every[0]} names several files: give it alone")
    if same_model and len({*checkpoints}) < max(2, len(checkpoints)):
        raise UsageError(
            "--same_model compares files: give two or more --checkpoint_path, each of them once"
        )
    if schemes and (same_model or every):
        raise UsageError(
            f"--schemes and {'--same_model' if same_model else every[0]}: files are compared as "
            "they are; leave one out"
        )
    of_one_model = checkpoints if same_model else every
    checkpoints = checkpoints[:1] if same_model else checkpoints
    configs = [dataclasses.replace(common, checkpoint_path=path) for path in checkpoints]
    check_models(checkpoints)
    if answers:
        answer_lengths.check(checkpoints)
    for config in configs:
        checks.check_inputs(config)
    names = names_of("--schemes", schemes, ()) or None
    folder = prepared(common.write_result, settings, output)
    concluded: list[tuple[Model, Recommendation]] = []
    shares: list[object] = []
    answered: dict[int, tuple[Sequence[Row], Recommendation]] = {}
    code = 0
    usual = Settings(**settings)
    each = dataclasses.replace(usual, max_minutes=usual.max_minutes / len(configs))
    kind = uploads.FinestFirst if of_one_model else Enough if names else Shortlist
    for place, config in enumerate(configs):
        own = folder / name_of(config.checkpoint_path) if folder and len(configs) > 1 else folder
        if of_one_model:
            results = _begin_files(config, each, asked, of_one_model)
        else:
            results = _begin(config, each, asked, own, names)

        def conclude(
            rows: Sequence[Row], best: Best, results: Results = results, place: int = place
        ) -> Recommendation:
            answer = recommended(rows, asked, best, results.settings.reference)
            concluded.append((Model.of(results, rows), answer))
            answered[place] = rows, answer
            shares.append(content(results, rows, answer))
            return answer

        rule = kind(asked, answer_only=True)
        spent = time.monotonic() - began - 60 * place * each.max_minutes
        code |= compare(results, own, asked, conclude, "answer", rule=rule, spent=spent)
        if results.ended == "interrupted":
            break
        if answers and place in answered:
            _say_lengths(*answered[place], own)
    if share:
        write_shared("--share", share, shares)
        say(f"Wrote {share}")
    if len(configs) > 1:
        click.echo(f"\n{across(concluded)}")
    nothing = next((answer.nothing for _, answer in concluded if answer.nothing), None)
    if code == 0 and nothing:
        keep = "with --output DIR, recommend --from DIR" if folder is None else f"--from {folder}"
        raise QuantbenchError(f"{nothing}; {keep} answers other limits without measuring")
    sys.exit(code)


def _say_lengths(rows: Sequence[Row], answer: Recommendation, folder: Path | None) -> None:
    for line in answer_lengths.lines(rows, answer, folder):
        click.echo("\n".join(wrapped(line)))


def _begin(
    config: RunConfig,
    settings: Settings,
    asked: Limits,
    folder: Path | None,
    schemes: Sequence[str] | None,
) -> Results:
    """The session of one model; says what it will do, and how long it may take."""
    names, needs = menu(config, asked, schemes)
    arms = make_arms(config, [shell.join(["--quantization", name]) for name in names])
    results = Results.begin(settings, arms, config.write_result)
    most = len(names) if schemes else min(len(names), MOST + 1)
    disk = sum(sorted((needs[name].held for name in names[1:]), reverse=True)[: most - 1])
    what = (
        f"Quality of {counted(len(arms), 'scheme')} of {config.checkpoint_path}, then "
        f"turns with {most} of them at most: {settings.max_minutes:g} min, "
        f"{size(disk)} of disk until it ends"
        + (f"; kept in {folder}" if folder else "; --output DIR keeps everything")
    )
    _predict("scheme", "weights and KV cache", [needs[name] for name in names if name in needs])
    for line in wrapped(at_home(what)):
        say(line)
    return results


def _begin_files(
    config: RunConfig, settings: Settings, asked: Limits, paths: Sequence[str]
) -> Results:
    """As _begin, of files of one model."""
    from quantbench import devices

    free = devices.free_memory(devices.resolve(config.device))
    needs = uploads.chosen(uploads.needed(paths), asked, free)
    _predict("file", "size", needs)
    downloaded = len(paths) > 1
    what = (
        f"{uploads.what(needs, paths[0], downloaded)}, then turns with {min(len(needs), MOST + 1)} "
        f"of them at most: {settings.max_minutes:g} min"
    )
    for line in wrapped(at_home(what)):
        say(line)
    arms, reference = uploads.arms(config, needs, downloaded)
    settings = dataclasses.replace(settings, reference=reference)
    return Results.begin(settings, arms, config.write_result)


def _predict(name: str, held: str, needs: Sequence[Need]) -> None:
    """Say what bytes predict of the speed, against the first."""
    first, *others = needs
    columns: Columns[Need] = [
        (name, lambda need: uploads.short(need.scheme)),
        (held, lambda need: size(need.held)),
        ("decode ×, at most", lambda need: f"{first.step / need.step:.2f}"),
    ]
    say(f"Predicted from bytes, against {uploads.short(first.scheme)}:")
    for line in aligned(columns, sorted(others, key=lambda need: -need.step)).splitlines():
        say(line)
