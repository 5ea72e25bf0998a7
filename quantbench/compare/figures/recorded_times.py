"""One recorded run: what kind each of its keys is, its seconds, and what contradicts itself.

    said, seconds, source = checked(run, "generate", usual)

A run's keys are told apart by their names: times, with their unit (token_ms, generate_ms,
prefill_s), what was counted of the plan (experts_on_gpu, hit_rate), labels, and settings: all
others.

Times that are recorded twice have to agree: token_ms, the first of which is the prompt's, sum up to
generate_ms and to prefill_s + decode_s, and are layer_ms × the number of layers. A run whose
figures of the metric contradict each other is left out: nobody can say which of them is right.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantbench.text import shown

Metric = Literal["generate", "prefill", "decode"]
METRICS: tuple[Metric, ...] = ("generate", "prefill", "decode")
# Keys of which one is needed.
NEEDED = {
    "generate": ("generate_ms", "token_ms"),
    "prefill": ("prefill_s", "token_ms"),
    "decode": ("decode_s", "token_ms"),
}
POSITIVE = r"threads|latency.*"  # settings that cannot be 0 or less
AGREE = 0.01  # relative: recorded clocks differ by 0.2 %, as one of them ends later
SECONDS = {"_ns": 1e-9, "_us": 1e-6, "_ms": 1e-3, "_s": 1.0, "_seconds": 1.0}
UNITS = {1e3: "1000 times too long", 1e-3: "a thousandth: seconds in place of milliseconds?"}
WHOLE = (
    "generate",
    "total",
    "elapsed",
    "runtime",
    "duration",
    "wall",
)  # names of the time of a whole run
# Kinds of keys, by pattern; the first that fits the whole key counts.
KINDS = {
    "work": r"model|model_name|prompt|new_tokens|max_new_tokens|prompt_tokens|batch_size",
    "measured": r"(.*_)?(ns|us|ms|s|seconds)|.*(peak|joules|watts|utilization).*|tok.*_per_.*",
    "plan": r"experts|experts_.*|hits?|hits?_.*|miss(es)?|miss(es)?_.*|.*_rate|assignments|"
    r"bytes_.*",
    "label": r"notes?|comment|id|run|run_id|number|index|name|date|time|timestamp|started|ended|"
    r"seed|repeat|repetition|trial|text|output|answer",
}


@dataclass(frozen=True)
class Usual:
    """What most runs of a file have in common."""

    layers: int | None  # token_ms ÷ layer_ms
    tokens: int | None  # how many token_ms there are
    settings: list[str]  # keys that each run should have
    plan: list[str]
    distrusted: str = ""  # a time that contradicts all others in every run: "generate"


class Damaged(Exception):
    """A figure that is no time."""


def kind(key: str) -> str:
    """work, measured, plan, label or setting."""
    kinds = (kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, key))
    return next(kinds, "setting")


def is_list(value: object) -> bool:
    return isinstance(value, list)


def checked(
    run: Mapping[str, object], metric: Metric, usual: Usual
) -> tuple[list[str], float | None, str]:
    """What is wrong with a run, its seconds if it counts, and which keys they are from."""
    wrong = [*_setting_problems(run, usual), *_plan_problems(run, usual)]  # it is left out
    tokens = run.get("token_ms")
    if isinstance(tokens, list) and len(tokens) != usual.tokens:
        wrong.append(f"it has {len(tokens)} token_ms, and most runs have {usual.tokens}")
    layer_problem = _layer_problem(run, usual.layers)
    said = [layer_problem] if layer_problem else []
    seconds: float | None = None
    source = ""
    for name in METRICS:
        figures, damaged = _sources(run, name)
        lines = contradictions(figures)
        said += [line for line in (*damaged, *lines) if line not in said]
        if name != metric:
            continue
        trusted = {key: time for key, time in figures.items() if _base(key) != usual.distrusted}
        if usual.distrusted and len(trusted) > 1:
            figures, lines = trusted, contradictions(trusted)
        if not figures and not damaged:
            wrong.append(f"it has no time to {name}: {' or '.join(NEEDED[name])} is missing")
        elif damaged or lines:
            wrong += [line for line in (*damaged, *lines) if line not in wrong]
        else:
            source, seconds = next(iter(figures.items()))
            wrong += [layer_problem] if layer_problem and "token_ms" in source else []
    said = [*wrong, *(line for line in said if line not in wrong)]
    if wrong:
        return [f"{line}: left out" if line in wrong else line for line in said], None, ""
    return said, seconds, source


def _sources(run: Mapping[str, object], metric: Metric) -> tuple[dict[str, float], list[str]]:
    """Seconds of the metric by what they are from, and what is damaged among them."""
    seconds: dict[str, float] = {}
    damaged: list[str] = []

    def add(name: str, *keys: str, first: int = 0, last: int | None = None) -> None:
        if not keys or any(key not in run for key in keys):
            return
        try:
            values = [time for key in keys for time in times(run, key)[first:last]]
            if values:
                seconds[name] = sum(values)
        except Damaged as error:
            damaged.append(str(error))

    if metric == "generate":
        for key in (key for key in run if _base(key) in WHOLE):
            add(key, key)
        parts = [next((k for k in run if _base(k) == part), "") for part in ("prefill", "decode")]
        if all(parts):
            add(" + ".join(parts), *parts)
        for key in (key for key in run if _base(key) == "token"):
            add(f"the sum of {key}", key)
        return seconds, damaged
    for key in (key for key in run if _base(key) == metric):
        add(key, key)
    for key in (key for key in run if _base(key) == "token"):
        if metric == "prefill":
            add(f"the first of {key}", key, last=1)
        else:
            add(f"the sum of {key} after the first", key, first=1)
    return seconds, damaged


def _base(key: str) -> str:
    """A time's name without its unit; "" for what is no time."""
    unit = _unit(key)
    return (f"_{key}".removesuffix(unit)[1:] or WHOLE[0]) if unit else ""


