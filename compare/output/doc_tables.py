"""The tables of the documentation: a function each, from a file that is committed to Markdown.

    TABLES["roofline"](["docs/data/roofline_tinyllama.json"])

Under each table stands where its figures come from: machine, versions, day, commit, command. A
figure that was not measured is a dash.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import files
from benchlog import log
from benchlog.about import About
from compare.figures.json_rows import DecodeRow, PeerRow, SchemeRow
from compare.figures.latency import Cell, latency_rows, rate_rows
from compare.figures.row import Row
from compare.output import doc_reference, log_tables
from compare.output.columns import (
    Columns,
    interval,
    markdown,
    number,
    percent,
    size,
    with_error,
)
from compare.output.doc_data import Compared, read
from compare.output.documents import Block
from compare.sampling.latency_results import LatencyResults, TableResult
from errors import LogError, UsageError

R = TypeVar("R")


def one_file(words: Sequence[str]) -> str:
    if not words:
        raise UsageError("this table needs the name of a file behind its own")
    return words[0]


def captioned(columns: Columns[R], rows: Sequence[R], about: About) -> str:
    return f"{markdown(columns, rows)}\n\n{about.caption()}"


def code(read: Callable[[R], str | None]) -> Callable[[R], str]:
    """A name as it is typed."""
    return lambda row: f"`{read(row)}`"


def printed(words: Sequence[str]) -> str:
    """printed FILE: what a command printed, as it is."""
    text = files.read_text("cannot read", one_file(words), LogError)
    return "```\n" + text.rstrip() + "\n```"


def runs(words: Sequence[str]) -> str:
    """runs FILE: the newest line of each kind in a log."""
    path = one_file(words)
    by_group = log_tables.groups([record for _, record in log.read(path).records])
    if not by_group:
        raise LogError(f"{path} holds no line of a run")
    return log_tables.tables(by_group)


# ------------------------------------------------------------------------------------------- speeds


def speeds(words: Sequence[str]) -> str:
    """speeds FILE [ARM …]: arms as `ab --output` left them in results.json; all that were measured,
    or those named, underscores for the spaces in a name."""
    path, *names = one_file(words), *words[1:]
    data = read(Compared, path)
    rows = [row for row in data.rows if row.tok_s is not None]
    if names:
        by_name = {row.arm.replace(" ", "_"): row for row in rows}
        if missing := [name for name in names if name not in by_name]:
            raise UsageError(f"{path} measured no arm {missing[0]}; it has {', '.join(by_name)}")
        rows = [by_name[name] for name in names]
    ends = {row.speed_up.word for row in rows if row.speed_up} - {"range"} or {"range"}
    columns: Columns[Row] = [
        ("", code(lambda row: row.arm)),
        ("decode, tok/s", number(lambda row: row.decode_tok_s, ".1f")),
        ("of the limit", number(lambda row: row.bandwidth_share, ".0%")),
        (f"speed-up ({', '.join(ends)})", _speed_up),
        ("weights", lambda row: size(row.weight_bytes or None)),
        ("peak memory", _peak),
        (
            "perplexity ÷ baseline's (95 % interval)",
            interval(lambda row: row.perplexity_ratio, ".4f"),
        ),
    ]
    return captioned(columns, rows, data.about)


def _speed_up(row: Row) -> str:
    if row.speed_up:
        return row.speed_up.written(".2f")
    return "1" if row.verdict == "baseline" else "-"


def _peak(row: Row) -> str:
    peaks = (row.peak_memory_bytes or {}).get("generate") or {}
    return size(max(peaks.values(), default=None))


# ------------------------------------------------------------------ schemes, roofline and peers


@dataclasses.dataclass(frozen=True)
class _Schemes:
    about: About
    rows: list[SchemeRow]


RATIO: Callable[[SchemeRow], str] = with_error(
    lambda row: row.ratio, lambda row: row.ratio_standard_error, ".4f"
)
SCHEMES: Columns[SchemeRow] = [
    ("scheme", code(lambda row: row.scheme)),
    ("bits per weight", number(lambda row: row.bits_per_weight, ".2f")),
    ("GGUF type", lambda row: row.gguf or "-"),
    ("perplexity", number(lambda row: row.perplexity, ".2f")),
    (
        "÷ full precision (± standard error)",
        lambda row: "1" if row.scheme == "none" else RATIO(row),
    ),
]


def quality(words: Sequence[str]) -> str:
    """quality FILE: what `schemes --measure --json FILE` wrote."""
    data = read(_Schemes, one_file(words))
    return captioned(SCHEMES, [row for row in data.rows if row.perplexity is not None], data.about)


@dataclasses.dataclass(frozen=True)
class _Roofline:
    about: About
    model: list[DecodeRow] | None


ROOFLINE: Columns[DecodeRow] = [
    ("scheme", code(lambda row: row.scheme)),
    ("decode, tok/s", number(lambda row: row.decode_tok_s, ".1f")),
    ("limit, tok/s", number(lambda row: row.limit_tok_s, ".1f")),
    ("of the limit", percent(lambda row: row.limit_share)),
    ("÷ `none`", interval(lambda row: row.speed_up, ".2f")),
    (
        "stock kernel, tok/s",
        number(lambda row: row.stock.decode_tok_s if row.stock else None, ".1f"),
    ),
    ("÷ stock", number(lambda row: row.over_stock, ".2f")),
]


def roofline(words: Sequence[str]) -> str:
    """roofline FILE: whole models against memory's limit, as `roofline --json FILE` wrote them."""
    data = read(_Roofline, one_file(words))
    return captioned(ROOFLINE, data.model or [], data.about)


