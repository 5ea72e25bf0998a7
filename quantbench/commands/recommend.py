"""quantbench recommend: measure what may suit, and say which quantization to take.

    quantbench recommend --checkpoint_path DIR --max_memory 8GB
    quantbench recommend --from results --max_kl 0.1        # of an earlier run

A shorter ab: every scheme that runs here and may satisfy --max_memory, compiled, against none; what
cannot win is not measured to the end.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantbench.answer.compared import Compared
from quantbench.answer.limits import Limits, limit_options, limits
from quantbench.answer.recommend import Recommendation
from quantbench.answer.recommend import recommend as recommended
from quantbench.answer.rows import rows
from quantbench.answer.stop import Enough
from quantbench.arguments import given_options
from quantbench.bench import store
from quantbench.bench.arm import make_arms
from quantbench.bench.process import Process
from quantbench.bench.store import Results, Settings
from quantbench.cli import Command
from quantbench.commands import ab
from quantbench.errors import KernelError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import options, parse
from quantbench.plans.comparing import check_log, check_text, compare, new_folder
from quantbench.progress import say
from quantbench.quantize.spec import MEASURED, START_WITH
from quantbench.run import checks
from quantbench.text import shown, size
from quantbench.typed_json import to_json

BASELINES = ("none", "int8wo")  # the first that fits into this machine's memory
UNUSED = (*ab.UNUSED, "quantization", "compile")
OF_EARLIER = ("earlier", "checkpoint_path", "debug", *vars(Limits()))


@click.command(cls=Command)
@limit_options
@click.option("--from", "earlier", metavar="DIR", help="Answer from a results folder of ab")
@ab.measuring_options
@options(without=UNUSED, defaults={"max_new_tokens": ab.MAX_NEW_TOKENS})
@click.pass_context
def recommend(
    context: click.Context, /, earlier: str | None, output: str | None, **given: Any
) -> None:
    """Which quantization to take: the fastest that keeps quality, the smallest, the best mix."""
    asked, settings = limits(given), ab.settings_of(given)
    common = dataclasses.replace(RunConfig(**given), compile=True)
    if earlier is not None:
        said = [parameter.name or "" for parameter in given_options(context)]
        if wrong := [name for name in said if name not in OF_EARLIER]:
            raise UsageError(
                f"--{wrong[0]} would measure anew, and --from answers from what was measured: the "
                "other options are the limits and --checkpoint_path"
            )
        path = common.checkpoint_path if "checkpoint_path" in said else None
        answer = of_folder(Path(earlier), asked, path)
        if answer.nothing:
            raise QuantbenchError(answer.nothing)
        click.echo(answer.text())
        return
    if settings.get("tokens") == 0:
        raise UsageError("--tokens 0: without quality there is no recommendation; quantbench ab "
                         "--arms all compares speeds alone")  # fmt: skip
    check_text(settings.get("text"))
    checks.check_inputs(common)
    folder = new_folder(output)
    check_log(common.write_result, folder, settings.get("text"))
    arms = make_arms(common, [f"--quantization {name}" for name in candidates(common, asked)])
    results = Results.begin(Settings(**settings), arms, common.write_result)
    results.limits = to_json(asked)
    say(
        f"{len(arms)} schemes on {common.checkpoint_path}, at most "
        f"{results.settings.max_minutes:g} min (--max_minutes)"
        + (f"; kept in {folder}" if folder else "; --output DIR keeps everything")
    )
    nothing = ""

    def conclude(rows: Any, best: Any) -> Recommendation:
        nonlocal nothing
        answer = recommended(rows, asked, best)
        nothing = answer.nothing or ""
        return answer

    code = compare(results, folder, Enough(asked, answer_only=True), conclude, "answer")
    if code == 0 and nothing:
        keep = "with --output DIR, recommend --from DIR" if folder is None else f"--from {folder}"
        raise QuantbenchError(f"{nothing}; {keep} answers other limits without measuring")
    sys.exit(code)


def of_folder(folder: Path, asked: Limits, checkpoint_path: str | None) -> Recommendation:
    """The answer from a folder that ab wrote.

    checkpoint_path: of which model it has to be. Raises UsageError for a folder without results, or
    with those of another model.
    """
    results = store.load(folder, "--from")
    models = {parse(arm.argv).checkpoint_path for arm in results.arms if arm.argv}
    if checkpoint_path is not None and models != {checkpoint_path}:
        raise UsageError(
            f"--from {folder} holds results of {', '.join(sorted(models))}, not of "
            f"--checkpoint_path {shown(checkpoint_path)}"
        )
    found = Compared(results)
    return recommended(rows(results, found), asked, found.best)


def candidates(common: RunConfig, asked: Limits) -> list[str]:
    """The schemes to measure, the baseline first. autoquant is not among them: what it chooses
    from is. Raises UsageError where --max_memory is below all of them."""
    worker = Process()
    try:
        names = worker.answer(list[str], "schemes", argv=argv(common))
    finally:
        worker.close()
    needs, free = needed(common, [name for name in names if name not in MEASURED])
    return select(needs, free, asked.max_memory)


def select(needs: Mapping[str, int], free: int | None, most: int | None) -> list[str]:
    """The schemes to measure: the baseline, and all that fit into memory.

    needs: bytes of weights and KV cache by scheme. most: the bytes that --max_memory allows, None
    for any. free: bytes free on this machine, None if not known. Says which schemes are left out,
    and raises UsageError where none fits.
    """
    smallest = min(needs, key=lambda name: needs[name])
    if most is not None and needs[smallest] > most:
        raise UsageError(
            f"--max_memory {size(most)}: the smallest scheme for this model, {smallest}, needs "
            f"{size(needs[smallest])} for weights and KV cache; allow more, or take a smaller model"
        )
    fitting = [name for name in BASELINES if name in needs and _fits(needs[name], free)]
    baseline = fitting[0] if fitting else smallest
    if baseline != BASELINES[0]:
        say(f"The baseline is {baseline}, as {BASELINES[0]} does not fit into {size(free or 0)}")
    others = [name for name in needs if name != baseline and _fits(needs[name], free)]
    # One scheme of each number of bits, then those with most: time may end before all are loaded,
    # and a variant is not tried where the quality of a finer variant is far from the limit.
    others.sort(key=lambda name: (name not in START_WITH, -needs[name]))
    left_out = [name for name in others if most is not None and needs[name] > most]
    if left_out:
        named = ", ".join(f"{name} ({size(needs[name])})" for name in left_out)
        say(f"Not measured, as weights and KV cache exceed --max_memory {size(most or 0)}: {named}")
    chosen = [baseline, *(name for name in others if name not in left_out)]
    if len(chosen) < 2:
        raise UsageError(
            f"only {baseline} is left to measure: allow more --max_memory, or take a smaller model"
        )
    return chosen


def _fits(bytes_needed: int, free: int | None) -> bool:
    return free is None or bytes_needed <= free


def needed(common: RunConfig, schemes: Sequence[str]) -> tuple[dict[str, int], int | None]:
    """Bytes of weights, embedding and KV cache for each scheme, as --dry_run counts them, and the
    bytes that are free. A scheme that cannot take the model's shapes is left out."""
    from quantbench import devices
    from quantbench.models.formats import open_checkpoint
    from quantbench.quantize.spec import parse_scheme
    from quantbench.run.plan import make_plan
    from quantbench.run.sizes import kv_cache_bytes, size_of

    if saved := open_checkpoint(common.checkpoint_path).saved:
        raise UsageError(
            f"--checkpoint_path {common.checkpoint_path} was saved as {saved.scheme}: schemes are "
            "compared on the full-precision checkpoint; give that one"
        )
    plan = make_plan(dataclasses.replace(common, quantization="none"))
    cache = kv_cache_bytes(
        plan.architecture, common.batch_size, plan.cache_size, plan.precision, plan.cache
    )
    needs = {}
    for name in schemes:
        try:
            spec = parse_scheme(name)
            weights = size_of(plan.architecture, spec, plan.device, plan.precision, common.kernel)
        except KernelError:
            continue
        needs[name] = weights.memory_bytes + cache
    return needs, devices.free_memory(plan.device)
