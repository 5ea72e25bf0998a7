"""The rows for people: a table on the terminal, report.md, results.csv and a picture."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quantbench import files
from quantbench.bench.store import Results
from quantbench.compare import html as page
from quantbench.compare import pareto as picture
from quantbench.compare.limit import caveats, span
from quantbench.compare.limits import memory_said
from quantbench.compare.recommend import Recommendation, listed, wrapped
from quantbench.compare.row import Row
from quantbench.compare.rows import Scatter, covered, others_said
from quantbench.progress import duration
from quantbench.quality.thresholds import LEGEND, described
from quantbench.quality.types import Quality
from quantbench.report.columns import Columns, aligned, cells, interval, number, size, with_error
from quantbench.report.columns import markdown as in_markdown
from quantbench.report.page_templates import filled
from quantbench.run import energy
from quantbench.typed_json import to_json

TABLE, REPORT, PICTURE = "results.csv", "report.md", "pareto.svg"
WRITTEN = (TABLE, REPORT, page.FILE, PICTURE)  # by `write`, in the folder of --output
MOST_LINES = 12  # below the table of a terminal
FEWER = 0.98  # of the baseline's bytes of a step: an arm that reads less
OVERRUN = 1.1  # times --max_minutes: sessions that took longer are reported
ENDED = {
    "answered": "the answer is stable",
    "processes": "each arm had its --processes",
    "max_minutes": "--max_minutes was reached",
    "interrupted": "it was interrupted",
    "baseline failed": "the baseline failed, so there is nothing to compare with",
    "nothing to compare": "every other arm failed",
}


def _peak_memory(row: Row) -> str:
    return memory_said(row) if row.weight_bytes else "-"


P50: Callable[[Row], str] = number(lambda row: row.token_p50_s, ".3f", 1e3)
P99: Callable[[Row], str] = number(lambda row: row.token_p99_s, ".3f", 1e3, " ms")
ARM: Columns[Row] = [("arm", lambda row: row.arm)]
MAIN: Columns[Row] = [
    *ARM,
    ("decode tok/s", number(lambda row: row.decode_tok_s, ".2f")),
    ("× baseline", interval(lambda row: row.decode_speed_up, ".2f")),
    ("prompt, tok/s", number(lambda row: row.prefill_tok_s, ".1f")),
    ("× baseline", interval(lambda row: row.prompt_speed_up, ".2f")),
    ("peak memory", _peak_memory),
    ("KL, nats", with_error(lambda row: row.kl, lambda row: row.kl_standard_error, ".4f")),
    ("top-1", number(lambda row: row.top1, ".1%")),
    ("verdict", lambda row: row.verdict),
]
# What fits 100 columns of a terminal: a report has all of MAIN.
NARROW: Columns[Row] = [
    *ARM,
    ("decode tok/s", number(lambda row: row.decode_tok_s, ".2f")),
    ("× baseline", interval(lambda row: row.decode_speed_up, ".2f", "–")),
    ("prompt ×", interval(lambda row: row.prompt_speed_up, ".2f", "–")),
    ("peak", _peak_memory),
    ("KL, nats", number(lambda row: row.kl, ".4f")),
    *MAIN[-2:],
]
DETAILS: Columns[Row] = [
    *ARM,
    ("whole run, tok/s", number(lambda row: row.tok_s, ".2f")),
    ("× baseline", interval(lambda row: row.speed_up, ".2f")),
    ("first token", number(lambda row: row.time_to_first_token_s, ".2f", 1e3, " ms")),
    ("token p50, p99 (of samples)", lambda row: f"{P50(row)}, {P99(row)}"),
    ("model size", lambda row: size(row.weight_bytes)),
    ("mem/s", number(lambda row: row.weight_bytes_per_s, ".2f", 1e-9, " GB/s")),
    ("of the limit", interval(lambda row: row.limit_share, ".0%")),
    ("perplexity × baseline", interval(lambda row: row.perplexity_ratio, ".4f")),
    ("quality on tokens", number(lambda row: row.tokens, "")),
    ("kernel", lambda row: row.kernel or "-"),
]
IN_LEGEND = {"kl": "", "top1": "top-1: "}  # columns that need words, and their headings


def terminal(results: Results, rows: Sequence[Row], answer: Recommendation) -> str:
    """One table of a row an arm, and MOST_LINES below it: the answer first."""
    return "\n".join([aligned(of_prompt(NARROW, rows, ""), rows), "", below(results, rows, answer)])


def below(results: Results, rows: Sequence[Row], answer: Recommendation) -> str:
    """The answer, then lines on what differs from what was judged, noise and limits."""
    head, tail = answer.text().splitlines(), _closing(results, rows, answer)
    most = MOST_LINES - len(tail)
    if len(head) > most:
        head = [line for line in head if not line.startswith("    verify:")]
    return "\n".join([*(head if len(head) <= most else [*head[: most - 1], "    …"]), *tail])


def _closing(results: Results, rows: Sequence[Row], answer: Recommendation) -> list[str]:
    lines = [f"{row.arm}: {row.decoding_differs}" for row in rows if row.decoding_differs][:1]
    if scatter := Scatter.of(rows):
        lines.append(
            f"Noise: turns scatter by {scatter.noise:.1%} in {scatter.cycles} cycles, "
            f"processes by ±{scatter.floor:.1%}{' (assumed)' * (scatter.assumed > 0.5)}"
            + "".join(f"; memory at {span(read)}" for read in [*results.bandwidth.values()][:1])
        )
    if reached := _of_what_bytes_allow(results, rows):
        least, most = (pick(reached, key=reached.__getitem__) for pick in (min, max))
        span_of = " to ".join(f"{reached[n]:.0%} ({n})" for n in dict.fromkeys((least, most)))
        lines.append(f"Bytes: decoding reached {span_of} of the speed-up that fewer bytes allow")
    if used := others_said(results.arms):
        lines.append(f"Busy: {used}")
    if results.ended in ("max_minutes", "interrupted"):
        lines.append(f"Ended early: {ENDED[results.ended]}")
    limits = [f"no {', no '.join(answer.limits.words().values())}"]
    if noises := [row.kl_noise for row in rows if row.kl_noise is not None]:
        limits.append(f"KL {max(noises):.2g} is full precision's own noise")
    if counts := {row.tokens for row in rows if row.tokens and row.kl is not None}:
        ends = dict.fromkeys((min(counts), max(counts)))
        limits.append(f"quality on {' to '.join(map(str, ends))} tokens")
    lines.append(f"Limits: {'; '.join(limits)}")
    return [line for one in lines for line in wrapped(one)]


def _of_what_bytes_allow(results: Results, rows: Sequence[Row]) -> dict[str, float]:
    """Of arms that read fewer bytes than the baseline: decoding's speed-up ÷ the quotient of bytes,
    which `recommend` predicts before it measures."""
    runs = [arm.run.mean_step_bytes if arm.run else math.nan for arm in results.arms]
    return {
        row.arm: row.decode_speed_up.value * own / runs[0]
        for row, own in zip(rows, runs, strict=True)
        if row.decode_speed_up and own < FEWER * runs[0]
    }


def tables(rows: Sequence[Row]) -> list[list[list[str]]]:
    """The figures that a person reads; results.csv has all. Of each table the headings, then every
    row."""
    return [cells(of_prompt(MAIN, rows), rows), cells(DETAILS, rows)]


def of_prompt(columns: Columns[Row], rows: Sequence[Row], unit: str = " tokens") -> Columns[Row]:
    """The columns with the prompt's length in their headings: a ratio at 17 tokens is another one
    than at 512."""
    lengths = {row.prompt_tokens for row in rows if row.prompt_tokens}
    named = f"prompt of {min(lengths)}{unit}" if len(lengths) == 1 else "prompt"
    return [(heading.replace("prompt", named), show) for heading, show in columns]


def markdown(results: Results, rows: Sequence[Row], answer: Recommendation) -> str:
    run = page.first_run(results)
    return filled(
        "report.md.j2",
        title=page.named(results),
        answer=answer,
        tables=[in_markdown(columns, rows) for columns in (of_prompt(MAIN, rows), DETAILS)],
        remarks=remarks(results, rows),
        run=run,
        versions=[f"{name} {it}" for name, it in run.versions.items() if it] if run else [],
        results=results,
        words=page.words,
    )


def remarks(results: Results, rows: Sequence[Row]) -> list[str]:
    """How it was measured, what the tables have no room for, and why each arm is as slow as it
    is."""
    processes = max((arm.processes for arm in results.arms), default=0)
    lines = [
        f"{processes} process{'es' * (processes != 1)} of an arm at most; it ended because "
        f"{ENDED.get(results.ended or '', 'it goes on')}"
    ]
    lines += [sentence] if (sentence := _overrun(results)) else []
    if any(row.speed_up for row in rows):
        lines.append(_ratios(results))
    lines += [sentence] if (sentence := covered(rows, results)) else []
    timed = [row for row in rows if row.can_be_best is not None]
    best = [row.arm for row in timed if row.can_be_best]
    if 1 < len(best) < len(timed):
        lines.append(
            f"of the {len(timed)} arms that were timed the fastest is, with 95 % confidence, one "
            f"of these: {listed(best, most=len(best))}"
        )
    lines += _quality(results)
    for device, readings in results.bandwidth.items():
        lines += [
            f"memory of {device} was read at {span(readings)} ({readings[-1].probe}); decoding is "
            "not faster than that allows, unless a cache holds a part of the weights",
            *caveats(readings),
        ]
    said: dict[str, list[str]] = {}  # a remark on several arms appears once
    for row in rows:
        for remark in _remarks(row):
            said.setdefault(remark, []).append(row.arm)
    for remark, arms in said.items():
        others = [row.arm for row in rows if row.arm not in arms]
        most = len(arms) > max(1, len(others))
        but = f"every arm{' but ' * bool(others)}{', '.join(others)}"
        lines.append(f"{but if most else ', '.join(arms)}: {remark}")
    if used := others_said(results.arms):
        lines.append(f"{used} while samples were taken: speeds are not those of an idle machine")
    return lines


def _overrun(results: Results) -> str:
    """By how much the session took longer than --max_minutes, and why; "" where it did not."""
    end, most = results.end, 60 * results.settings.max_minutes
    if end is None or end.seconds <= OVERRUN * most:
        return ""
    took = f"it took {duration(end.seconds)} where --max_minutes allows {duration(most)}"
    return f"{took}: loading arms and their quality took {duration(end.loading or 0.0)}"


def _ratios(results: Results) -> str:
    """What the speed-ups are, and what the verdict is about."""
    whole = "both"
    if run := page.first_run(results):
        whole = f"{run.prompt_tokens} prompt and {run.config.max_new_tokens} new tokens"
    return (
        "× baseline is the speed-up, above 1 is faster, with the 95 % interval that holds for all "
        "arms together; it compares turns of one cycle, where a speed is of all turns "
        f"of its arm; the verdict is about a whole run of {whole}"
    )


def _quality(results: Results) -> list[str]:
    """What perplexity and KL were measured on, and how to read them."""
    measured = [arm.quality for arm in results.arms if isinstance(arm.quality, Quality)]
    legend = LEGEND.items() if any(quality.kl is not None for quality in measured) else ()
    texts = []
    for model in dict.fromkeys(quality.model for quality in measured):
        of_model = [q for q in measured if q.model == model and q.window is not None]
        if of_model:
            tokens, window = [q.tokens for q in of_model], max(q.window or 0 for q in of_model)
            texts.append(described(results.settings.text, tokens, window, model))
    counts: dict[int, list[str]] = {}
    for arm in results.arms[1:]:
        if isinstance(arm.quality, Quality) and arm.quality.kl is not None:
            counts.setdefault(arm.quality.tokens, []).append(arm.name)
    if len(counts) > 1:  # more are read for a KL near the limit
        each = (f"{', '.join(names)} on {count}" for count, names in sorted(counts.items()))
        texts[-1:] = [f"{texts[-1]} ({'; '.join(each)})"] if texts else []
    return [
        *([f"quality is of {'; of '.join(texts)}"] if texts else []),
        *(IN_LEGEND[name] + words for name, words in legend if name in IN_LEGEND),
    ]


def _remarks(row: Row) -> list[str]:
    remarks = [f"failed: {row.failed}"] if row.failed else []
    remarks += [f"not measured any further: {row.dropped}"] if row.dropped else []
    remarks += [f"no quality: {row.why_no_quality}"] if row.why_no_quality else []
    remarks += [row.decoding_differs] if row.decoding_differs else []
    if row.warm_up_steady is False:
        remarks.append("its warm-up did not become steady")
    joules = energy.sentence(row.joules_per_token, row.idle_watts, row.why_no_joules)
    remarks += [joules] if joules else []
    return remarks + (row.why if row.verdict != "baseline" else [])


def as_csv(rows: Sequence[Row]) -> str:
    """Every figure of every arm; names of nested ones are joined by dots."""
    flat = [_flat(to_json(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def write(folder: Path, results: Results, rows: Sequence[Row], answer: Recommendation) -> None:
    """Tables, page and pictures. Raises LogError where that cannot be written."""
    texts = {
        TABLE: as_csv(rows),
        REPORT: markdown(results, rows, answer),
        page.FILE: page.render(results, rows, answer, tables(rows), remarks(results, rows)),
    }
    for name, text in texts.items():
        files.write_text("cannot write", folder / name, text, follow=False)
    files.replace(
        "cannot write",
        folder / PICTURE,
        lambda path: picture.draw(rows, path, page.title(results)),
        follow=False,
    )


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
