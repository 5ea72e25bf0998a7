"""The newest runs of a log, a table for each device, model and kind of work."""

from collections.abc import Sequence

from quantbench.log.reading import config_of
from quantbench.log.record import Record
from quantbench.report.columns import Columns, markdown

FIGURES: Columns[Record] = [
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
    by_heading: dict[str, dict[tuple[str, ...], Record]] = {}
    for record in sorted(records, key=lambda record: record.timestamp):  # later lines win
        config = config_of(record)
        if config.num_layers is None:
            heading = f"**{record.mod}** on {record.device}"
            heading += f", batch size {config.batch_size}" * (config.batch_size > 1)
            if config.context_depth:
                heading += f", with {config.context_depth} tokens in the context"
            kind = record.quant, _cache(record), record.dtype, str(record.compile)
            by_heading.setdefault(heading, {})[kind] = record

    def place(item: tuple[tuple[str, ...], Record]) -> tuple[object, ...]:
        kind, record = item
        return record.quant != "None", -record.model_size, kind

    groups = sorted(by_heading.items())
    return {heading: [record for _, record in sorted(own.items(), key=place)]
            for heading, own in groups}  # fmt: skip


def tables(by_heading: dict[str, list[Record]]) -> str:
    """Markdown: a heading and a table for each group."""
    parts = (f"{heading}\n\n{markdown(FIGURES, rows)}" for heading, rows in by_heading.items())
    return "\n\n".join(parts)


def _cache(record: Record) -> str:
    """Old lines say --kv_cache_quantization, which is int8; some only say so before the command."""
    config = config_of(record)
    given = "int8" if config.kv_cache_quantization else config.kv_cache
    return "int8" if record.kv_quant and given == "dense" else given
