"""The block `latency` of a document: a row for each table and batch size."""

from collections.abc import Sequence

from quantbench.errors import LogError
from quantbench.latency.answer import Cell, Latencies, Table, latency_rows, rate_rows
from quantbench.report.block import captioned, file_of, read
from quantbench.report.columns import Columns, number

LatencyRow = tuple[Table, Cell]
LATENCY: Columns[LatencyRow] = (
    ("arm", lambda row: f"`{row[0].arm}`"),
    ("ranks", lambda row: str(row[0].ranks)),
    ("prompt, tokens", lambda row: str(row[0].sequence_length)),
    ("batch size", lambda row: str(row[1].batch_size)),
    ("TTFT, ms", number(lambda row: latency_rows([row[1]])[0].values["average"], ".1f")),
    ("prefill, tokens/s", number(lambda row: _rates(row)[0], ".0f")),
    ("TPOT, ms", number(lambda row: latency_rows([row[1]])[1].values["average"], ".1f")),
    ("decode, tokens/s", number(lambda row: _rates(row)[2], ".1f")),
)


def _rates(row: LatencyRow) -> list[float]:
    """Averages: tokens/s and requests/s of prefill, tokens/s of decoding."""
    table, cell = row
    return [each.values["average"] for each in rate_rows([cell], table.sequence_length)]


def latency(words: Sequence[str]) -> str:
    """latency FILE: the results.json of `latency --output`, a row for each table and batch size."""
    path = file_of(words)
    results = read(Latencies, path)
    if results.about is None:
        raise LogError(f"{path} does not say where it was measured")
    rows = [(table, cell) for table in results.tables for cell in table.cells]
    return captioned(LATENCY, rows, results.about)
