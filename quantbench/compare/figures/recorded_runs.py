"""Runs that somebody recorded, read from JSON and held against themselves.

    recording = read("mixtral_runs.json", "generate")
    recording.runs[0].seconds           # of the metric
    recording.problems                  # "run 3: …", for each figure that cannot be right

The file is an object with a list of runs, or that list; the runs stand in the order of time.
recorded_times.py says what a run's keys are, and which of its times have to agree.
"""

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from quantbench import files
from quantbench.compare.figures.recorded_times import (
    METRICS,
    WHOLE,
    Damaged,
    Metric,
    Usual,
    checked,
    is_list,
    kind,
    times,
)
from quantbench.errors import UsageError
from quantbench.text import shown

COPIED = 3  # as many times that agree to the last digit are a copy, and no second run
Value = str | int | float | bool | None  # of a setting


@dataclass(frozen=True)
class Run:
    """One run that counts."""

    number: int  # in the file, from 1
    settings: Mapping[str, Value]
    plan: Mapping[str, Value]  # what was counted of it
    seconds: float  # of the metric


@dataclass(frozen=True)
class Recording:
    """A file of runs, in the order of time."""

    path: str
    title: str  # model and device, as the file has them
    metric: Metric
    source: str  # the keys that the seconds are from
    runs: list[Run]
    problems: list[str]
    given_default: Mapping[str, Value] = field(default_factory=dict)  # as the file names it
    passed_over: list[str] = field(default_factory=list)  # keys of no known kind, not settings


def read(path: str, metric: Metric) -> Recording:
    """Raises UsageError, one line, for a file that holds no two runs to compare."""
    document, raw = _runs_of(path)
    flat = {number: _flat(run) for number, run in enumerate(raw, 1) if isinstance(run, dict)}
    _refuse_other_work(path, list(flat.values()))
    usual = _usual(document, list(flat.values()))
    runs, problems, sources = _counted(flat, metric, usual)
    if len(runs) < 2 and metric == "generate":  # one clock may be wrong in all of them
        for name in WHOLE:
            more = _counted(flat, metric, replace(usual, distrusted=name))
            if len(more[0]) > len(runs):
                runs, problems, sources = more
    problems += [
        f"run {number}: it is no object but {shown(run, 40)}: left out"
        for number, run in enumerate(raw, 1)
        if not isinstance(run, dict)
    ]
    if len(runs) < 2:
        raise UsageError(_too_few(path, metric, len(raw), len(runs), problems))
    noise = [key for key in runs[0].settings if _is_measured([run.settings[key] for run in runs])]
    runs = [
        replace(run, settings={k: v for k, v in run.settings.items() if k not in noise})
        for run in runs
    ]
    title = " on ".join(str(document[key]) for key in ("model", "device") if document.get(key))
    default = document.get("default")
    used = " or ".join(dict.fromkeys(sources))
    return Recording(path, title or path, metric, used, runs, problems,
                     default if isinstance(default, dict) else {}, noise)  # fmt: skip


def _counted(
    flat: Mapping[int, Mapping[str, object]], metric: Metric, usual: Usual
) -> tuple[list[Run], list[str], list[str]]:
    """The runs that count, what is wrong with any, and where the seconds are from."""
    keys = dict.fromkeys(key for run in flat.values() for key in run if kind(key) == "setting")
    runs: list[Run] = []
    problems: list[str] = []
    sources: list[str] = []
    seen: dict[str, int] = {}
    for number, run in flat.items():
        first = seen.setdefault(_written(run) or str(number), number)
        if first != number:
            problems.append(f"run {number}: it is run {first} to the last digit: counted once")
            continue
        said, seconds, source = checked(run, metric, usual)
        problems += [f"run {number}: {line}" for line in said]
        if seconds is not None:
            settings = {key: cast(Value, run.get(key)) for key in keys}
            plan = {key: cast(Value, run[key]) for key in run if kind(key) == "plan"}
            runs.append(Run(number, settings, plan, seconds))
            sources.append(source)
    return runs, problems, sources


