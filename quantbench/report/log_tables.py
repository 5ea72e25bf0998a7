"""The newest runs of a log, a table for each device, model and kind of work.

tables(groups(records), {"int8wo": "1.0002"})
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantbench.log.reading import config_of
from quantbench.log.record import Record
from quantbench.report.columns import Columns, markdown, number

LEAST_DIVISOR = 0.1  # GB or tok/s: the log has two decimals, so 0.01 may be off by half of it


@dataclass(frozen=True)
class LogRow:
    """A line of the log, and the line in full precision that it is compared with, if any."""

    record: Record
    full: Record | None

    def over_full(self, name: str) -> float | None:
        """This line's figure ÷ that of full precision; None where two decimals are too few for
        a ratio."""
        quantized = getattr(self.record, name)
        full = getattr(self.full, name) if self.full else 0
        is_known = full >= LEAST_DIVISOR or full and self.full is self.record
        return quantized / full if is_known else None


FIGURES: Columns[LogRow] = [
    ("scheme", lambda row: f"`{_scheme(row)}`"),
    ("KV cache", lambda row: _cache(row.record)),
    ("dtype", lambda row: row.record.dtype.removeprefix("torch.")),
    ("compiled", lambda row: "yes" if row.record.compile else "no"),
    ("tok/s", lambda row: f"{row.record.tok_s:.2f}"),
    ("× full precision", number(lambda row: row.over_full("tok_s"), ".2f")),
    ("peak memory", lambda row: f"{row.record.peak_mem:.2f} GB"),
    ("÷ full precision", number(lambda row: row.over_full("peak_mem"), ".2f")),
    ("model size", lambda row: f"{row.record.model_size:.2f} GB"),
    ("÷ full precision", number(lambda row: row.over_full("model_size"), ".2f")),
]
Groups = dict[tuple[str, ...], list[LogRow]]  # by device, model, batch and depth


def tables(by_group: Groups, perplexity: Mapping[str, str]) -> str:
    """Markdown: a heading and a table for each group. perplexity: by scheme, ÷ full precision's."""
    ratios = {**perplexity, "none": "1"}
    columns: Columns[LogRow] = [
        *FIGURES,
        ("perplexity ÷ full precision's", lambda row: ratios.get(_scheme(row), "-")),
    ]
    return "\n\n".join(
        f"**{model}** on {', '.join([device, *peculiar])}\n\n{markdown(columns, rows)}"
        for (device, model, *peculiar), rows in by_group.items()
    )


def groups(records: Sequence[Record]) -> Groups:
    """The newest line of each scheme, kind of cache, dtype and compilation; full precision first,
    then by the size of the model.

    Lines of part of a model are left out.
    """
    newest: dict[tuple[str, ...], Record] = {}
    for record in sorted(records, key=lambda record: record.timestamp):  # later lines win
        if config_of(record).num_layers is None:
            newest[*_group(record), *_kind(record)] = record
    by_group: Groups = {}
    for record in newest.values():
        alike = [other for other in newest.values() if _group(other) == _group(record)]
        by_group.setdefault(_group(record), []).append(LogRow(record, _full(record, alike)))
    for rows in by_group.values():
        rows.sort(
            key=lambda row: (row.record.quant != "None", -row.record.model_size, _kind(row.record))
        )
    return dict(sorted(by_group.items()))


def _group(record: Record) -> tuple[str, ...]:
    """Lines of one group did the same work in each step."""
    config = config_of(record)
    peculiar = [f"batch size {config.batch_size}"] * (config.batch_size > 1)
    peculiar += [f"with {config.context_depth} tokens in the context"] * (config.context_depth > 0)
    return record.device, record.mod, *peculiar


def _kind(record: Record) -> tuple[str, ...]:
    return record.quant, _cache(record), record.dtype, str(record.compile)


def _cache(record: Record) -> str:
    """Old lines say --kv_cache_quantization, which is int8; some only say so before the command."""
    config = config_of(record)
    given = "int8" if config.kv_cache_quantization else config.kv_cache
    return "int8" if record.kv_quant and given == "dense" else given


def _full(record: Record, alike: Sequence[Record]) -> Record | None:
    """Full precision, compiled if this line is; in the same dtype if there is such a line."""
    full = [other for other in alike if other.quant == "None" and not other.kv_quant]
    full = [other for other in full if other.compile == record.compile]
    return min(full, key=lambda other: (other.dtype != record.dtype, other.dtype), default=None)


def _scheme(row: LogRow) -> str:
    return "none" if row.record.quant == "None" else row.record.quant
