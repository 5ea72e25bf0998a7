"""The tables of the documentation: a function each, from a file that is committed to Markdown.

    TABLES["roofline"](["docs/data/roofline_tinyllama.json"])

Under each table stands where its figures come from: machine, versions, day, commit, command. A
figure that was not measured is a dash.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import files
from benchlog import log
from benchlog.about import About
from benchlog.config import RunConfig, option_table
from compare.figures.row import Row
from compare.output import log_tables
from compare.output.documents import Block, table
from errors import LogError, UsageError
from quantize import spec
from text import size
from typed_json import from_json

T = TypeVar("T")
Ends = list[float | None]  # value, low, high


def read(kind: type[T], path: str) -> T:
    """The JSON in a file, as a `kind`. Raises LogError, one line, for anything else."""
    try:
        return from_json(kind, json.loads(files.read_text("cannot read", path, LogError)))
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(f"{path} is not what its command writes: {error}") from None


def one_file(words: Sequence[str]) -> str:
    if not words:
        raise UsageError("this table needs the name of a file behind its own")
    return words[0]


def printed(words: Sequence[str]) -> str:
    """printed FILE: what a command printed, as it is."""
    text = files.read_text("cannot read", one_file(words), LogError)
    return "```\n" + text.rstrip() + "\n```"


def with_caption(lines: str, about: About) -> str:
    return f"{lines}\n\n{about.caption()}"


def figure(value: float | None, form: str, suffix: str = "") -> str:
    """A number with a space before its unit; - where it is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:{form}}{suffix}"


def with_ends(values: Ends | None, form: str, unit: float = 1, suffix: str = "") -> str:
    """1.84 (1.70 to 1.98)."""
    if not values or values[0] is None:
        return "-"
    text = f"{values[0] * unit:{form}}{suffix}"
    if len(values) == 3 and values[1] is not None and values[2] is not None:
        text += f" ({values[1] * unit:{form}} to {values[2] * unit:{form}})"
    return text


# ------------------------------------------------------------------------------------ from the log


def runs(words: Sequence[str]) -> str:
    """runs FILE: the newest line of each kind in a log."""
    path = one_file(words)
    by_group = log_tables.groups([record for _, record in log.read(path).records])
    if not by_group:
        raise LogError(f"{path} holds no line of a run")
    return log_tables.tables(by_group)


# --------------------------------------------------------------------------------------- from JSON


@dataclasses.dataclass(frozen=True)
class _Compared:
    about: About
    rows: list[Row]


def speeds(words: Sequence[str]) -> str:
    """speeds FILE [ARM …]: arms as `ab --output` left them in results.json; all that were measured,
    or those named, underscores for the spaces in a name."""
    path, *names = one_file(words), *words[1:]
    data = read(_Compared, path)
    rows = [row for row in data.rows if row.tok_s is not None]
    if names:
        by_name = {row.arm.replace(" ", "_"): row for row in rows}
        if missing := [name for name in names if name not in by_name]:
            raise UsageError(f"{path} measured no arm {missing[0]}; it has {', '.join(by_name)}")
        rows = [by_name[name] for name in names]
    ends = {row.speed_up.word for row in rows if row.speed_up} - {"range"} or {"range"}
    headings = (
        *("", "decode, tok/s", "of the limit", f"speed-up ({', '.join(ends)})"),
        *("weights", "peak memory", "perplexity ÷ baseline's (95 % interval)"),
    )
    return with_caption(table(headings, [_speed(row) for row in rows]), data.about)


def _speed(row: Row) -> Sequence[str]:
    peaks = (row.peak_memory_bytes or {}).get("generate") or {}
    ratio = row.perplexity_ratio
    speed_up = "1" if row.verdict == "baseline" else "-"
    if row.speed_up:
        speed_up = row.speed_up.written(".2f")
    return (
        f"`{row.arm}`",
        figure(row.decode_tok_s, ".1f"),
        "-" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
        speed_up,
        size(row.weight_bytes) if row.weight_bytes else "-",
        size(max(peaks.values())) if peaks else "-",
        with_ends([ratio.value, ratio.low, ratio.high], ".4f") if ratio else "-",
    )


