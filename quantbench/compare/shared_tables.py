"""Comparisons of several machines, or of several models, as one table."""

import math
from collections.abc import Sequence

from quantbench.compare.limits import Z
from quantbench.compare.recommend import Recommendation
from quantbench.compare.row import Row
from quantbench.compare.share_file import Comparison, Model
from quantbench.compare.tables import MAIN
from quantbench.report.columns import Columns, aligned, markdown, narrowed, with_error
from quantbench.report.page_templates import plain

Named = tuple[str, str, Row]  # the machine, the model, and an arm
COLUMNS: Columns[Named] = [
    ("machine", lambda of: of[0]),
    ("model", lambda of: of[1]),
    *((heading, lambda of, show=show: show(of[2])) for heading, show in MAIN[:7]),
]
NOTE = "× baseline is against the same machine's baseline: no interval is over two machines"


def collected(files: Sequence[Sequence[Comparison]], as_markdown: bool) -> str:
    """A row for each machine, model and arm that was timed; below, where each file is from."""
    machines = [first.about.machine for first, *_ in files]
    rows: list[Named] = []
    notes = []
    for place, (file, machine) in enumerate(zip(files, machines, strict=True), 1):
        name = f"{machine} ({place})" if machines.count(machine) > 1 else machine
        rows += [
            (name, of.model, row)
            for of in file
            for row in of.rows
            if row.speed_up is not None or row.verdict == "baseline"
        ]
        about = file[0].about
        torch, commit = about.versions.get("torch") or "unknown", about.commit or "unknown"
        notes.append(f"{name}: {about.date}, torch {torch}, commit {commit}")
    columns, constant = narrowed(COLUMNS, rows)
    notes = [*([constant] if constant else []), *notes, NOTE]
    if as_markdown:
        return "\n\n".join([markdown(columns, rows), *map(plain, notes)])
    return "\n".join([aligned(columns, rows), "", *notes])


# ------------------------------------------------------------------------------------ of models

Compared = tuple[Model, Row]  # an arm that is recommended, and its model
ACROSS: Columns[Compared] = [
    ("model", lambda of: of[0].name),
    ("arm", lambda of: of[1].arm),
    ("bits per byte", with_error(lambda of: of[0].bits_per_byte, lambda of: of[0].bits_error,
                                 ".4f")),
    *((heading, lambda of, show=show: show(of[1])) for heading, show in MAIN[1:6:2]),
]  # fmt: skip


def across(models: Sequence[tuple[Model, Recommendation]]) -> str:
    """What is recommended of each model, by bits per byte of the same texts, the fewest first."""
    by_bits = sorted(models, key=lambda pair: pair[0].bits_per_byte or math.inf)
    rows = [
        (model, row)
        for model, answer in by_bits
        for choice in answer.choices
        for row in model.rows
        if row.arm == choice.arm
    ]
    best, *others = (model for model, _ in by_bits)
    if best.bits_per_byte is None:
        verdict = "No model's bits per byte are known: none is shown to predict better"
    else:
        tied = [of.name for of in others if not _shown_worse(of, best)]
        verdict = f"{best.name} takes the fewest bits per byte"
        verdict += f"; not told apart from {', '.join(tied)}" if tied else ""
    note = (
        "Bits per byte are the baseline's, on the same texts; KL is what the scheme adds. Models "
        "were measured one after the other: their speeds have no common interval"
    )
    return "\n".join([aligned(ACROSS, rows), "", verdict, note])


def _shown_worse(model: Model, best: Model) -> bool:
    if model.bits_per_byte is None or best.bits_per_byte is None:
        return False
    error = math.hypot(model.bits_error or math.inf, best.bits_error or math.inf)
    return model.bits_per_byte - best.bits_per_byte > Z * error
