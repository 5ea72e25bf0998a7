"""quantbench recommend: measure what may suit, and say which quantization to take.

    quantbench recommend --checkpoint_path DIR --max_memory 8GB
    quantbench recommend --from results --max_perplexity_increase 5%   # of an earlier run

A shorter ab: every scheme that runs here and may satisfy --max_memory, compiled, against none.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantbench.cli import Command
from quantbench.compare.commands import ab
from quantbench.compare.figures.choices import Limits, Recommendation
from quantbench.compare.figures.recommendation import recommend as recommended
from quantbench.compare.figures.rows import best_of, rows
from quantbench.compare.limit_options import limit_options, limits
from quantbench.compare.sampling.answers import SchemeNames
from quantbench.compare.sampling.arm import make_arms
from quantbench.compare.sampling.process import Process
from quantbench.compare.sampling.results import Results, Settings
from quantbench.errors import KernelError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import options, parse
from quantbench.progress import say
from quantbench.quantize.spec import MEASURED
from quantbench.run import checks
from quantbench.text import shown, size

BASELINES = ("none", "int8wo")  # the first that fits into this machine's memory
DEFAULT = Settings()
UNUSED = (*ab.UNUSED, "quantization", "compile")


@click.command(cls=Command)
@limit_options
@click.option("--from", "earlier", metavar="DIR", help="Answer from a results folder of ab")
@click.option(
    "--max_minutes",
    type=click.FloatRange(0),
    help=f"Measure for at most so long [{DEFAULT.max_minutes}]",
)
@click.option("--text", help="A text file to measure quality on, instead of the embedded one")
@click.option(
    "--tokens", type=click.IntRange(1), help=f"Measure quality on so many tokens [{DEFAULT.tokens}]"
)
@click.option("--output", metavar="DIR", help="Put results, report and picture here, a new folder")
@options(without=UNUSED, defaults={"max_new_tokens": ab.MAX_NEW_TOKENS})
@click.pass_context
def recommend(
    context: click.Context,
    /,
    max_memory: str | None,
    max_perplexity_increase: str | None,
    min_tok_s: str | None,
    earlier: str | None,
    max_minutes: float | None,
    text: str | None,
    tokens: int | None,
    output: str | None,
    **given: Any,
) -> None:
    """Which quantization to take: the fastest that keeps quality, the smallest, the best mix."""
    asked = limits(max_memory, max_perplexity_increase, min_tok_s)
    common = dataclasses.replace(RunConfig(**given), compile=True)
    if earlier is not None:
        given_too = {"max_minutes": max_minutes, "text": text, "tokens": tokens, "output": output}
        wrong = [name for name, value in given_too.items() if value is not None]
        said = [
            name
            for name in given
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        ]
        wrong += [name for name in said if name not in ("checkpoint_path", "debug")]
        if wrong:
            raise UsageError(
                f"--{wrong[0]} would measure anew, and --from answers from what was measured: the "
                "other options are the limits and --checkpoint_path"
            )
        path = common.checkpoint_path if "checkpoint_path" in said else None
        answered(of_folder(Path(earlier), asked, path))
        return
    ab.check_text(text)
    checks.check_inputs(common)
    stops: dict[str, Any] = {"max_minutes": max_minutes, "text": text, "tokens": tokens}
    settings = Settings(**{name: value for name, value in stops.items() if value is not None})
    folder = ab.new_folder(output) if output else None
    ab.check_log(common.write_result, folder, text)
    schemes = candidates(common, asked)
    arms = make_arms(common, [f"--quantization {name}" for name in schemes])
    results = Results.begin(settings, arms, common.write_result)
    code = ab.compare(results, folder, "answer", asked)
    if code == 0 and results.recommendation and results.recommendation.nothing:
        keep = "with --output DIR, recommend --from DIR" if folder is None else f"--from {folder}"
        raise QuantbenchError(
            f"{results.recommendation.nothing}; {keep} answers other limits without measuring"
        )
    sys.exit(code)


def of_folder(folder: Path, asked: Limits, checkpoint_path: str | None) -> Recommendation:
    """The answer from a folder that ab wrote.

    checkpoint_path: of which model it has to be. Raises UsageError for a folder without results, or
    with those of another model.
    """
    results = Results.load(folder, "--from")
    models = {parse(arm.argv).checkpoint_path for arm in results.arms if arm.argv}
    if checkpoint_path is not None and models != {checkpoint_path}:
        raise UsageError(
            f"--from {folder} holds results of {', '.join(sorted(models))}, not of "
            f"--checkpoint_path {shown(checkpoint_path)}"
        )
    return recommended(rows(results), asked, best_of(results))


def answered(answer: Recommendation) -> None:
    """Print it. Raises QuantbenchError, one line, where no arm satisfies the limits."""
    if answer.nothing:
        raise QuantbenchError(answer.nothing)
    click.echo(answer.text())


def candidates(common: RunConfig, asked: Limits) -> list[str]:
    """The schemes to measure, the baseline first. autoquant is not among them: what it chooses
    from is. Raises UsageError where --max_memory is below all of them."""
    worker = Process()
    try:
        names = worker.answer(SchemeNames, "schemes", argv=argv(common)).schemes
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