def _unit(key: str) -> str:
    """The unit at the end of a key, one of SECONDS; "" for what is no time. A key that is a unit
    alone, as seconds, is the time of the whole run."""
    return next((unit for unit in SECONDS if f"_{key}".endswith(unit)), "")


def times(run: Mapping[str, object], key: str) -> list[float]:
    """Seconds, above 0. Raises Damaged, KeyError."""
    value, unit = run[key], SECONDS[_unit(key)]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise Damaged(f"{key} is empty")
    return [unit * _number(f"{key}{f'[{n}]' if isinstance(value, list) else ''}", item)
            for n, item in enumerate(values)]  # fmt: skip


def _number(name: str, value: object) -> float:
    if value is None:
        raise Damaged(f"{name} is missing (null)")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Damaged(f"{name} is no number but {shown(value, 30)}")
    if math.isnan(value) or math.isinf(value):
        raise Damaged(f"{name} is {'NaN' if math.isnan(value) else 'infinite'}")
    if value <= 0:
        raise Damaged(f"{name} is {value:g}, and a time is above 0")
    return float(value)


def contradictions(figures: Mapping[str, float]) -> list[str]:
    """Pairs of figures of the same time that differ."""
    lines: list[str] = []
    (first, seconds), *others = [*figures.items()] or [("", 0.0)]
    for name, other in others:
        ratio = seconds / other
        if abs(ratio - 1) > AGREE:
            hints = (words for unit, words in UNITS.items() if abs(ratio / unit - 1) < 0.05)
            hint = next(hints, "")
            lines.append(
                f"{first} is {seconds:.6g} s, and {name} {other:.6g} s"
                f"{f' ({hint})' if hint else ''}"
            )
    return lines


def _layer_problem(run: Mapping[str, object], layers: int | None) -> str | None:
    """Whether layer_ms are token_ms ÷ the number of layers."""
    if "layer_ms" not in run or "token_ms" not in run or layers is None:
        return None
    try:
        tokens, own = times(run, "token_ms"), times(run, "layer_ms")
    except Damaged as error:
        return None if "token_ms" in str(error) else str(error)
    if len(tokens) != len(own):
        return f"{len(own)} layer_ms for {len(tokens)} token_ms"
    for number, (token, layer) in enumerate(zip(tokens, own, strict=True)):
        if abs(layer * layers / token - 1) > AGREE:
            return (
                f"layer_ms[{number}] is {1e3 * layer:.6g}, and token_ms[{number}] ÷ {layers} "
                f"layers {1e3 * token / layers:.6g}"
            )
    return None


def _setting_problems(run: Mapping[str, object], usual: Usual) -> list[str]:
    """Settings that cannot be known."""
    lines = []
    for key in usual.settings:
        if key not in run:
            lines.append(f"{key} is missing, so its setting is not known")
    for key, value in run.items():
        if kind(key) != "setting" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isnan(value):
            lines.append(f"{key} is NaN, so its setting is not known")
        elif value <= 0 and re.fullmatch(POSITIVE, key):
            lines.append(f"{key} is {value:g}, and it is above 0")
    return lines


def _plan_problems(run: Mapping[str, object], usual: Usual) -> list[str]:
    """Counts and shares that cannot be."""
    lines = [f"{key} is missing, so its plan is not known" for key in usual.plan if key not in run]
    for key, value in run.items():
        if kind(key) != "plan" or isinstance(value, str | bool):
            continue
        if not isinstance(value, int | float) or math.isnan(value) or value < 0:
            lines.append(f"{key} is {value}, so its plan is not known")
        elif key.endswith("_rate") and value > 1:
            lines.append(f"{key} is {value:g}, and a share is at most 1")
    on, of = run.get("experts_on_gpu"), run.get("experts")
    if isinstance(on, int) and isinstance(of, int) and on > of:
        lines.append(f"experts_on_gpu is {on}, of {of} experts")
    return lines