@dataclasses.dataclass(frozen=True)
class _Scheme:
    scheme: str
    bits_per_weight: float | None
    perplexity: float | None
    ratio: float | None
    ratio_standard_error: float | None
    gguf: str | None
    tokens: int | None


@dataclasses.dataclass(frozen=True)
class _Schemes:
    about: About
    rows: list[_Scheme]


def quality(words: Sequence[str]) -> str:
    """quality FILE: what `schemes --measure --json FILE` wrote."""
    data = read(_Schemes, one_file(words))
    rows = [
        (
            f"`{row.scheme}`",
            figure(row.bits_per_weight, ".2f"),
            row.gguf or "-",
            figure(row.perplexity, ".2f"),
            "1" if row.scheme == "none" else _plus_minus(row.ratio, row.ratio_standard_error),
        )
        for row in data.rows
        if row.perplexity is not None
    ]
    headings = (
        *("scheme", "bits per weight", "GGUF type", "perplexity"),
        "÷ full precision (± standard error)",
    )
    return with_caption(table(headings, rows), data.about)


def _plus_minus(value: float | None, error: float | None) -> str:
    return figure(value, ".4f") + (f" ± {error:.4f}" if error is not None else "")


@dataclasses.dataclass(frozen=True)
class _Decode:
    scheme: str | None
    decode_tok_s: float | None
    limit_tok_s: float | None
    limit_share: Ends | None
    speed_up: Ends | None
    stock: "_Decode | None"
    over_stock: float | None


@dataclasses.dataclass(frozen=True)
class _Roofline:
    about: About
    model: list[_Decode] | None


def roofline(words: Sequence[str]) -> str:
    """roofline FILE: whole models against memory's limit, as `roofline --json FILE` wrote them."""
    data = read(_Roofline, one_file(words))
    rows = [
        (
            f"`{row.scheme}`",
            figure(row.decode_tok_s, ".1f"),
            figure(row.limit_tok_s, ".1f"),
            with_ends(row.limit_share, ".0f", 100, " %"),
            with_ends(row.speed_up, ".2f"),
            figure(row.stock.decode_tok_s if row.stock else None, ".1f"),
            figure(row.over_stock, ".2f"),
        )
        for row in data.model or []
    ]
    headings = (
        *("scheme", "decode, tok/s", "limit, tok/s", "of the limit", "÷ `none`"),
        *("stock kernel, tok/s", "÷ stock"),
    )
    return with_caption(table(headings, rows), data.about)


@dataclasses.dataclass(frozen=True)
class _Peer:
    scheme: str
    beside: str
    decode_ours_tok_s: float | None
    decode_theirs_tok_s: float | None
    decode_ratio: Ends | None
    prompt_ours_tok_s: float | None
    prompt_theirs_tok_s: float | None
    prompt_ratio: Ends | None


@dataclasses.dataclass(frozen=True)
class _Peers:
    about: About
    rows: list[_Peer]


def peers(words: Sequence[str]) -> str:
    """peers FILE: ours beside other runtimes, as `peers --json FILE` wrote them."""
    data = read(_Peers, one_file(words))
    rows = [
        (
            f"`{row.scheme}`",
            row.beside,
            figure(row.decode_ours_tok_s, ".1f"),
            figure(row.decode_theirs_tok_s, ".1f"),
            with_ends(row.decode_ratio, ".2f"),
            figure(row.prompt_ours_tok_s, ".0f"),
            figure(row.prompt_theirs_tok_s, ".0f"),
            with_ends(row.prompt_ratio, ".2f"),
        )
        for row in data.rows
    ]
    headings = (
        *("ours", "theirs", "decode: ours, tok/s", "theirs", "ratio"),
        *("prompt: ours, tok/s", "theirs", "ratio"),
    )
    return with_caption(table(headings, rows), data.about)


