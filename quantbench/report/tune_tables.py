"""A tune for people: one table of settings, which of them are one plan, and the answer."""

import json
from collections.abc import Callable, Mapping, Sequence

from quantbench.answer.choices import TuneAnswer
from quantbench.answer.row import Row
from quantbench.compare.sampling.results import MOST_BESIDE, Results
from quantbench.report import tables
from quantbench.report.columns import Columns, aligned, interval
from quantbench.typed_json import to_json

SETTINGS: Columns[Row] = [
    ("setting", lambda row: row.arm),
    *tables.RATE,
    ("× default", interval(lambda row: row.speed_up, ".2f")),
    *tables.VERDICT,
    *tables.TYPICAL_STEP,
    *tables.LATENCY,
]


# An answer that took no measuring, by --format; as text in every other.
ALONE: Mapping[str, Callable[[TuneAnswer], str]] = {
    "md": TuneAnswer.markdown,
    "json": lambda answer: json.dumps({"tune": to_json(answer)}, indent=1),
}


def terminal(results: Results, rows: Sequence[Row]) -> str:
    """The table, remarks on it, and the answer last."""
    remarks = tables.remarks(results, rows, reasons=len(rows) <= MOST_BESIDE)
    return "\n".join([aligned(SETTINGS, rows), "", *remarks, "", tables.answer(results)])


def as_json(results: Results, rows: Sequence[Row]) -> str:
    """What results.json holds; "tune" is the answer."""
    return json.dumps(results.as_json(rows), indent=1)
