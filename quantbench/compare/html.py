"""report.html: a comparison as one page that works offline, loads nothing and runs no script.

Pictures are SVG in data: URLs, in which a browser runs no script either.
"""

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quantbench.bench.store import ArmResult, Results
from quantbench.compare import pareto
from quantbench.compare.limit import span
from quantbench.compare.recommend import Recommendation
from quantbench.compare.row import Row
from quantbench.log import shell
from quantbench.quality.types import Quality
from quantbench.report.page_templates import filled
from quantbench.report.svg import COLOURS, drawn, tidy
from quantbench.run.facts import Facts
from quantbench.text import counted

FILE = "report.html"
# Percentiles of the decoding steps that are drawn; more of them in the slow tail, which matters.
PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 100)
MOST_TURNS = 400  # points of a line
Table = Sequence[Sequence[str]]  # headings, then a row for each arm
Line = tuple[Sequence[Any], Sequence[float | None]]  # x and y


def render(
    results: Results,
    rows: Sequence[Row],
    answer: Recommendation,
    tables: Sequence[Table],
    remarks: Sequence[str],
) -> str:
    run = first_run(results)
    return filled(
        FILE,
        title=named(results),
        subtitle=" · ".join([_date(results), counted(len(results.arms), "arm"), *_how(run)]),
        answer=answer,
        pictures=_pictures(results, rows),
        tables=tables,
        remarks=remarks,
        arms=[_arm(arm) for arm in results.arms],
        repeat=_repeat(results),
        machine=_machine(results, run),
    )


# --------------------------------------------------------------------------------------- pictures


