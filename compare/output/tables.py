"""The rows for people: a table on the terminal, report.md, results.csv and a picture."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchlog import shell
from benchlog.table import SINCE_START
from compare.figures.readings import caveats, span
from compare.figures.statistics import FALSE_VERDICTS
from compare.output import pareto as picture
from compare.sampling.results import FILE, Results
from errors import LogError

Row = dict[str, Any]
FILES = (FILE, "results.csv", "report.md", "pareto.svg", "pareto.png")
ENDED = {
    "precise": "every interval is narrower than ±{precision:.3g} %",
    "max_rounds": "--max_rounds was reached",
    "max_minutes": "--max_minutes was reached",
    "interrupted": "it was interrupted",
    "baseline failed": "the baseline failed, so there is nothing to compare with",
    "nothing to compare with": "every other arm failed",
}


def _number(name: str, form: str, unit: float = 1, suffix: str = "") -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        value = row.get(name)
        return "-" if value is None else f"{value * unit:{form}}{suffix}"

    return shown


def size(count: float | None) -> str:
    """1 GB is 1e9 bytes, as in the log."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def _peak(phase: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        kinds = row.get("peak_memory_bytes", {}).get(phase)
        if not kinds:
            return size(None)
        kind, peak = next(iter(kinds.items()))
        return f"{'≤ ' if kind == SINCE_START else ''}{size(peak)}"

    return shown