@dataclasses.dataclass(frozen=True)
class _Share:
    count: int
    of: int
    low: float
    high: float


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


def trust(words: Sequence[str]) -> str:
    """trust FILE: how often comparisons erred, as `make trust` wrote it."""
    data = read(_Trust, one_file(words))
    rows = [
        (
            cell.mode,
            cell.cell,
            str(cell.trials),
            _bounded(cell.false_verdicts),
            _bounded(cell.coverage_95),
            _bounded(cell.found),
            figure(cell.processes_per_candidate, ".0f"),
        )
        for cell in data.cells
    ]
    headings = (
        *("arms", "what differs", "runs", "false verdicts", "95 % intervals that hold"),
        *("differences found", "processes an arm"),
    )
    return f"{table(headings, rows)}\n\n<sub>{data.date}: `{data.command}`</sub>"


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


def trust_real(words: Sequence[str]) -> str:
    """trust_real FILE: how often real comparisons erred, as `make trust` wrote it."""
    data = read(_RealTrust, one_file(words))
    rows = [
        (
            cell.cell,
            str(cell.runs),
            _bounded(cell.false_verdicts),
            _bounded(cell.coverage_shown),
            _bounded(cell.found),
            f"{cell.blocks_mean:.0f}",
        )
        for cell in data.cells
    ]
    headings = (
        *("what differs", "runs", "false verdicts", "intervals shown that hold"),
        *("differences found", "processes an arm"),
    )
    return with_caption(table(headings, rows), data.about)


def _bounded(share: _Share | None) -> str:
    """With the ends of the Clopper-Pearson interval."""
    if share is None:
        return "-"
    value = share.count / share.of if share.of else math.nan
    return f"{value:.1%} ({share.low:.1%} to {share.high:.1%})"


# --------------------------------------------------------------------------------- from the program


def options(words: Sequence[str]) -> str:
    """options: those of generate.py."""
    rows = []
    for name, option in option_table().items():
        takes = option.kind.metavar or ""
        default = getattr(RunConfig(), name)
        given = f"`--{name}{' ' * bool(takes)}{takes}`"
        shown = "off" if default is False else "" if default is None else str(default)
        rows.append((given, shown, option.help.replace("|", "\\|")))
    return table(("option", "default", "meaning"), rows)


def schemes(words: Sequence[str]) -> str:
    """schemes: the forms of --quantization."""
    rows = [(f"`{form}`", said) for form, said in spec.numerics().items()]
    return table(("name", "what it does to the linear layers"), rows)


# heads, head_dim, layers, positions of the model that the last column is of
LLAMA_3_1 = (8, 128, 32, 131072)
CACHE_BYTES: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "dense": ("as `--precision` has them", lambda width: 2 * width),
    "int8": ("a scale for each token and head", lambda width: width + 2),
    "fp8": ("a scale for each token and head", lambda width: width + 2),
    "int4": ("a scale for every 32 of head_dim", lambda width: width / 2 + width / 16),
}


def cache_bytes(words: Sequence[str]) -> str:
    """cache_bytes: what each KV cache takes, from shapes."""
    heads, width, layers, positions = LLAMA_3_1
    rows = []
    for name, (how, of_head) in CACHE_BYTES.items():
        each = 2 * heads * of_head(width)
        rows.append((f"`{name}`", how, f"{each:.0f}", size(each * layers * positions)))
    headings = (
        *("`--kv_cache`", "keys and values"),
        *("bytes per position and layer", f"all {layers} layers, {positions} positions"),
    )
    return table(headings, rows)


TABLES: Mapping[str, Block] = {
    "printed": printed,
    "runs": runs,
    "speeds": speeds,
    "quality": quality,
    "roofline": roofline,
    "peers": peers,
    "trust": trust,
    "trust_real": trust_real,
    "options": options,
    "schemes": schemes,
    "cache_bytes": cache_bytes,
}
