"""quantbench tune: find the fastest setting of any options, if one is shown to be faster.

    quantbench tune --over threads=1,2 --over quantization=int8wo,int4wo-128
    quantbench tune --checkpoint_path DIR --compile --over kv_cache=dense,int8 --output tuned
    quantbench tune --resume tuned --max_minutes 30                # more of the same

The settings are every combination of the values. Those that come to the same plan are measured
once; the others are the arms of an ab, with the command line without --over, the default, as the
baseline.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from quantbench.answer.limits import Limits, limit_options, limits
from quantbench.answer.recommend import Recommendation, tuned
from quantbench.bench.answers import Planned
from quantbench.bench.grid import group, read_grid, said, settings_of
from quantbench.bench.process import Process
from quantbench.bench.store import ArmResult, Results, Settings
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from quantbench.log.options import options
from quantbench.plans import compare_options as shared
from quantbench.plans.comparing import check_open, compare, prepared, resumed, warn_of_threads
from quantbench.progress import say
from quantbench.typed_json import to_json

# Options that may change what is predicted: with one of them in the grid, quality is measured.
NUMBERS = ("quantization", "precision", "kv_cache", "kv_cache_quantization", "calibration_text",
           "min_sqnr")  # fmt: skip


@click.command(cls=shared.ShortOutput)
@click.option("--over", "overs", multiple=True, metavar="OPTION=A,B",
              help="Try these values of an option of generate; once for each option")  # fmt: skip
@shared.measuring_options
@limit_options
@shared.result_options
@options(without=shared.UNUSED, defaults={"max_new_tokens": shared.MAX_NEW_TOKENS})
def tune(
    overs: tuple[str, ...],
    output: str | None,
    resume: str | None,
    show: bool,
    form: str | None,
    config: RunConfig,
    **given: Any,
) -> None:
    """Find the fastest of many settings, if it is shown to be faster than the default."""
    check_open(show, output or resume)
    settings = shared.settings_of(given)
    if resume:
        results, asked = resumed(resume, settings, given)
        if results.baseline.changes is None:
            raise UsageError(f"--resume {resume} is a comparison of ab: quantbench ab goes on")
        folder: Path | None = Path(resume)
    else:
        asked = limits(given)
        grid = read_grid(config, overs)
        folder = prepared(config.write_result, settings, output)
        if not any(option in NUMBERS for option in grid):
            settings.setdefault("tokens", 0)
        every = settings_of(config, grid)
        argvs = [setting.argv for setting in every]
        with closing(Process()) as worker:
            plans = worker.answer(list[Planned], "plans", argvs=argvs)
        able, refused = group(every, plans)
        for line in said(able, refused, plans[0].problem, len(every) - 1):
            say(line)
        if len(able) == 1:
            same = nothing_to_measure(able[0], refused, asked)
            shown = {"md": same.markdown(), "json": json.dumps({"answer": to_json(same)}, indent=1)}
            click.echo(shown.get(form or "", same.text()).rstrip("\n"))
            return
        warn_of_threads((arm.name, arm.config) for arm in able)
        results = Results.begin(Settings(**settings), [*able, *refused], config.write_result)
    conclude = partial(tuned, limits=asked, changes=[arm.changes or 0 for arm in results.arms])
    sys.exit(compare(results, folder, asked, conclude, form, show))


def nothing_to_measure(
    only: ArmResult, refused: Sequence[ArmResult], asked: Limits
) -> Recommendation:
    """The answer where there is one plan alone. Raises UsageError where others cannot run."""
    if refused:
        raise UsageError(
            f"--over: no setting but {only.name} can run here; {refused[0].name}: "
            f"{refused[0].unable}"
        )
    line = f"Keep {only.name}: every setting comes to the same plan, so there is nothing to "
    return Recommendation(asked, [], [], f"{line}measure")
