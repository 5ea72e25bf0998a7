"""report.html: a comparison as one page that works offline and asks no network for anything.

    write(folder, results, rows)

The page is assets/report.html around three things: plotly's script, the scripts and the style of
assets/, and a block of JSON, from which they draw. Names of arms are a person's text: they are in
that block alone, and the scripts only ever set them as text. A Content-Security-Policy lets the
page run these scripts and no other, and load nothing.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

import numpy as np

from quantbench.compare.figures.readings import span
from quantbench.compare.figures.row import Row
from quantbench.compare.figures.rows import identical_plans
from quantbench.compare.output import pareto
from quantbench.compare.output.points import WORDS, points
from quantbench.compare.sampling.answers import Quality
from quantbench.compare.sampling.results import ArmResult, Results
from quantbench.log import shell
from quantbench.log.config import repro
from quantbench.run.facts import Facts
from quantbench.text import counted
from quantbench.typed_json import to_json

FILE = "report.html"
SCRIPTS = ("page.js", "charts.js", "table.js", "report.js")
# Percentiles of the decoding steps that are drawn; more of them in the slow tail, which matters.
PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 100)
SERIES_DIGITS = 6  # of a sample's figures, which are drawn, not read


def write(
    folder: Path,
    results: Results,
    rows: Sequence[Row],
    remarks: Sequence[str] = (),
) -> None:
    """The page, into the folder. Raises OSError."""
    page = render(results, rows, remarks)
    (folder / FILE).write_text(page, encoding="utf-8")


def render(
    results: Results,
    rows: Sequence[Row],
    remarks: Sequence[str],
) -> str:
    """The page's text.

    remarks: sentences on how it was measured
    """
    run = next((arm.facts.run for arm in results.arms if arm.facts and arm.facts.run), None)
    data = _finite(
        {
            "rows": to_json(rows),
            "points": [vars(point) for point in points(rows)],
            "front": pareto.front(rows),
            "bands": WORDS,
            "answer": _answer(results),
            "arms": [_arm(arm) for arm in results.arms],
            "percents": PERCENTS,
            "remarks": list(remarks),
            "machine": _machine(results, run),
            "repeat": _repeat(results),
        }
    )
    theme, plotly = _asset("theme.js"), _plotly()
    script = "\n".join(_asset(name) for name in SCRIPTS)
    return Template(_asset("report.html")).substitute(
        title=escape(f"{run.model} on {run.device.name}" if run else "Nothing was loaded"),
        subtitle=escape(_subtitle(results, run)),
        policy=_policy([theme, plotly, script]),
        style=_asset("report.css"),
        theme=theme,
        plotly=plotly,
        data=_in_script(data),
        script=script,
    )


def title(results: Results) -> str:
    """The title of a picture: TinyLlama-1.1B on a processor, compiled, bfloat16, 2026-11-22."""
    run = next((arm.facts.run for arm in results.arms if arm.facts and arm.facts.run), None)
    if run is None:
        return "Nothing was loaded"
    return f"{run.model} on {run.device.name}, {', '.join(_how(run))}, {_date(results)}"


def _date(results: Results) -> str:
    return results.about.date if results.about else "date unknown"


def _subtitle(results: Results, run: Facts | None) -> str:
    how = _how(run) if run else []
    what = "setting" if results.tune else "arm"
    return " · ".join([_date(results), counted(len(results.arms), what), *how])


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


def _answer(results: Results) -> dict[str, object] | None:
    """The answer in words, as the terminal has it: lines with their commands, and remarks."""
    if results.tune:
        first, *more = results.tune.lines
        lines = [(first, results.tune.command or ""), *((line, "") for line in more)]
        remarks = identical_plans(results)
    elif results.recommendation:
        recommendation = results.recommendation
        choices = [(choice.line(), choice.command) for choice in recommendation.choices]
        lines = choices or [(line, "") for line in recommendation.lines()]
        said = (recommendation.conditions(), recommendation.exclusions(), recommendation.note)
        remarks = [remark for remark in said if remark]
    else:
        return None
    return {
        "lines": [{"text": text, "command": command} for text, command in lines],
        "remarks": remarks,
    }


def _arm(arm: ArmResult) -> dict[str, object]:
    """What the page shows of an arm besides its row."""
    run = arm.facts.run if arm.facts else None
    steps = [seconds for sample in arm.samples for seconds in sample.token_seconds]
    return {
        "name": arm.name,
        "command": repro(run.config) if run else "",
        "options": shell.join(arm.argv) or arm.text,
        "samples": {
            "round": [sample.round for sample in arm.samples],
            "process": [sample.process for sample in arm.samples],
            "tok_s": [_rounded(sample.tok_s) for sample in arm.samples],
        },
        "latency_s": [_rounded(s) for s in np.percentile(steps, PERCENTS)] if steps else [],
        "layers": _layers(arm),
        "ran": _ran(run),
        "about": arm.facts.about if arm.facts else None,
    }


def _layers(arm: ArmResult) -> list[object]:
    """SQNR of each layer, where the results hold it."""
    quality = arm.quality if isinstance(arm.quality, Quality) else None
    return [to_json(layer) for layer in (quality and quality.layers) or []]


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
    if results.tune and results.about:
        return results.about.command
    words = ["quantbench", "ab"]
    for arm in results.arms:
        words += ["--arm", shell.join(arm.argv) or arm.text]
    settings = results.settings
    words += ["--max_minutes", f"{settings.max_minutes:g}", "--tokens", str(settings.tokens)]
    return shell.join(words + (["--text", settings.text] if settings.text else []))


def _rounded(value: float) -> float:
    return float(f"{value:.{SERIES_DIGITS}g}")


def _finite(value: object) -> object:
    """The value with None in place of infinity and not-a-number, for which JSON has no word."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _in_script(value: object) -> str:
    """The value as JSON for a script element: no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so no U+2028
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str]) -> str:
    """Scripts by their hash; style as plotly sets it; pictures that the page makes itself."""
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@cache
def _asset(name: str) -> str:
    text = resources.files("quantbench.compare.output").joinpath("assets", name)
    return text.read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly's own bundle, licence included."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script