def _ratio(name: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        if not row.get(name):
            return "-"
        ratio, low, high = row[name]
        return f"{ratio:.3f}" if high is None else f"{ratio:.3f} ({low:.3f} to {high:.3f})"

    return shown


def _kl(row: Row) -> str:
    return "-" if row.get("kl") is None else f"{row['kl']:.4f} ± {row['kl_standard_error']:.4f}"


def _memory_rate(row: Row) -> str:
    rate = row.get("weight_bytes_per_s")
    share = f" ({row['bandwidth_share']:.1%})" if "bandwidth_share" in row else ""
    return "-" if rate is None else f"{rate / 1e9:.2f} GB/s{share}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
ARM: Columns = [("arm", lambda row: row["arm"])]
RATE: Columns = [("tok/s", _number("tok_s", ".2f"))]
LATENCY: Columns = [
    ("first token", _number("time_to_first_token_s", ".2f", 1e3, " ms")),
    ("token p50", _number("token_p50_s", ".3f", 1e3, " ms")),
    ("p90", _number("token_p90_s", ".3f", 1e3, " ms")),
    ("p99", _number("token_p99_s", ".3f", 1e3, " ms")),
]
RATIO: Columns = [
    ("Ratio_Latency", _ratio("ratio_latency")),
    ("Ratio_Throughput", _ratio("ratio_throughput")),
]
VERDICT: Columns = [("verdict", lambda row: row["verdict"])]
MEMORY: Columns = [
    ("model size", lambda row: size(row.get("weight_bytes"))),
    ("peak: load", _peak("load")),
    ("warm-up", _peak("warm_up")),
    ("generate", _peak("generate")),
    ("mem/s (of bandwidth)", _memory_rate),
]
QUALITY: Columns = [
    ("perplexity", _number("perplexity", ".3f")),
    ("KL, nats", _kl),
    ("top-1", _number("top1", ".1%")),
]
KERNEL: Columns = [("kernel", lambda row: row.get("kernel", "-"))]
LEFT = {"arm", "kernel", "verdict", "scheme", "beside", "layer", "over"}


def terminal(results: Results, rows: Sequence[Row]) -> str:
    """Two tables of a row an arm, speed and cost, and what is to be said of them."""
    speed = aligned([*ARM, *RATE, *LATENCY, *RATIO, *VERDICT], rows)
    cost = aligned([*ARM, *MEMORY, *QUALITY, *KERNEL], rows)
    return "\n".join([speed, "", cost, "", *remarks(results, rows)])


def markdown(results: Results, rows: Sequence[Row]) -> str:
    columns = [*ARM, *RATE, *RATIO, *VERDICT, *LATENCY, *MEMORY, *QUALITY, *KERNEL]
    facts = next((arm.facts for arm in results.arms if arm.facts), None)
    model = f"{facts['model']} on {facts['device']['name']}" if facts else "nothing was loaded"
    lines = [
        f"# {model}",
        "",
        "| " + " | ".join(heading for heading, _ in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(show(row) for _, show in columns) + " |" for row in rows),
        "",
        "![speed, memory and quality](pareto.svg)",
        "",
        *(f"- {remark}" for remark in remarks(results, rows)),
        "",
        "Ratio_Latency is the arm's time per decoded token ÷ the baseline's; Ratio_Throughput the "
        "baseline's tokens per second ÷ the arm's, prefill included: below 1 the arm is better. "
        "Both leave out the slowest and the fastest tenth of each sample's steps, for the system "
        "halts some now and then. 95 % intervals, which count how far processes of one arm differ. "
        "A verdict asks for more "
        f"than its interval: of comparisons of equals {FALSE_VERDICTS:.0%} declare any arm "
        "different. Peaks are of the whole process on a CPU. "
        "KL is that of the next token, baseline to arm.",
        "",
    ]
    if facts:
        versions = [f"{name} {version}" for name, version in facts["versions"].items() if version]
        lines += [f"{', '.join(versions)}; commit {facts['git_commit'] or 'unknown'}", ""]
    lines += ["Arms, as options of generate.py:", ""]
    lines += [f"- {arm.name}: `{shell.join(arm.argv) or arm.text}`" for arm in results.arms]
    return "\n".join(lines) + "\n"


def remarks(results: Results, rows: Sequence[Row]) -> list[str]:
    """How it was measured, and of every arm what a table has no room for."""
    why = ENDED.get(results.ended or "", "it goes on")
    why = why.format(precision=100 * results.settings.precision)
    processes = max(arm.processes for arm in results.arms)
    how = "side by side, one sample an arm and round, in an order drawn anew"
    how += f", {processes} process{'es' * (processes != 1)} an arm"
    if results.in_turn:
        how = "loaded in turn, several times over, as they do not fit into memory together"
        if results.settings.in_turn:
            how = "loaded in turn, several times over, as --in_turn asks"
    rounds = f"{results.rounds} round{'s' * (results.rounds != 1)}"
    found = [f"{rounds}, arms {how}; it ended because {why}"]
    for device, readings in results.bandwidth.items():
        found += [f"{device} reads {span(readings)} from memory", *caveats(readings)]
    for row in rows:
        said = [row["failed"] and f"failed: {row['failed']}", row.get("in_words")]
        said += [row["why_no_quality"] and f"no quality: {row['why_no_quality']}"]
        if row.get("warm_up_steady") is False:
            said.append("its warm-up did not become steady")
        said += row["why"] if row["verdict"] != "baseline" else []
        found += [f"{row['arm']}: {one}" for one in said if one]
    return found


def table(rows: Sequence[Row]) -> str:
    """CSV: every figure of every arm, names of nested ones joined by dots."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def write(folder: Path, results: Results, rows: Sequence[Row]) -> None:
    """All but results.json. Raises LogError where that cannot be written."""
    try:
        (folder / "results.csv").write_text(table(rows))
        (folder / "report.md").write_text(markdown(results, rows))
        picture.draw(rows, [folder / "pareto.svg", folder / "pareto.png"])
    except OSError as error:
        raise LogError(f"cannot write into {folder}: {error.strerror}") from None


def _flat(row: Row, prefix: str = "") -> Row:
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif name.startswith("ratio_"):
            found |= dict(zip((name, f"{name}.low", f"{name}.high"), value, strict=True))
        elif isinstance(value, list):
            found[prefix + name] = "; ".join(value)
        elif not (isinstance(value, float) and math.isnan(value)):
            found[prefix + name] = value
    return found


def aligned(columns: Columns, rows: Sequence[Row]) -> str:
    """A line a row, under a line of headings."""
    cells = [[heading for heading, _ in columns]]
    cells += [[show(row) for _, show in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [heading in LEFT for heading, _ in columns]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in cells
    )
