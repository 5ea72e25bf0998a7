"""A tune for people: one table of settings, which of them are one plan, and the answer."""

import json
from collections.abc import Sequence

from compare.figures.row import Row
from compare.output import tables
from compare.output.columns import Columns, aligned, interval
from compare.sampling.results import MOST_BESIDE, Results

SETTINGS: Columns[Row] = [
    ("setting", lambda row: row.arm),
    *tables.RATE,
    ("× default", interval(lambda row: row.speed_up, ".2f")),
    *tables.VERDICT,
    *tables.LATENCY,
]


def terminal(results: Results, rows: Sequence[Row]) -> str:
    """The table, remarks on it, and the answer last."""
    remarks = tables.remarks(results, rows, reasons=len(rows) <= MOST_BESIDE)
    return "\n".join([aligned(SETTINGS, rows), "", *remarks, "", tables.answer(results)])


def as_json(results: Results, rows: Sequence[Row]) -> str:
    """What results.json holds; "tune" is the answer."""
    return json.dumps(results.as_json(rows), indent=1)
