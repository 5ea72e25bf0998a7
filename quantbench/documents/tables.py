"""The tables of the documentation: a function each, from a file that is committed to Markdown.

    TABLES["peers"](["docs/data/peers.json"])

Under each table stands where its figures come from: machine, versions, day, commit, command. A
figure that was not measured is a dash.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from quantbench import files
from quantbench.compare.json_rows import SchemeRow
from quantbench.compare.limits import memory_bytes
from quantbench.compare.row import Row
from quantbench.compare.tables import of_prompt
from quantbench.documents import documents
from quantbench.errors import LogError, UsageError
from quantbench.log import log
from quantbench.log.origin import Origin
from quantbench.log.record import Record
from quantbench.quality.thresholds import BROKEN, class_of
from quantbench.report.block import Block, captioned, file_of, read
from quantbench.report.columns import Columns, interval, markdown, number, size, with_error

R = TypeVar("R")
T = TypeVar("T")
TURNS_NOTE = "Speed-ups over the baseline, with 95 % intervals that hold for all arms together."
BROKEN_NOTE = (
    " *Broken*: KL is above 0.5 nats, and the speed is of no use; pictures "
    "show such a scheme in grey."
)


# ------------------------------------------------------------------------------------------- runs


def runs(words: Sequence[str]) -> str:
    """runs LOG: the newest line of each kind in a log."""
    path = file_of(words)
    by_heading = newest([record for _, record in log.read(path).records])
    if not by_heading:
        raise LogError(f"{path} holds no line of a run")
    days = [row.timestamp for rows in by_heading.values() for row in rows]
    span = [f"{day[:4]}-{day[4:6]}-{day[6:8]}" for day in (min(days), max(days))]
    caption = (
        f"<sub>The newest line of each kind in `{path}`, {' to '.join(dict.fromkeys(span))}; lines "
        "of different days or machines are not to be compared. Each line ends with the command "
        f"that repeats it; `quantbench replay {path} --all` runs them again</sub>"
    )
    tables = (f"{heading}\n\n{markdown(RUNS, rows)}" for heading, rows in by_heading.items())
    return "\n\n".join([*tables, caption])


RUNS: Columns[Record] = [
    ("scheme", lambda record: f"`{'none' if record.quant == 'None' else record.quant}`"),
    ("KV cache", lambda record: _cache(record)),
    ("dtype", lambda record: record.dtype.removeprefix("torch.")),
    ("compiled", lambda record: "yes" if record.compile else "no"),
    ("tok/s", lambda record: f"{record.tok_s:.2f}"),
    ("peak memory", lambda record: f"{record.peak_mem:.2f} GB"),
    ("model size", lambda record: f"{record.model_size:.2f} GB"),
]


def newest(records: Sequence[Record]) -> dict[str, list[Record]]:
    """By heading, the newest line of each scheme, kind of cache, dtype and compilation: full
    precision first, then by the size of the model. Lines of part of a model are left out."""

    def kind(record: Record) -> tuple[str, ...]:
        return record.quant, _cache(record), record.dtype, str(record.compile)

    def place(record: Record) -> tuple[object, ...]:
        return record.quant != "None", -record.model_size, kind(record)

    by_heading: dict[str, dict[tuple[str, ...], Record]] = {}
    for record in sorted(records, key=lambda record: record.timestamp):  # later lines win
        config = log.config_of(record)
        if config.num_layers is None:
            heading = f"**{record.mod}** on {record.device}"
            heading += f", batch size {config.batch_size}" * (config.batch_size > 1)
            if config.context_depth:
                heading += f", with {config.context_depth} tokens in the context"
            by_heading.setdefault(heading, {})[kind(record)] = record
    return {heading: sorted(own.values(), key=place) for heading, own in sorted(by_heading.items())}


def _cache(record: Record) -> str:
    """Old lines say --kv_cache_quantization, which is int8; some only say so before the command."""
    config = log.config_of(record)
    given = "int8" if config.kv_cache_quantization else config.kv_cache
    return "int8" if record.kv_quant and given == "dense" else given


# ------------------------------------------------------------------------------------------- speeds


def speeds(words: Sequence[str]) -> str:
    """speeds FILE [FILE.json] [ARM …]: arms as `ab --output` left them in results.json; all that
    were measured, or those named, underscores for the spaces in a name: then docs/results.md has
    the command. A second file adds its prompts' speed-ups, of another length, to the arms of the
    same name."""
    path = file_of(words)
    others = [word for word in words[1:] if word.endswith(".json")]
    names = [word for word in words[1:] if word not in others]
    rows, captions = _timed(path), ""
    columns = list(of_prompt(SPEEDS, rows))
    for other in others:
        longer = {row.arm: row for row in _timed(other)}
        heading = of_prompt([PROMPT], [*longer.values()])[0][0]
        column = heading, partial(_of_the_same_arm, longer)
        columns.insert(SPEEDS.index(PROMPT) + 1, column)
        caption = read(Origin, other, "about").caption(RESULTS if names else "")
        captions += f"\n\n{heading}: {caption}"
    if names:
        by_name = {row.arm.replace(" ", "_"): row for row in rows}
        if missing := [name for name in names if name not in by_name]:
            raise UsageError(f"{path} measured no arm {missing[0]}; it has {', '.join(by_name)}")
        rows = [by_name[name] for name in names]
    notes = TURNS_NOTE + BROKEN_NOTE * any(map(_is_broken, rows))
    about = read(Origin, path, "about")
    return captioned(columns, rows, about, notes, RESULTS if names else "") + captions


def _of_the_same_arm(rows: Mapping[str, Row], row: Row) -> str:
    return PROMPT[1](rows[row.arm]) if row.arm in rows else "-"


def _timed(path: str) -> list[Row]:
    """Rows with a speed. Files of earlier versions have the prompt's length in the arms' facts."""
    rows = read(list[Row], path, "rows")
    arms = files.read_json("cannot read", path, LogError).get("arms") or [{}] * len(rows)
    for row, arm in zip(rows, arms, strict=True):
        row.prompt_tokens = row.prompt_tokens or (arm.get("facts") or {}).get("prompt_tokens")
    return [row for row in rows if row.tok_s is not None]


RESULTS = "docs/results.md"  # the page with whole tables and their commands
PROMPT: tuple[str, Callable[[Row], str]] = (
    "prompt ×",
    interval(lambda row: row.prompt_speed_up, ".2f"),
)
SPEEDS: Columns[Row] = [
    ("", lambda row: f"`{row.arm}`" + " (broken)" * _is_broken(row)),
    ("decode, tok/s", number(lambda row: row.decode_tok_s, ".1f")),
    ("of the limit", interval(lambda row: row.limit_share, ".0%")),
    ("decode ×", interval(lambda row: row.decode_speed_up, ".2f")),
    PROMPT,
    ("weights", lambda row: size(row.weight_bytes or None)),
    ("peak memory", lambda row: size(memory_bytes(row))),
    ("KL, nats", with_error(lambda row: row.kl, lambda row: row.kl_standard_error, ".4f")),
]


def _is_broken(row: Row) -> bool:
    return row.kl is not None and class_of(row.kl) == BROKEN


# ---------------------------------------------------------------------------------------- schemes


def quality(words: Sequence[str]) -> str:
    """quality FILE: what `schemes --measure --json FILE` wrote."""
    path = file_of(words)
    rows = [r for r in read(list[SchemeRow], path, "rows") if r.tokens is not None]
    tokens = " or ".join(sorted({f"{row.tokens:,}" for row in rows}))
    columns: Columns[SchemeRow] = [
        ("scheme", lambda row: f"`{row.scheme}`"),
        ("bits per weight", number(lambda row: row.bits_per_weight, ".2f")),
        ("GGUF type", lambda row: row.gguf or "-"),
        (f"KL, nats, on {tokens} tokens",
         with_error(lambda row: row.kl, lambda row: row.kl_standard_error, ".4f")),
        ("perplexity ÷ full precision's",
         with_error(lambda row: row.ratio, lambda row: row.ratio_standard_error, ".4f")),
    ]  # fmt: skip
    return captioned(columns, rows, read(Origin, path, "about"))


# Blocks of rooms: the room is imported when a document has the block.
ROOMS = {"peers": "quantbench.peers.tables:block", "latency": "quantbench.latency.block:latency"}


def _of_room(place: str, words: Sequence[str]) -> str:
    block: Block = pkgutil.resolve_name(place)
    return block(words)


TABLES: Mapping[str, Block] = {
    "about": lambda words: read(Origin, file_of(words), "about").caption(),  # below a picture
    "runs": runs,
    "speeds": speeds,
    "quality": quality,
    **{name: partial(_of_room, place) for name, place in ROOMS.items()},
    **documents.TABLES,
}