@dataclasses.dataclass(frozen=True)
class _Peers:
    about: About
    rows: list[PeerRow]


PEERS: Columns[PeerRow] = [
    ("ours", code(lambda row: row.scheme)),
    ("theirs", lambda row: row.beside),
    ("decode: ours, tok/s", number(lambda row: row.decode_ours_tok_s, ".1f")),
    ("theirs", number(lambda row: row.decode_theirs_tok_s, ".1f")),
    ("ratio", interval(lambda row: row.decode_ratio, ".2f")),
    ("prompt: ours, tok/s", number(lambda row: row.prompt_ours_tok_s, ".0f")),
    ("theirs", number(lambda row: row.prompt_theirs_tok_s, ".0f")),
    ("ratio", interval(lambda row: row.prompt_ratio, ".2f")),
]


def peers(words: Sequence[str]) -> str:
    """peers FILE: ours beside other runtimes, as `peers --json FILE` wrote them."""
    data = read(_Peers, one_file(words))
    return captioned(PEERS, data.rows, data.about)


# ------------------------------------------------------------------------------------------- trust


@dataclasses.dataclass(frozen=True)
class _Share:
    """A share of cases, with the ends of its Clopper-Pearson interval."""

    count: int
    of: int
    low: float
    high: float

    def __str__(self) -> str:
        value = self.count / self.of if self.of else math.nan
        return f"{value:.1%} ({self.low:.1%} to {self.high:.1%})"


def share(read: Callable[[R], _Share | None]) -> Callable[[R], str]:
    return lambda row: str(read(row) or "-")


@dataclasses.dataclass(frozen=True)
class _Cell:
    cell: str
    mode: str
    trials: int
    processes_per_candidate: float | None
    false_verdicts: _Share
    coverage_95: _Share | None
    found: _Share | None


@dataclasses.dataclass(frozen=True)
class _Trust:
    date: str
    command: str
    cells: list[_Cell]


SIMULATED: Columns[_Cell] = [
    ("arms", lambda cell: cell.mode),
    ("what differs", lambda cell: cell.cell),
    ("runs", lambda cell: str(cell.trials)),
    ("false verdicts", share(lambda cell: cell.false_verdicts)),
    ("95 % intervals that hold", share(lambda cell: cell.coverage_95)),
    ("differences found", share(lambda cell: cell.found)),
    ("processes an arm", number(lambda cell: cell.processes_per_candidate, ".0f")),
]


def trust(words: Sequence[str]) -> str:
    """trust FILE: how often comparisons erred, as `make trust` wrote it."""
    data = read(_Trust, one_file(words))
    return f"{markdown(SIMULATED, data.cells)}\n\n<sub>{data.date}: `{data.command}`</sub>"


@dataclasses.dataclass(frozen=True)
class _RealCell:
    cell: str
    runs: int
    blocks_mean: float
    false_verdicts: _Share
    coverage_shown: _Share | None
    found: _Share | None


