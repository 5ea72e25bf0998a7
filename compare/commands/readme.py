"""python -m compare readme: the README's tables and its chart, rewritten from the log.

python -m compare readme            # rewrites the text between the two markers
python -m compare readme --check    # exit code 1, and a diff, if that would change anything
"""

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

import files
from benchlog import log
from benchlog.record import Record
from cli import Command
from compare.output.bars import chart
from errors import LogError, UsageError

BEGIN, END = "<!-- from benchmarks.txt: python -m compare readme -->", "<!-- until here -->"
HEADINGS = (
    *("scheme", "KV cache", "dtype", "compiled", "tok/s", "× full precision"),
    *("peak memory", "÷ full precision", "model size", "÷ full precision"),
)


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


Groups = dict[tuple[str, ...], list[LogRow]]  # by device, model, batch and depth


@click.command(cls=Command)
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if something would change")
@click.option("--log", "log_path", default="benchmarks.txt", help="[benchmarks.txt]")
@click.option("--readme", "path", default="README.md", help="[README.md]")
@click.option("--chart", "chart_path", default="docs/benchmarks.svg", help="[docs/benchmarks.svg]")
def readme(check: bool, log_path: str, path: str, chart_path: str) -> None:
    """Rewrite the README's tables, and the chart beside them, from the log."""
    if not check:
        for name in (path, chart_path):
            with files.named("cannot write", name, LogError):
                files.require_writable(name)
        files.check_output("--chart", chart_path, files.is_svg, "SVG")
    named = {os.path.realpath(name): name for name in (log_path, path, chart_path)}
    if len(named) < 3:
        raise UsageError("--log, --readme and --chart have to be three files")
    by_group = groups([record for _, record in log.read(log_path).records])
    if not by_group:
        raise LogError(f"{log_path} holds no line of a run")
    old = _read(path)
    new = {path: rewritten(path, old, by_group, chart_path), chart_path: chart(bars(by_group))}
    stale = False
    for name, text in new.items():
        before = old if name == path else _read(name, missing="")
        if before == text:
            continue
        stale = True
        if check:
            lines = (before.splitlines(), text.splitlines())
            label = f"{name} as {log_path} has it"
            click.echo("\n".join(difflib.unified_diff(*lines, name, label, lineterm="")))
            continue
        files.write_text("cannot write", name, text)
        click.echo(f"Rewrote {name}")
    if check and stale:
        click.echo("error: stale; quantbench readme rewrites it", err=True)
        sys.exit(1)


def groups(records: Sequence[Record]) -> Groups:
    """The newest line of each scheme, kind of cache, dtype and compilation; full precision first,
    then by the size of the model.

    Lines of part of a model are left out.
    """
    newest: dict[tuple[str, ...], Record] = {}
    for record in sorted(records, key=lambda record: record.timestamp):  # later lines win
        if record.config().num_layers is None:
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
    """Lines of one group are compared: the work of a step is the same."""
    config = record.config()
    peculiar = [f"{config.batch_size} rows at once"] * (config.batch_size > 1)
    peculiar += [f"behind {config.context_depth} positions"] * (config.context_depth > 0)
    return record.device, record.mod, *peculiar


def _kind(record: Record) -> tuple[str, ...]:
    return record.quant, _cache(record), record.dtype, str(record.compile)


def _cache(record: Record) -> str:
    """Old lines say --kv_cache_quantization, which is int8; some only say so before the command."""
    config = record.config()
    given = "int8" if config.kv_cache_quantization else config.kv_cache
    return "int8" if record.kv_quant and given == "dense" else given


def _full(record: Record, alike: Sequence[Record]) -> Record | None:
    """Full precision, compiled if this line is; in the same dtype if there is such a line."""
    full = [other for other in alike if other.quant == "None" and not other.kv_quant]
    full = [other for other in full if other.compile == record.compile]
    return min(full, key=lambda other: (other.dtype != record.dtype, other.dtype), default=None)


def rewritten(path: str, text: str, by_group: Groups, chart_path: str) -> str:
    """The text with what the log says between the markers. Raises UsageError without markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise UsageError(f"{path} needs a line {BEGIN!r} and, behind it, a line {END!r}, once each")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    tables = [
        f"**{model}** on {', '.join([device, *peculiar])}\n\n{table(rows)}"
        for (device, model, *peculiar), rows in by_group.items()
    ]
    picture = f"![speed-up over full precision]({chart_path})"
    return f"{before}{BEGIN}\n\n" + "\n\n".join([*tables, picture]) + f"\n\n{END}{after}"


def table(rows: Sequence[LogRow]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    return "\n".join([*lines, *("| " + " | ".join(_cells(row)) + " |" for row in rows)])


def bars(by_group: Groups) -> list[tuple[str, list[tuple[str, float]]]]:
    """What the chart shows: by group, the speed-up of every line that has one."""
    return [
        (
            f"{model} on {', '.join([device, *peculiar])}",
            [(_label(row.record), ratio) for row in rows if (ratio := row.over_full("tok_s"))],
        )
        for (device, model, *peculiar), rows in by_group.items()
    ]


def _label(record: Record) -> str:
    words = ["none" if record.quant == "None" else record.quant]
    words += [f"{_cache(record)} KV"] * record.kv_quant + ["not compiled"] * (not record.compile)
    return ", ".join(
        [*words, *[record.dtype.removeprefix("torch.")] * (record.dtype != "torch.bfloat16")]
    )


def _cells(row: LogRow) -> list[str]:
    record = row.record
    return [
        f"`{'none' if record.quant == 'None' else record.quant}`",
        _cache(record),
        record.dtype.removeprefix("torch."),
        "yes" if record.compile else "no",
        f"{record.tok_s:.2f}",
        _ratio(row.over_full("tok_s")),
        f"{record.peak_mem:.2f} GB",
        _ratio(row.over_full("peak_mem")),
        f"{record.model_size:.2f} GB",
        _ratio(row.over_full("model_size")),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _read(path: str, missing: str | None = None) -> str:
    if missing is not None and not os.path.lexists(path):
        return missing
    return files.read_text("cannot read", path, LogError)
