"""report.html: a comparison as one page that works offline and loads nothing from the network.

    write(folder, results, rows, table, remarks)

The page is assets/report.html filled by jinja2, which escapes arms' names: these are a person's
text. Charts are plotly's. A Content-Security-Policy allows these scripts only.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from quantbench.answer.readings import span
from quantbench.answer.recommend import Recommendation
from quantbench.answer.row import Row
from quantbench.bench.store import ArmResult, Results
from quantbench.log import shell
from quantbench.log.about import About
from quantbench.log.config import repro
from quantbench.quality.types import Quality
from quantbench.report.points import BANDS, COLOURS, LABELS, Point, points, staircase
from quantbench.run.facts import Facts
from quantbench.text import counted

FILE = "report.html"
FRONTS = {BANDS[0]: BANDS[:1], BANDS[1]: BANDS[:2]}  # bands of arms that a dashed line joins
# Percentiles of the decoding steps that are drawn; more of them in the slow tail, which matters.
PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 100)
MOST_TURNS = 400  # points of a line
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.S)
Table = Sequence[Sequence[str]]  # headings, then a row for each arm


def write(
    folder: Path,
    results: Results,
    rows: Sequence[Row],
    answer: Recommendation,
    table: Table,
    remarks: Sequence[str] = (),
) -> None:
    """The page, into the folder. remarks: sentences on the measurement. Raises OSError."""
    (folder / FILE).write_text(render(results, rows, answer, table, remarks), encoding="utf-8")


def render(
    results: Results,
    rows: Sequence[Row],
    answer: Recommendation,
    table: Table,
    remarks: Sequence[str],
) -> str:
    run = next((arm.facts.run for arm in results.arms if arm.facts and arm.facts.run), None)
    values: dict[str, Any] = {
        "title": f"{run.model} on {run.device.name}" if run else "Nothing was loaded",
        "subtitle": _subtitle(results, run),
        "answer": answer,
        "figures": _figures(results, rows),
        "table": table,
        "remarks": remarks,
        "arms": [_arm(arm) for arm in results.arms],
        "repeat": _repeat(results),
        "machine": _machine(results, run),
    }
    page = _template().render(**values, policy="")
    return page.replace('content=""', f'content="{_policy(page)}"', 1)


@cache
def _template() -> jinja2.Template:
    text = resources.files("quantbench.report").joinpath("assets", FILE)
    return jinja2.Environment(autoescape=True).from_string(text.read_text(encoding="utf-8"))


def _policy(page: str) -> str:
    """Scripts by their hash; inline styles, which plotly sets; pictures that the page makes."""
    hashes = {hashlib.sha256(script.encode()).digest() for script in SCRIPT.findall(page)}
    allowed = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


# ----------------------------------------------------------------------------------------- charts


def _figures(results: Results, rows: Sequence[Row]) -> list[tuple[str, str, Markup]]:
    """(heading, text, chart) of each chart that has data."""
    from plotly import graph_objects as go

    made: list[tuple[str, str, Markup]] = []

    def add(heading: str, text: str, traces: Sequence[Any], **axes: Any) -> None:
        if traces:
            figure = go.Figure(traces)
            clear, grey = "rgba(0,0,0,0)", "#808080"  # on light and dark pages
            figure.update_layout(
                paper_bgcolor=clear,
                plot_bgcolor=clear,
                font_color=grey,
                legend={"orientation": "h", "y": -0.2},
                margin={"t": 10},
                **axes,
            )
            figure.update_xaxes(gridcolor="#80808040").update_yaxes(gridcolor="#80808040")
            html = figure.to_html(
                {"displayModeBar": False}, full_html=False, include_plotlyjs=not made
            )
            made.append((heading, text, Markup(html)))

    log = {"type": "log"}
    add(
        "Speed, memory and quality",
        "Up is faster, left is smaller. The dashed lines join the fastest arms of each size whose "
        "quality is not noticeably worse, and that is good.",
        _pareto(go, [point for point in points(rows) if point.speed_up is not None]),
        xaxis=log | {"title": "peak memory, bytes (log scale)"},
        yaxis=log | {"title": "speed-up over the baseline (log scale)"},
    )

    def arms(lines: Callable[[ArmResult], tuple[Any, Any]]) -> list[Any]:
        traces = []
        for arm in results.arms:
            x, y = lines(arm)
            if len(x):
                traces.append(go.Scatter(x=x, y=y, name=escape(arm.name), connectgaps=False))
        return traces

    add(
        "Speed of each turn of decoding",
        "By cycle. A gap in a line is a new process of the arm.",
        arms(lambda arm: _turns(results, results.arms.index(arm))),
        xaxis_title="cycle",
        yaxis_title="tokens per second",
    )
    add(
        "Latency of a decoding step",
        "The share of steps that took at most this long. A rise at the right is a tail of late "
        "steps.",
        arms(_latency),
        xaxis_title="percent of the steps",
        yaxis=log | {"title": "ms (log scale)"},
    )
    add(
        "Quality by layer",
        "Signal-to-noise ratio of each linear layer's output against full precision: 20 dB is an "
        "error of a tenth.",
        arms(_layers),
        yaxis_title="dB",
    )
    return made


def _pareto(go: Any, shown: Sequence[Point]) -> list[Any]:
    traces = []
    fastest = {point.arm for point in shown if point.baseline}
    for band, bands in FRONTS.items():
        if steps := staircase(shown, bands):
            fastest |= {point.arm for point in steps}
            x = [*(p.memory_bytes for p in steps), max(p.memory_bytes for p in shown)]
            y = [*(p.speed_up for p in steps), steps[-1].speed_up]
            line = {"shape": "hv", "dash": "dash", "color": COLOURS[band]}
            traces.append(go.Scatter(x=x, y=y, mode="lines", line=line, showlegend=False))
    for band, label in LABELS.items():
        if own := [point for point in shown if point.band == band]:
            speeds = [point.speed_up or 0 for point in own]
            names = [escape(point.arm) for point in own]
            up = [(p.high or speed) - speed for p, speed in zip(own, speeds, strict=True)]
            down = [speed - (p.low or speed) for p, speed in zip(own, speeds, strict=True)]
            traces.append(
                go.Scatter(
                    x=[point.memory_bytes for point in own],
                    y=speeds,
                    error_y={"type": "data", "array": up, "arrayminus": down},
                    text=[name * (p.arm in fastest) for name, p in zip(names, own, strict=True)],
                    hovertext=names,
                    textposition="top center",
                    mode="markers+text",
                    marker={"color": COLOURS[band], "size": 10},
                    name=label,
                )
            )
    return traces


def _turns(results: Results, number: int) -> tuple[list[float], list[float | None]]:
    """Cycles and tokens per second of the arm's turns of decoding, MOST_TURNS of them at most; None
    between two processes."""
    x: list[float] = []
    y: list[float | None] = []
    turns = results.turns(number, "decode")
    turns = turns[:: 1 + len(turns) // MOST_TURNS]
    for before, turn in zip([None, *turns], turns, strict=False):
        if before and before.process != turn.process:
            x.append(turn.cycle - 0.5)
            y.append(None)
        x.append(turn.cycle)
        y.append(float(f"{turn.tokens / turn.seconds:.6g}"))
    return x, y


def _latency(arm: ArmResult) -> tuple[Sequence[float], Sequence[float]]:
    steps = [seconds for sample in arm.samples for seconds in sample.token_seconds]
    if not steps:
        return (), ()
    return PERCENTS, [float(f"{1e3 * s:.6g}") for s in np.percentile(steps, PERCENTS)]


def _layers(arm: ArmResult) -> tuple[Sequence[str], Sequence[float | None]]:
    layers = arm.quality.layers or [] if isinstance(arm.quality, Quality) else []
    return [layer.name for layer in layers], [layer.outputs for layer in layers]


# ------------------------------------------------------------------------------------------ words


def title(run: Facts | None, about: About | None) -> str:
    """The title of a picture: TinyLlama-1.1B on a processor, compiled, bfloat16, 2026-11-22."""
    if run is None:
        return "Nothing was loaded"
    date = about.date if about else "date unknown"
    return f"{run.model} on {run.device.name}, {', '.join(_how(run))}, {date}"


def _date(results: Results) -> str:
    return results.about.date if results.about else "date unknown"


def _subtitle(results: Results, run: Facts | None) -> str:
    how = _how(run) if run else []
    return " · ".join([_date(results), counted(len(results.arms), "arm"), *how])


def _how(run: Facts) -> list[str]:
    """How the arms decode, as far as they have it in common."""
    config = run.config
    parts = ["compiled" if config.compile else "not compiled", config.precision]
    if config.num_layers is not None:
        parts.append(f"{config.num_layers} layers")
    if config.batch_size > 1:
        parts.append(f"batch size {config.batch_size}")
    if config.context_depth:
        parts.append(f"{config.context_depth} tokens already in the cache")
    return parts + ([f"{run.device.threads} threads"] if run.device.threads else [])


def _arm(arm: ArmResult) -> tuple[str, str, str]:
    """Name, facts and command."""
    run = arm.facts.run if arm.facts else None
    facts = " · ".join(f"{name} {value}" for name, value in _ran(run).items())
    about = (arm.facts and arm.facts.about) or "it never ran"
    return arm.name, facts or about, repro(run.config) if run else shell.join(arm.argv) or arm.text


def _ran(run: Facts | None) -> dict[str, str]:
    if run is None:
        return {}
    reason = f" ({run.decoder_reason})" if run.decoder_reason else ""
    attention = f" ({run.attention_reason})" if run.attention_reason else ""
    return {
        "scheme": run.scheme,
        "kernel": run.kernel,
        "decoder": run.decoder + reason,
        "attention": run.attention_kernel + attention,
        "KV cache": f"{run.kv_cache}, {run.cache_size} positions",
    }


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


def _repeat(results: Results) -> str:
    """The command that repeats the whole comparison, on one line."""
    words = ["quantbench", "ab"]
    for arm in results.arms:
        words += ["--arm", shell.join(arm.argv) or arm.text]
    settings = results.settings
    words += ["--max_minutes", f"{settings.max_minutes:g}", "--tokens", str(settings.tokens)]
    return shell.join(words + (["--text", settings.text] if settings.text else []))