@dataclasses.dataclass(frozen=True)
class _RealTrust:
    about: About
    cells: list[_RealCell]


REAL: Columns[_RealCell] = [
    ("what differs", lambda cell: cell.cell),
    ("runs", lambda cell: str(cell.runs)),
    ("false verdicts", share(lambda cell: cell.false_verdicts)),
    ("intervals shown that hold", share(lambda cell: cell.coverage_shown)),
    ("differences found", share(lambda cell: cell.found)),
    ("processes an arm", number(lambda cell: cell.blocks_mean, ".0f")),
]


def trust_real(words: Sequence[str]) -> str:
    """trust_real FILE: how often real comparisons erred, as `make trust` wrote it."""
    data = read(_RealTrust, one_file(words))
    return captioned(REAL, data.cells, data.about)


# --------------------------------------------------------------------------------------- estimates


@dataclasses.dataclass(frozen=True)
class _Errors:
    """Errors of estimates, as shares of what was measured."""

    group: str
    cases: int
    mape: float  # mean of the errors' sizes
    worst: float
    median: float  # with its sign
    mape_without_readings: float | None = None


@dataclasses.dataclass(frozen=True)
class _MemoryErrors:
    cases: int
    mape: float | None = None
    worst: float | None = None
    median: float | None = None


@dataclasses.dataclass(frozen=True)
class _Estimates:
    about: About
    summary: list[_Errors]
    memory_summary: _MemoryErrors


ERRORS: Columns[_Errors] = [
    ("cases", lambda row: row.group),
    ("how many", lambda row: str(row.cases)),
    ("mean error", number(lambda row: row.mape, ".1%")),
    ("worst", number(lambda row: row.worst, ".1%")),
    ("median, with its sign", number(lambda row: row.median, "+.1%")),
    ("mean without the readings of speed", number(lambda row: row.mape_without_readings, ".1%")),
]


def estimates(words: Sequence[str]) -> str:
    """estimates FILE: estimates against measurements, as tests.estimate.accuracy wrote them."""
    data = read(_Estimates, one_file(words))
    memory = data.memory_summary
    rows = list(data.summary)
    if memory.cases and memory.mape is not None:
        errors = memory.mape, memory.worst or 0.0, memory.median or 0.0
        rows.append(_Errors("peak memory", memory.cases, *errors))
    return captioned(ERRORS, rows, data.about)


# ------------------------------------------------------------------------------------------ latency

LatencyRow = tuple[TableResult, Cell]
LATENCY: Columns[LatencyRow] = (
    ("arm", lambda row: f"`{row[0].arm}`"),
    ("ranks", lambda row: str(row[0].ranks)),
    ("prompt, tokens", lambda row: str(row[0].sequence_length)),
    ("batch size", lambda row: str(row[1].batch_size)),
    ("TTFT, ms", number(lambda row: latency_rows([row[1]], "correct")[0].figures.average, ".1f")),
    ("prefill, tokens/s", number(lambda row: _rates(row)[0], ".0f")),
    ("TPOT, ms", number(lambda row: latency_rows([row[1]], "correct")[1].figures.average, ".1f")),
    ("decode, tokens/s", number(lambda row: _rates(row)[2], ".1f")),
)


def _rates(row: LatencyRow) -> list[float]:
    """Averages: tokens/s and requests/s of prefill, tokens/s of decoding."""
    table, cell = row
    return [each.figures.average for each in rate_rows([cell], "correct", table.sequence_length)]


def latency(words: Sequence[str]) -> str:
    """latency FILE: the results.json of `latency --output`, a row for each table and batch size."""
    path = one_file(words)
    results = read(LatencyResults, path)
    if results.about is None:
        raise LogError(f"{path} does not say where it was measured")
    rows = [(table, cell) for table in results.tables for cell in table.cells]
    return captioned(LATENCY, rows, results.about)


TABLES: Mapping[str, Block] = {
    "printed": printed,
    "runs": runs,
    "speeds": speeds,
    "quality": quality,
    "roofline": roofline,
    "peers": peers,
    "trust": trust,
    "trust_real": trust_real,
    "estimates": estimates,
    "latency": latency,
    **doc_reference.TABLES,
}
