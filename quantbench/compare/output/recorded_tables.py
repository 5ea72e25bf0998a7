"""What recorded runs tell, for people: a table of settings, the groups of identical plans, the
answer, and what is wrong with the file."""

import csv
import io
import json
import math
from collections.abc import Callable

from quantbench.compare.figures.recorded import Conclusions, Group
from quantbench.compare.figures.recorded_answer import answer
from quantbench.compare.output.columns import Columns, aligned, markdown
from quantbench.text import counted
from quantbench.typed_json import to_json

MOST_PROBLEMS = 20  # that the terminal lists


def _mean(group: Group) -> str:
    mean = math.exp(sum(map(math.log, group.seconds)) / len(group.seconds))
    if len(group.seconds) == 1:
        return f"{mean:.2f} (one run)"
    return f"{mean:.2f} (range {min(group.seconds):.2f} to {max(group.seconds):.2f})"


COLUMNS: Columns[Group] = [
    ("setting", lambda row: row.name),
    ("plan", lambda row: row.plan or "-"),
    ("runs", lambda row: str(len(row.runs))),
    ("seconds", _mean),
    ("× default", lambda row: row.speed_up.written(".2f") if row.speed_up else "-"),
    ("verdict", lambda row: row.verdict),
]


def terminal(conclusions: Conclusions) -> str:
    lines = [
        _heading(conclusions),
        "",
        aligned(COLUMNS, conclusions.settings),
        "",
        *_plans(conclusions),
    ]
    lines += ["", *(f"Answer: {line}" for line in answer(conclusions))]
    remarks = _remarks(conclusions)
    return "\n".join([*lines, *(["", *remarks] if remarks else [])]) + "\n"


def as_markdown(conclusions: Conclusions) -> str:
    lines = [f"# {_heading(conclusions)}", "", *(f"- {line}" for line in answer(conclusions)), ""]
    lines += [
        markdown(COLUMNS, conclusions.settings),
        "",
        *(f"- {line}" for line in _plans(conclusions)),
    ]
    lines += [f"- {line}" for line in _remarks(conclusions)]
    return "\n".join(lines) + "\n"


def as_csv(conclusions: Conclusions) -> str:
    file = io.StringIO()
    keys = list(conclusions.settings[0].options)
    names = [*keys, "plan", "runs", "seconds", "speed_up", "low", "high", "confidence", "verdict"]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for group in conclusions.settings:
        ratio = group.speed_up
        cells = dict(zip(names[-5:-1], (ratio.value, ratio.low, ratio.high, ratio.confidence),
                         strict=True)) if ratio else {}  # fmt: skip
        seconds = "; ".join(f"{value:.6g}" for value in group.seconds)
        runs = "; ".join(map(str, group.runs))
        row = {**group.options, "plan": group.plan, "runs": runs, "seconds": seconds}
        writer.writerow({**row, **cells, "verdict": group.verdict})
    return file.getvalue()


def as_json(conclusions: Conclusions) -> str:
    value = {
        "file": conclusions.recording.path,
        "metric": conclusions.recording.metric,
        "seconds_from": conclusions.recording.source,
        "answer": answer(conclusions),
        "settings": to_json(conclusions.settings),
        "plans": to_json(conclusions.plans),
        "plan_words": conclusions.plan_words,
        "scatter": conclusions.scatter.deviation if conclusions.scatter.freedom else None,
        "scatter_freedom": conclusions.scatter.freedom,
        "options": to_json(conclusions.options),
        "confounded": conclusions.confounded,
        "problems": conclusions.recording.problems,
    }
    return json.dumps(value, indent=1)


FORMATS: dict[str, Callable[[Conclusions], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "json": as_json,
    "answer": lambda conclusions: "\n".join(answer(conclusions)),
}


def _heading(conclusions: Conclusions) -> str:
    recording = conclusions.recording
    return (
        f"{recording.title}: {counted(len(recording.runs), 'run')} of "
        f"{counted(len(conclusions.settings), 'setting')}, compared by {recording.metric} "
        f"({recording.source})"
    )


def _plans(conclusions: Conclusions) -> list[str]:
    """The groups of identical plans, and how far equal runs scatter."""
    lines = []
    for plan in conclusions.plans:
        members = [group for group in conclusions.settings if plan.name in group.plan.split(", ")]
        ratio = plan.speed_up
        over = f"; {ratio.written('.2f')} × the default's, {plan.verdict}" if ratio else ""
        lines.append(
            f"plan {plan.name}: {conclusions.plan_words[plan.name]}: "
            f"{counted(len(members), 'setting')} with identical plans, "
            f"{counted(len(plan.runs), 'run')}, {plan.span}{over}"
        )
    scatter = conclusions.scatter
    if scatter.freedom:
        lines.append(
            f"noise: {conclusions.noise_of} scatter by {scatter.deviation:.1%} "
            f"(standard deviation, {counted(scatter.freedom, 'degree')} of freedom)"
        )
    else:
        lines.append("noise: not known, as nothing was run twice")
    return lines


def _remarks(conclusions: Conclusions) -> list[str]:
    recording, default = conclusions.recording, conclusions.settings[0]
    named = ", ".join(f"{key}={value}" for key, value in default.options.items())
    lines = []
    if named:  # else there is one setting alone
        lines.append(
            f"the default is taken to be run {default.runs[0]}'s setting, {named}; --default "
            "KEY=VALUE names another"
        )
    words = {
        group.speed_up.word
        for group in (*conclusions.settings, *conclusions.plans)
        if group.speed_up
    }
    lines += [
        f"in brackets the {word}"
        + (": of the runs, too few for an interval or a verdict" if word == "range" else "")
        for word in sorted(words)
    ]
    lines += conclusions.confounded
    if recording.passed_over:
        passed = ", ".join(recording.passed_over)
        lines.append(f"not taken for settings, as they differ in every run: {passed}")
    several = [group.name for group in conclusions.settings if ", " in group.plan]
    if several:
        lines.append(f"of these settings runs had different plans: {'; '.join(several)}")
    problems = recording.problems
    lines += problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"and {len(problems) - MOST_PROBLEMS} more; all are in -o json")
    return lines