def _usual(document: Mapping[str, object], runs: Sequence[Mapping[str, object]]) -> Usual:
    """What most of the runs have. A key that more than half of them have is missed in others."""
    counts = Counter(key for run in runs for key in run)
    often = [key for key, count in counts.items() if 2 * count > len(runs)]
    lengths = [len(tokens) for run in runs if isinstance(tokens := run.get("token_ms"), list)]
    return Usual(
        _layers(document, runs),
        statistics.mode(lengths) if lengths else None,
        [key for key in often if kind(key) == "setting"],
        [key for key in often if kind(key) == "plan"],
    )


def _too_few(path: str, metric: Metric, count: int, left: int, problems: Sequence[str]) -> str:
    why = f": {problems[0]}" if problems else ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    others = " or ".join(f"--metric {name}" for name in METRICS if name != metric)
    which = "a single one" if left else "none"
    return (
        f"--recorded {path}: of {count} runs, {which} can be compared by --metric {metric}"
        f"{why}{more}; mend the file, or give {others}"
    )


def _runs_of(path: str) -> tuple[Mapping[str, object], list[object]]:
    """The file's other keys, and its runs."""
    whole = "give a file that was written to its end"
    document, named = files.read_json("--recorded", path, UsageError, whole), f"--recorded {path}"
    if isinstance(document, list):
        document = {"runs": document}
    if not isinstance(document, dict):
        raise UsageError(f'{named} holds {shown(document, 40)}, and no {{"runs": [...]}}')
    runs = document.get("runs")
    if runs is None:
        lists = [value for value in document.values() if is_list(value) and value
                 and all(isinstance(item, dict) for item in value)]  # fmt: skip
        runs = lists[0] if len(lists) == 1 else None
    if not is_list(runs) or not runs:
        raise UsageError(f'{named} holds no runs: it takes {{"runs": [{{"token_ms": ...}}, ...]}}')
    return document, runs


def _flat(run: Mapping[str, object], before: str = "") -> dict[str, object]:
    """A run's keys, those of objects inside it too."""
    flat: dict[str, object] = {}
    for key, value in run.items():
        if isinstance(value, dict):
            flat |= {name: v for name, v in _flat(value).items() if name not in flat}
        elif is_list(value) and kind(key) == "setting":
            flat[key] = json.dumps(value)
        else:
            flat[key] = value
    return flat


def _written(run: Mapping[str, object]) -> str | None:
    """A run's figures as text; None where they are too few for equal ones to be a copy."""
    times = [run[key] for key in run if kind(key) == "measured"]
    if sum(len(time) if isinstance(time, list) else 1 for time in times) < COPIED:
        return None
    return json.dumps({key: run[key] for key in run if kind(key) != "label"}, sort_keys=True)


def _is_measured(values: Sequence[Value]) -> bool:
    """Whether a key of unknown kind looks measured: a fraction, and another one in every run."""
    fractions = [value for value in values if isinstance(value, float) and value % 1]
    return len(fractions) == len(values) == len(set(fractions)) > 2


def _refuse_other_work(path: str, runs: Sequence[Mapping[str, object]]) -> None:
    for key in dict.fromkeys(key for run in runs for key in run if kind(key) == "work"):
        values = list(dict.fromkeys(str(run[key]) for run in runs if key in run))
        if len(values) > 1:
            raise UsageError(
                f"--recorded {path}: its runs do not do the same work: {key} is "
                f"{shown(values[0], 30)} and {shown(values[1], 30)}; give a file for each"
            )


def _layers(document: Mapping[str, object], runs: Sequence[Mapping[str, object]]) -> int | None:
    """The number of layers: as the file says, or as most of its runs have it."""
    for key in ("layers", "num_layers"):
        if isinstance(value := document.get(key), int) and value > 0:
            return value
    ratios = []
    for run in runs:
        try:
            pairs = zip(times(run, "token_ms"), times(run, "layer_ms"), strict=False)
            ratios += [token / layer for token, layer in pairs]
        except (KeyError, Damaged):
            continue
    return max(1, round(statistics.median(ratios))) if ratios else None
