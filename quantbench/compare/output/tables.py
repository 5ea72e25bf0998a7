"""The rows for people: a table on the terminal, report.md, results.csv and a picture."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quantbench.compare.figures.families import FALSE_VERDICTS
from quantbench.compare.figures.readings import caveats, span
from quantbench.compare.figures.row import Row
from quantbench.compare.figures.rows import identical_plans, scatter
from quantbench.compare.output import html as page
from quantbench.compare.output import pareto as picture
from quantbench.compare.output.columns import Columns, aligned, interval, number, size, with_error
from quantbench.compare.output.documents import table
from quantbench.compare.sampling.results import FILE, MOST_BESIDE, Results
from quantbench.errors import LogError
from quantbench.log import shell
from quantbench.log.table import SINCE_START
from quantbench.quality.thresholds import LEGEND, described
from quantbench.quality.types import Quality
from quantbench.run import energy
from quantbench.typed_json import to_json

FILES = (FILE, "results.csv", "report.md", page.FILE, "pareto.svg", "pareto.png")
ENDED = {
    "precise": "every arm is settled: ±{precision:.3g} %, or a plain difference",
    "processes": "each arm had its --processes",
    "max_minutes": "--max_minutes was reached",
    "interrupted": "it was interrupted",
    "baseline failed": "the baseline failed, so there is nothing to compare with",
    "nothing to compare with": "every other arm failed",
}


def _peak(phase: str) -> Callable[[Row], str]:
    def shown(row: Row) -> str:
        kinds = (row.peak_memory_bytes or {}).get(phase)
        if not kinds:
            return size(None)
        kind, peak = next(iter(kinds.items()))
        return f"{'≤ ' if kind == SINCE_START else ''}{size(peak)}"

    return shown


def _verdict(row: Row) -> str:
    """A range gives no verdict, which is not the same as no difference."""
    is_range = row.speed_up is not None and row.speed_up.confidence is None
    return "too few processes" if is_range else row.verdict


def _memory_rate(row: Row) -> str:
    rate, share = row.weight_bytes_per_s, row.bandwidth_share
    if rate is None:
        return "-"
    return f"{rate / 1e9:.2f} GB/s" + ("" if share is None else f" ({share:.1%})")


ARM: Columns[Row] = [("arm", lambda row: row.arm)]
RATE: Columns[Row] = [("tok/s", number(lambda row: row.tok_s, ".2f"))]
LATENCY: Columns[Row] = [
    ("first token", number(lambda row: row.time_to_first_token_s, ".2f", 1e3, " ms")),
    ("token p50", number(lambda row: row.token_p50_s, ".3f", 1e3, " ms")),
    ("p90", number(lambda row: row.token_p90_s, ".3f", 1e3, " ms")),
    ("p99", number(lambda row: row.token_p99_s, ".3f", 1e3, " ms")),
]
SPEED_UP: Columns[Row] = [("× baseline", interval(lambda row: row.speed_up, ".2f"))]
# The speed-up of the median decoding step: above 1 is faster. Its ends have room in the report.
STEP_HEADING = "typical step"
TYPICAL_STEP: Columns[Row] = [
    (STEP_HEADING, number(lambda row: row.typical_step.value if row.typical_step else None, ".2f"))
]
TYPICAL_STEP_ENDS: Columns[Row] = [(STEP_HEADING, interval(lambda row: row.typical_step, ".2f"))]
RATIO: Columns[Row] = [
    ("Ratio_Latency", interval(lambda row: row.ratio_latency)),
    ("Ratio_Throughput", interval(lambda row: row.ratio_throughput)),
]
VERDICT: Columns[Row] = [("verdict", lambda row: _verdict(row))]
MEMORY: Columns[Row] = [
    ("model size", lambda row: size(row.weight_bytes)),
    ("peak: load", _peak("load")),
    ("warm-up", _peak("warm_up")),
    ("generate", _peak("generate")),
    ("mem/s (of bandwidth)", _memory_rate),
]
QUALITY: Columns[Row] = [
    ("perplexity", number(lambda row: row.perplexity, ".3f")),
    ("KL, nats", with_error(lambda row: row.kl, lambda row: row.kl_standard_error, ".4f")),
    ("top-1", number(lambda row: row.top1, ".1%")),
]
IN_LEGEND = {"kl": "", "top1": "top-1: "}  # columns of QUALITY that need words, and their headings
KERNEL: Columns[Row] = [("kernel", lambda row: row.kernel or "-")]


def terminal(results: Results, rows: Sequence[Row]) -> str:
    """Two tables of a row an arm, speed and cost, and remarks on them."""
    speed = aligned([*ARM, *RATE, *SPEED_UP, *VERDICT, *TYPICAL_STEP, *LATENCY], rows)
    cost = aligned([*ARM, *MEMORY, *QUALITY, *KERNEL], rows)
    lines = [speed, "", cost, "", *remarks(results, rows, reasons=len(rows) <= MOST_BESIDE)]
    return "\n".join([*lines, *(["", text] if (text := answer(results)) else [])])


def answer(results: Results) -> str:
    """The recommendation, or the answer of a tune, if there is one."""
    said = results.tune or results.recommendation
    return said.text() if said else ""


def full_table(rows: Sequence[Row]) -> list[list[str]]:
    """Headings, then every column of every row."""
    speed = [*RATE, *SPEED_UP, *VERDICT, *TYPICAL_STEP_ENDS, *RATIO, *LATENCY]
    columns = [*ARM, *speed, *MEMORY, *QUALITY, *KERNEL]
    cells = [[show(row) for _, show in columns] for row in rows]
    return [[heading for heading, _ in columns], *cells]


def markdown(results: Results, rows: Sequence[Row]) -> str:
    headings, *cells = full_table(rows)
    runs = [arm.facts.run for arm in results.arms if arm.facts]
    run = next((run for run in runs if run), None)
    model = f"{run.model} on {run.device.name}" if run else "nothing was loaded"
    lines = [
        f"# {model}",
        "",
        *([said.markdown()] if (said := results.tune or results.recommendation) else []),
        table(headings, cells),
        "",
        "![speed, memory and quality](pareto.svg)",
        "",
        *(f"- {remark}" for remark in remarks(results, rows)),
        "",
        "Ratio_Latency is the arm's time per decoded token ÷ the baseline's; Ratio_Throughput the "
        "baseline's tokens per second ÷ the arm's, prefill included: below 1 the arm is better. "
        "Nothing is left out of either. Ranges are of the processes, intervals hold for all arms "
        "together, and a verdict is read off the interval that is shown: where all arms are "
        f"equal, at most {FALSE_VERDICTS:.0%} of comparisons call any of them different. On a CPU, "
        "peaks are of the whole process. KL is that of the next token, baseline to arm.",
        "",
    ]
    if run:
        versions = [f"{name} {version}" for name, version in run.versions.items() if version]
        lines += [f"{', '.join(versions)}; commit {run.git_commit or 'unknown'}", ""]
    lines += ["Arms, as options of generate.py:", ""]
    lines += [f"- {arm.name}: `{shell.join(arm.argv) or arm.text}`" for arm in results.arms]
    return "\n".join(lines) + "\n"


def remarks(results: Results, rows: Sequence[Row], reasons: bool = True) -> list[str]:
    """How it was measured, and what the tables have no room for. reasons: also why each arm is as
    slow as it is."""
    why = ENDED.get(results.ended or "", "it goes on")
    why = why.format(precision=100 * results.settings.precision)
    lines = [f"{_how(results)}; it ended because {why}"]
    lines += _brackets(rows)
    lines += [sentence] if (sentence := scatter(results)) else []
    lines += _best(rows)
    lines += identical_plans(results)
    dropped = [row.arm for row in rows if row.dropped]
    if dropped:
        lines.append(f"not measured to the end, as others are faster: {', '.join(dropped)}")
    lines += _quality(results)
    for device, readings in results.bandwidth.items():
        lines += [
            f"memory bandwidth of {device}: {span(readings)}, the speed limit of decoding",
            *caveats(readings),
        ]
    lines += [f"{row.arm}: {remark}" for row in rows for remark in _remarks(row, reasons)]
    if not reasons and any(row.why for row in rows):
        lines.append("why each arm is as slow as it is: in the report (--output DIR, or -o md)")
    return lines


def _brackets(rows: Sequence[Row]) -> list[str]:
    """What the speed-ups and the ends in brackets are."""
    words = dict.fromkeys(row.speed_up.word for row in rows if row.speed_up)
    intervals = [word for word in words if word != "range"]
    if not words:
        return []
    line = "× baseline is the speed-up: above 1 is faster"
    if intervals:
        line += f"; in brackets the {intervals[0]}, which holds for all arms together"
    if "range" in words:
        line += "; a range is that of the processes, too few for an interval or a verdict: more of "
        line += "--max_minutes or --processes would help, with --resume DIR, too"
    if any(row.typical_step for row in rows):
        line += f"; {STEP_HEADING} is the speed-up of the median decoding step alone"
    return [line]


def _quality(results: Results) -> list[str]:
    """What perplexity and KL were measured on, and how to read them."""
    measured = [arm.quality for arm in results.arms if isinstance(arm.quality, Quality)]
    texts = [
        described(results.settings.text, quality.tokens, quality.window, quality.model)
        for quality in measured
        if quality.window is not None
    ]
    legend = LEGEND.items() if any(quality.kl is not None for quality in measured) else ()
    return [
        *(f"quality is of {words}" for words in dict.fromkeys(texts)),
        *(IN_LEGEND[name] + words for name, words in legend if name in IN_LEGEND),
    ]


def _how(results: Results) -> str:
    """4 processes of each arm, side by side, 4 samples each."""
    processes = max(arm.processes for arm in results.arms[1:] or results.arms)
    how = "side by side"
    if results.in_turn:
        reason = "as they do not fit into memory together"
        if results.settings.in_turn:
            reason = "as --in_turn asks"
        elif len(results.arms) > MOST_BESIDE:
            reason = "as they are many"
        how = f"loaded in turn, {reason}"
    return f"{processes} process{'es' * (processes != 1)} of each arm, {how}"


def _best(rows: Sequence[Row]) -> list[str]:
    """Which arms may be the fastest, where others are not."""
    best = [row.arm for row in rows if row.can_be_best]
    if len(best) < 2 or all(row.can_be_best is not False for row in rows):
        return []
    return [f"these {len(best)} cannot be told from the fastest: {', '.join(best)}"]


def _remarks(row: Row, reasons: bool) -> list[str]:
    remarks = [f"failed: {row.failed}"] if row.failed else []
    remarks += [f"no quality: {row.why_no_quality}"] if row.why_no_quality else []
    remarks += [row.decoding_differs] if row.decoding_differs else []
    if row.warm_up_steady is False:
        remarks.append("its warm-up did not become steady")
    remarks += [estimated] if (estimated := estimate_sentence(row)) else []
    remarks += [f"no estimate: {row.why_no_estimate}"] if row.why_no_estimate else []
    remarks += [joules] if (joules := joules_sentence(row)) else []
    return remarks + (row.why if reasons and row.verdict != "baseline" else [])


def estimate_sentence(row: Row) -> str:
    """What was estimated before, against what was measured; "" where nothing was."""
    if not row.estimated or not row.estimate_errors:
        return ""
    errors = row.estimate_errors
    token = row.estimated.get("token_seconds")
    shown = f" {1e3 * token:.3g} ms" if token else ""
    said = [
        f"{words} {errors[name]:+.0%}"
        for name, words in (
            ("prompt_seconds", "the prompt"),
            ("token_seconds", f"a token{shown}"),
            ("tokens_per_second", "tok/s"),
            ("peak_memory_bytes", "peak memory"),
        )
        if name in errors
    ]
    return f"estimated before, against measured: {', '.join(said)}"


def joules_sentence(row: Row) -> str:
    """Joules for each new token, measured and estimated; "" where neither is known."""
    estimated = (row.estimated or {}).get("joules_per_token")
    return energy.sentence(row.joules_per_token, row.idle_watts, row.why_no_joules, estimated)


def as_csv(rows: Sequence[Row]) -> str:
    """Every figure of every arm; names of nested ones are joined by dots."""
    flat = [_flat(to_json(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


TABLE, REPORT, PICTURES = "results.csv", "report.md", ("pareto.svg", "pareto.png")
WRITTEN = (TABLE, REPORT, *PICTURES, page.FILE)  # by `write`, in the folder of --output


def write(folder: Path, results: Results, rows: Sequence[Row]) -> None:
    """All but results.json. Raises LogError where that cannot be written."""
    try:
        (folder / TABLE).write_text(as_csv(rows))
        (folder / REPORT).write_text(markdown(results, rows))
        picture.draw(rows, [folder / name for name in PICTURES], page.title(results))
        page.write(folder, results, rows, full_table(rows), remarks(results, rows))
    except OSError as error:
        raise LogError(f"cannot write into {folder}: {error.strerror}") from None


def _flat(row: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    cells: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            cells |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and all(isinstance(item, float) for item in value):
            cells |= dict(zip((name, f"{name}.low", f"{name}.high"), value, strict=False))
        elif isinstance(value, list):
            cells[prefix + name] = "; ".join(value)
        elif not (isinstance(value, float) and math.isnan(value)):
            cells[prefix + name] = value
    return cells
