"""quantbench ab: compare schemes: speed, memory, quality, and how sure a difference is.

    quantbench ab --compile --arm "--quantization none" --arm "--quantization int8wo"
    quantbench ab --arms all --checkpoint_path DIR --output results
    quantbench ab --over threads=1,2 --over quantization=int8wo,int4wo-128
    quantbench ab --same_model --arm "--checkpoint_path a.gguf" --arm "--checkpoint_path b-awq"
    quantbench ab --resume results --max_minutes 30  # more of the same

The first arm is the baseline. Arms take short turns in cycles: bench/session.py.
"""

import sys
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from quantbench.bench.answers import Runnable
from quantbench.bench.arm import MODEL, WORK, make_arms, of_one_model, other_schemes, read_arms
from quantbench.bench.grid import combined
from quantbench.bench.process import Process
from quantbench.bench.store import ArmResult, Results, Settings
from quantbench.cli import OptionOfOptions
from quantbench.compare import compare_options
from quantbench.compare.comparing import check_open, compare, prepared, resumed, warn_of_threads
from quantbench.compare.limits import limit_options, limits
from quantbench.compare.recommend import recommend
from quantbench.errors import QuantbenchError, UsageError
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import options
from quantbench.progress import say


@click.command(cls=compare_options.ShortOutput)
@click.option("--arm", "texts", cls=OptionOfOptions, multiple=True, metavar="OPTIONS",
              help="Options of generate.py that this arm has; the first arm is the baseline"
)  # fmt: skip
@click.option("--arms", metavar="all", help="Add an arm for every scheme that runs here")
@click.option("--over", "overs", multiple=True, metavar="OPTION=A,B",
              help="Make an arm of each of these values of an option of generate.py; several "
              "--over multiply")  # fmt: skip
@compare_options.measuring_options
@click.option("--allow_different", is_flag=True,
              help="Compare arms of other models or prompts, too")  # fmt: skip
@click.option("--same_model", is_flag=True,
              help="Compare files of one model: arms may have their own --checkpoint_path"
)  # fmt: skip
@limit_options
@compare_options.result_options
@options(
    without=compare_options.UNUSED, defaults={"max_new_tokens": compare_options.MAX_NEW_TOKENS}
)
def ab(
    texts: tuple[str, ...],
    arms: str | None,
    overs: tuple[str, ...],
    allow_different: bool,
    same_model: bool,
    output: str | None,
    resume: str | None,
    show: bool,
    form: str | None,
    config: RunConfig,
    **given: Any,
) -> None:
    """Compare ARMs: take turns with them until the difference is known."""
    began = time.monotonic()
    check_open(show, output or resume)
    settings = compare_options.settings_of(given)
    if resume:
        results, asked = resumed(resume, settings, given)
        folder: Path | None = Path(resume)
    else:
        asked = limits(given)
        if allow_different and same_model:
            raise UsageError("--allow_different and --same_model: leave one out")
        may_differ = (*MODEL, *WORK) if allow_different else ("checkpoint_path",) * same_model
        if overs:
            chosen = _over(config, texts, arms, overs, may_differ)
        else:
            chosen = _arms(config, texts, arms, may_differ)
        if same_model:
            with closing(Process()) as worker:
                chosen, reference = of_one_model(config, chosen, worker)
            if settings.get("tokens") != 0:
                settings["reference"] = reference
        warn_of_threads((arm.name, arm.config) for arm in chosen)
        folder = prepared(config.write_result, settings, output)
        results = Results.begin(Settings(**settings), chosen, config.write_result)
    conclude = partial(recommend, limits=asked, reference=results.settings.reference)
    spent = time.monotonic() - began
    sys.exit(compare(results, folder, asked, conclude, form, show, spent=spent))


def _arms(
    common: RunConfig, texts: Sequence[str], every: str | None, may_differ: Collection[str]
) -> list[ArmResult]:
    if every is None:
        return make_arms(common, texts, may_differ)
    if every != "all":
        raise UsageError(f"--arms takes all; given: {every!r}; one arm is --arm OPTIONS")
    arms = read_arms(common, texts)  # refuses wrong options before torch is imported
    with closing(Process()) as worker:
        schemes = worker.answer(list[str], "schemes", argv=argv(common))
        added = other_schemes(common, arms, schemes)
        able = _able(added, worker)
    return make_arms(common, [*texts, *(arm.text for arm in able)], may_differ)


def _over(
    common: RunConfig,
    texts: Sequence[str],
    every: str | None,
    overs: Sequence[str],
    may_differ: Collection[str],
) -> list[ArmResult]:
    """The combinations that can run; the first of them is the baseline."""
    if every is not None:
        raise UsageError("--over and --arms: leave one out; --over quantization=A,B names schemes")
    arms = make_arms(*combined(common, texts, overs), may_differ)
    with closing(Process()) as worker:
        able = _able(arms, worker)
    if len(able) == 1:
        raise UsageError(f"--over: only {able[0].name} can run here, and is nothing to compare")
    return able


def _able(arms: Sequence[ArmResult], worker: Process) -> list[ArmResult]:
    """The arms that can run; prints why others cannot. Raises that reason where no arm can."""
    plans = worker.answer(list[Runnable], "plans", argvs=[arm.argv for arm in arms])
    able = [arm for arm, plan in zip(arms, plans, strict=True) if plan.problem is None]
    if arms and not able:
        failure = UsageError if plans[0].kind == "usage" else QuantbenchError
        raise failure(plans[0].problem or "")
    for problem in dict.fromkeys(plan.problem for plan in plans if plan.problem):
        say(f"Not measured: {problem}")
    return able
