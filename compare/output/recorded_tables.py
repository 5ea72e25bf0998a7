"""What recorded runs tell, for people: a table of settings, the groups of identical plans, the
answer, and what is wrong with the file."""

import csv
import io
import json
import math
from collections.abc import Callable

from compare.figures.recorded import Conclusions, Group
from compare.figures.recorded_answer import answer
from compare.output.columns import Columns, aligned, markdown
from text import counted
from typed_json import to_json

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


def terminal(found: Conclusions) -> str:
    lines = [_heading(found), "", aligned(COLUMNS, found.settings), "", *_plans(found)]
    lines += ["", *(f"Answer: {line}" for line in answer(found))]
    remarks = _remarks(found)
    return "\n".join([*lines, *(["", *remarks] if remarks else [])]) + "\n"


def as_markdown(found: Conclusions) -> str:
    lines = [f"# {_heading(found)}", "", *(f"- {line}" for line in answer(found)), ""]
    lines += [markdown(COLUMNS, found.settings), "", *(f"- {line}" for line in _plans(found))]
    lines += [f"- {line}" for line in _remarks(found)]
    return "\n".join(lines) + "\n"


def as_csv(found: Conclusions) -> str:
    file = io.StringIO()
    keys = list(found.settings[0].options)
    names = [*keys, "plan", "runs", "seconds", "speed_up", "low", "high", "confidence", "verdict"]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for group in found.settings:
        ratio = group.speed_up
        cells = dict(zip(names[-5:-1], (ratio.value, ratio.low, ratio.high, ratio.confidence),
                         strict=True)) if ratio else {}  # fmt: skip
        seconds = "; ".join(f"{value:.6g}" for value in group.seconds)
        runs = "; ".join(map(str, group.runs))
        row = {**group.options, "plan": group.plan, "runs": runs, "seconds": seconds}
        writer.writerow({**row, **cells, "verdict": group.verdict})
    return file.getvalue()


def as_json(found: Conclusions) -> str:
    value = {
        "file": found.recording.path,
        "metric": found.recording.metric,
        "seconds_from": found.recording.source,
        "answer": answer(found),
        "settings": to_json(found.settings),
        "plans": to_json(found.plans),
        "plan_words": found.plan_words,
        "scatter": found.scatter.deviation if found.scatter.freedom else None,
        "scatter_freedom": found.scatter.freedom,
        "options": to_json(found.options),
        "confounded": found.confounded,
        "problems": found.recording.problems,
    }
    return json.dumps(value, indent=1)


FORMATS: dict[str, Callable[[Conclusions], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "json": as_json,
    "answer": lambda found: "\n".join(answer(found)),
}


def _heading(found: Conclusions) -> str:
    recording = found.recording
    return (
        f"{recording.title}: {counted(len(recording.runs), 'run')} of "
        f"{counted(len(found.settings), 'setting')}, compared by {recording.metric} "
        f"({recording.source})"
    )


def _plans(found: Conclusions) -> list[str]:
    """The groups of identical plans, and how far equal runs scatter."""
    lines = []
    for plan in found.plans:
        members = [group for group in found.settings if plan.name in group.plan.split(", ")]
        ratio = plan.speed_up
        over = f"; {ratio.written('.2f')} × the default's, {plan.verdict}" if ratio else ""
        lines.append(
            f"plan {plan.name}: {found.plan_words[plan.name]}: "
            f"{counted(len(members), 'setting')} with identical plans, "
            f"{counted(len(plan.runs), 'run')}, {plan.span}{over}"
        )
    scatter = found.scatter
    if scatter.freedom:
        lines.append(
            f"noise: {found.noise_of} scatter by {scatter.deviation:.1%} (standard deviation, "
            f"{counted(scatter.freedom, 'degree')} of freedom)"
        )
    else:
        lines.append("noise: not known, as nothing was run twice")
    return lines


def _remarks(found: Conclusions) -> list[str]:
    recording, default = found.recording, found.settings[0]
    named = ", ".join(f"{key}={value}" for key, value in default.options.items())
    lines = []
    if named:  # else there is one setting alone
        lines.append(
            f"the default is taken to be run {default.runs[0]}'s setting, {named}; --default "
            "KEY=VALUE names another"
        )
    words = {group.speed_up.word for group in (*found.settings, *found.plans) if group.speed_up}
    lines += [
        f"in brackets the {word}"
        + (": of the runs, too few for an interval or a verdict" if word == "range" else "")
        for word in sorted(words)
    ]
    lines += found.confounded
    if recording.passed_over:
        passed = ", ".join(recording.passed_over)
        lines.append(f"not taken for settings, as they differ in every run: {passed}")
    several = [group.name for group in found.settings if ", " in group.plan]
    if several:
        lines.append(f"of these settings runs had different plans: {'; '.join(several)}")
    problems = recording.problems
    lines += problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"and {len(problems) - MOST_PROBLEMS} more; all are in -o json")
    return lines