def _pictures(results: Results, rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(heading, text, URL) of each picture that has data."""
    made = []
    if pareto.points(rows):
        file = io.StringIO()
        pareto.draw(rows, file)
        text = (
            "Up is faster, left is smaller. The dashed lines join the fastest arms of each size "
            "whose quality is not noticeably worse, and that is good."
        )
        made.append(("Speed, memory and quality", text, _url(file)))
    for heading, (text, x, y, line) in LINES.items():
        lines = {arm.name: line(results, arm) for arm in results.arms}
        if shown := {name: line for name, line in lines.items() if len(line[0])}:
            made.append((heading, text, _url(_drawn(shown, x, y))))
    return made


def _drawn(lines: dict[str, Line], x: str, y: str) -> io.StringIO:
    file = io.StringIO()
    with drawn(file, size=(10, 5)) as figure:
        axes = figure.add_subplot()
        for number, (name, (xs, ys)) in enumerate(lines.items()):
            dashes = ("-", "--", ":")[number // len(COLOURS) % 3]
            axes.plot(xs, ys, dashes, marker=".", color=COLOURS[number % len(COLOURS)])
            axes.lines[-1].set_label(name.replace("$", r"\$"))  # $…$ would be mathematics
        tidy(axes, x, y)
        if isinstance(next(iter(lines.values()))[0][0], str):
            axes.tick_params("x", rotation=90)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return file


def _url(svg: io.StringIO) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue().encode()).decode()}"


def _turns(results: Results, arm: ArmResult) -> Line:
    """Cycles and tokens per second of the arm's turns of decoding, MOST_TURNS of them at most; None
    between two processes."""
    x: list[float] = []
    y: list[float | None] = []
    turns = results.turns(results.arms.index(arm), "decode")
    turns = turns[:: 1 + len(turns) // MOST_TURNS]
    for before, turn in zip([None, *turns], turns, strict=False):
        if before and before.process != turn.process:
            x.append(turn.cycle - 0.5)
            y.append(None)
        x.append(turn.cycle)
        y.append(turn.tokens / turn.seconds)
    return x, y


def _latency(_: Results, arm: ArmResult) -> Line:
    steps = [1e3 * seconds for sample in arm.samples for seconds in sample.token_seconds]
    return (PERCENTS, [*np.percentile(steps, PERCENTS)]) if steps else ((), ())


def _layers(_: Results, arm: ArmResult) -> Line:
    layers = arm.quality.layers or [] if isinstance(arm.quality, Quality) else []
    return [layer.name for layer in layers], [layer.outputs for layer in layers]


# Heading: the text below it, both axes, and what an arm's line is.
LINES: dict[str, tuple[str, str, str, Callable[[Results, ArmResult], Line]]] = {
    "Speed of each turn of decoding": (
        "By cycle. A gap in a line is a new process of the arm.",
        "cycle", "tokens per second", _turns,
    ),
    "Latency of a decoding step": (
        "The share of steps that took at most this long. A rise at the right is a tail of late "
        "steps.", "percent of the steps", "ms", _latency,
    ),
    "Quality by layer": (
        "Signal-to-noise ratio of each linear layer's output against full precision: 20 dB is an "
        "error of a tenth.", "", "dB", _layers,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------ words


def first_run(results: Results) -> Facts | None:
    """A run of any arm that was loaded: all have machine, model and prompt in common."""
    return next((arm.run for arm in results.arms if arm.run), None)


def named(results: Results) -> str:
    """The model and the machine."""
    run = first_run(results)
    return f"{run.model} on {run.device.name}" if run else "Nothing was loaded"


def title(results: Results) -> str:
    """The title of a picture: TinyLlama-1.1B on a processor, decoder cpu-step, bfloat16, a date."""
    run = first_run(results)
    return ", ".join([named(results), *_how(run), *([_date(results)] if run else [])])


def _date(results: Results) -> str:
    return results.about.date if results.about else "date unknown"


def _how(run: Facts | None) -> list[str]:
    """How the arms decode, as far as they have it in common."""
    if run is None:
        return []
    config = run.config
    parts = ["compiled" if run.compiled_step else f"decoder {run.decoder}", config.precision]
    if config.num_layers is not None:
        parts.append(f"{config.num_layers} layers")
    if config.batch_size > 1:
        parts.append(f"batch size {config.batch_size}")
    if config.context_depth:
        parts.append(f"{config.context_depth} tokens already in the cache")
    return parts + ([f"{run.device.threads} threads"] if run.device.threads else [])


def _arm(arm: ArmResult) -> tuple[str, str, str]:
    """Name, facts and command."""
    if arm.run is None:
        about = (arm.facts and arm.facts.about) or "it never ran"
        return arm.name, about, words(arm)
    run = arm.run
    reason = f" ({run.decoder_reason})" if run.decoder_reason else ""
    attention = f" ({run.attention_reason})" if run.attention_reason else ""
    facts = [
        f"scheme {run.scheme}",
        f"kernel {run.kernel}",
        f"decoder {run.decoder}{reason}",
        f"attention {run.attention_kernel}{attention}",
        f"KV cache {run.kv_cache}, {run.cache_size} positions",
    ]
    return arm.name, " · ".join(facts), run.repro


def _machine(results: Results, run: Facts | None) -> dict[str, str]:
    """Machine, versions and settings, by heading. `run` is any arm's: all ran on one machine."""
    about = {"date": results.about.date} if results.about else {}
    if run:
        environment = run.environment
        cores = f" of {environment.cores} cores" if environment.cores else ""
        about["device"] = f"{run.device.name} ({run.device.type})"
        about["threads"] = f"{environment.threads}{cores}"
        about["prompt"] = f"{run.prompt_tokens} tokens, then {run.config.max_new_tokens} new ones"
        about |= {name: version for name, version in run.versions.items() if version}
        about["commit"] = run.git_commit or "unknown"
        about["huge pages"] = environment.system_huge_pages or "unknown"
        about |= environment.variables
    for device, readings in results.bandwidth.items():
        about[f"{device} reads memory at"] = span(readings)
    return about


def words(arm: ArmResult) -> str:
    """The arm as options of generate.py."""
    return shell.join(arm.argv) or arm.text


def _repeat(results: Results) -> str:
    """The command that repeats the whole comparison, on one line."""
    arms, settings = [("--arm", words(arm)) for arm in results.arms], results.settings
    given = ["--max_minutes", f"{settings.max_minutes:g}", "--tokens", str(settings.tokens)]
    given += ["--text", settings.text] if settings.text else []
    return shell.join(["quantbench", "ab", *(word for arm in arms for word in arm), *given])
