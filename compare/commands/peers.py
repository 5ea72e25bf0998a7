"""python -m compare peers: ours beside llama.cpp and Hugging Face transformers, on the CPU.

    python -m compare peers --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    python -m compare peers --schemes int8wo,fp6 --runtimes llama.cpp --json peers.json

Each scheme of ours against what its user would take elsewhere: the same shape with the same weights
in about as many bits. Every runtime is a process of its own with as many threads, and they are
sampled in turns, as `compare ab` samples its arms.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import files
from benchlog.config import RunConfig, argv
from cli import Command, say
from compare.arguments import names_of
from compare.figures.decode_limit import interval, shown
from compare.figures.limits import over, step_bytes
from compare.figures.readings import caveats, figures, is_limit, span
from compare.figures.rows import seconds
from compare.output.tables import Columns, aligned
from compare.peers import packages as peer_packages
from compare.sampling import process
from compare.sampling.comparison import Comparison
from compare.sampling.process import Process
from compare.sampling.results import ArmResult, Reading, Results, Settings, write_json
from errors import LogError, UsageError
from run.threads import choose, cores

PEER = (sys.executable, "-m", "compare.peers.worker")
# By scheme: (runtime, format) of what is beside it.
BESIDE = {
    "none": (
        ("llama.cpp", "BF16"),
        ("transformers", "BF16"),
        ("transformers, compiled", "BF16"),
    ),
    "int8wo": (("llama.cpp", "Q8_0"),),
    "fp6": (("llama.cpp", "Q6_K"),),
    "int4wo-128": (("llama.cpp", "Q4_0"),),
}
RUNTIMES = ("llama.cpp", "transformers")
FIGURES = {"decode": "token_latency", "prompt": "prefill_seconds"}  # names of rows.seconds
DEFAULT = {"max_rounds": 12, "max_minutes": 10.0, "prefill_size": 128, "max_new_tokens": 33}
Row = dict[str, Any]


@click.command(cls=Command)
@click.option("--checkpoint_path", default="dummy:TinyLlama-1.1B-Chat-v1.0", metavar="PATH",
              help="As in generate.py [dummy:TinyLlama-1.1B-Chat-v1.0]")  # fmt: skip
@click.option("--num_layers", type=click.IntRange(1), help="Keep only the first N layers")
@click.option("--schemes", metavar="A,B", help=f"[{','.join(BESIDE)}]")
@click.option("--runtimes", metavar="A,B", help=f"[{','.join(RUNTIMES)}]")
@click.option("--prefill_size", type=click.IntRange(1), default=DEFAULT["prefill_size"],
              help=f"Tokens of the prompt [{DEFAULT['prefill_size']}]")  # fmt: skip
@click.option("--max_new_tokens", type=click.IntRange(2), default=DEFAULT["max_new_tokens"],
              help=f"Tokens per sample [{DEFAULT['max_new_tokens']}]")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Of every runtime [all cores]")
@click.option("--max_rounds", type=click.IntRange(1), default=DEFAULT["max_rounds"],
              help=f"[{DEFAULT['max_rounds']}]")  # fmt: skip
@click.option("--max_minutes", type=click.FloatRange(0), default=DEFAULT["max_minutes"],
              help=f"Of rounds, per scheme [{DEFAULT['max_minutes']}]")  # fmt: skip
@click.option("--processes", type=click.IntRange(1), default=1,
              help="Start every runtime so often anew [1]")  # fmt: skip
@click.option("--gguf", metavar="DIR", help="Keep llama.cpp's files here, and use those found")
@click.option("--json", "json_path", metavar="PATH", help="Write every sample here, too")
@click.option("--debug", is_flag=True, help="Show tracebacks")
def peers(
    checkpoint_path: str,
    num_layers: int | None,
    schemes: str | None,
    runtimes: str | None,
    prefill_size: int,
    max_new_tokens: int,
    threads: int | None,
    max_rounds: int,
    max_minutes: float,
    processes: int,
    gguf: str | None,
    json_path: str | None,
    debug: bool,
) -> None:
    """Compare with llama.cpp and Hugging Face transformers: the same model, the same threads."""
    chosen = names_of("--schemes", schemes, tuple(BESIDE), tuple(BESIDE))
    beside = names_of("--runtimes", runtimes, RUNTIMES, RUNTIMES)
    peer_packages.check(beside)
    files.check_output("--json", json_path, files.is_json, "JSON")
    common = RunConfig(
        checkpoint_path=checkpoint_path,
        num_layers=num_layers,
        device="cpu",
        compile=True,
        prefill_size=prefill_size,
        max_new_tokens=max_new_tokens,
        temperature=0,
        write_result="none",
    )
    settings = Settings(
        max_rounds=max_rounds, max_minutes=max_minutes, tokens=0, processes=processes
    )
    threads = choose(threads, cores(), os.environ).count or os.cpu_count() or 1
    found: list[Row] = []
    kept: list[dict[str, Any]] = []
    with _folder(gguf) as folder:
        for scheme in chosen:
            ours = dataclasses.replace(common, quantization=scheme)
            peers = [(name, form) for name, form in BESIDE[scheme] if name.split(",")[0] in beside]
            if not peers:
                continue
            arms = _arms(ours, peers, folder, threads)
            results = Results(settings, arms, "none")
            run(results, threads)
            found += rows(scheme, results)
            kept.append(dataclasses.asdict(results))
    if not found:
        raise UsageError(f"--runtimes {runtimes}: nothing of them is beside --schemes {schemes}")
    click.echo(aligned(COLUMNS, found))
    click.echo("\n" + "\n".join(remarks(found, kept, threads)))
    if json_path:
        write_json(json_path, {"threads": threads, "rows": found, "comparisons": kept})
        say(f"Wrote {json_path}")
    if any(row["failed"] for row in found):
        sys.exit(1)


def run(results: Results, threads: int) -> None:
    """Sample the arms in turns. Raises KeyboardInterrupt where that left nothing to tell."""
    environment = ("env", f"OMP_NUM_THREADS={threads}")

    def command(number: int) -> Sequence[str]:
        return (*environment, *(PEER if number else process.COMMAND))

    Comparison(results, None, say, command, probe_rounds=True).run()
    if results.ended == "interrupted" and results.rounds == 0:
        raise KeyboardInterrupt


def rows(scheme: str, results: Results) -> list[Row]:
    """A row for each runtime beside ours: tokens per second of both, and ours ÷ theirs."""
    ours, *others = results.arms
    return [_row(scheme, ours, other, results) for other in others]


def _row(scheme: str, ours: ArmResult, theirs: ArmResult, results: Results) -> Row:
    row: Row = {"scheme": scheme, "beside": theirs.name, "rounds": results.rounds}
    row["failed"] = ours.failed or theirs.failed
    if not ours.samples or not theirs.samples:
        return row
    assert ours.facts and theirs.facts
    tokens = {"decode": 1, "prompt": ours.facts["prompt_tokens"]}
    for figure, name in FIGURES.items():
        for who, arm in (("ours", ours), ("theirs", theirs)):
            speeds = [tokens[figure] / one for many in seconds(arm, name).values() for one in many]
            row[f"{figure}_{who}_tok_s"] = statistics.median(speeds)
        row[f"{figure}_ratio"] = interval(over(ours, theirs, name))
    if readings := results.bandwidth.get("cpu"):
        row |= figures(readings)
        cached = step_bytes(ours.facts) - ours.facts["weight_bytes"]
        for who, arm in (("ours", ours), ("theirs", theirs)) if is_limit(readings) else ():
            assert arm.facts
            needed = arm.facts["weight_bytes"] + cached
            row[f"{who}_limit_share"] = row[f"decode_{who}_tok_s"] * needed / row["bandwidth"]
    return row


def _speed(name: str) -> Any:
    return lambda row: f"{row[name]:.2f} tok/s" if name in row else "-"


def _share(name: str) -> Any:
    return lambda row: f"{row[name]:.0%}" if name in row else "-"


COLUMNS: Columns = [
    ("scheme", lambda row: row["scheme"]),
    ("beside", lambda row: row["beside"]),
    ("decode: ours", _speed("decode_ours_tok_s")),
    ("theirs", _speed("decode_theirs_tok_s")),
    ("ours ÷ theirs", shown("decode_ratio")),
    ("of the limit: ours", _share("ours_limit_share")),
    ("theirs", _share("theirs_limit_share")),
    ("prompt: ours", _speed("prompt_ours_tok_s")),
    ("theirs", _speed("prompt_theirs_tok_s")),
    ("ours ÷ theirs", shown("prompt_ratio")),
]


def remarks(found: Sequence[Row], kept: Sequence[dict[str, Any]], threads: int) -> list[str]:
    """How it was measured, and what a table has no room for."""
    said = [f"{threads} threads each, in turns; medians; ratios of one round, 95 % intervals"]
    for results in kept:
        for arm in results["arms"]:
            facts = arm["facts"] or {}
            if about := facts.get("about"):
                said.append(f"{arm['name']}: {about}")
            if facts.get("warm_up_steady") is False:
                said.append(f"{arm['name']}: its warm-up did not become steady")
    readings = [
        Reading(**reading) for results in kept for reading in results["bandwidth"].get("cpu", [])
    ]
    if readings:
        said += [f"memory was read at {span(readings)}", *caveats(readings)]
    said += [f"{row['beside']}: failed: {row['failed']}" for row in found if row["failed"]]
    return list(dict.fromkeys(said))


# ------------------------------------------------------------------------------------------- arms


def _arms(
    ours: RunConfig, peers: Sequence[tuple[str, str]], folder: Path, threads: int
) -> list[ArmResult]:
    """Ours first, then each runtime; files are written for those that read them."""
    found = [ArmResult(ours.quantization, "", argv(ours))]
    for runtime, form in peers:
        work: dict[str, Any] = {
            "runtime": runtime,
            "prompt": ours.prefill_size,
            "new": ours.max_new_tokens,
            "threads": threads,
            "seed": ours.seed,
            "checkpoint": ours.checkpoint_path,
            "num_layers": ours.num_layers,
        }
        name = f"{runtime} {form}" if runtime == "llama.cpp" else runtime
        if runtime == "llama.cpp":
            work["file"] = str(_file(ours, form, folder))
        found.append(ArmResult(name, "", [json.dumps(work)]))
    return found


def _file(ours: RunConfig, form: str, folder: Path) -> Path:
    """The GGUF of the model in that format; written unless it is there."""
    layers = f"-{ours.num_layers}" if ours.num_layers else ""
    name = "".join(letter if letter.isalnum() or letter in ".-" else "_"
                   for letter in ours.checkpoint_path)  # fmt: skip
    path = folder / f"{name}{layers}-{form}.gguf"
    if path.exists():
        return path
    say(f"Writing {path.name} …")
    worker = Process(PEER)
    try:
        worker.ask(
            "write_file",
            path=str(path),
            checkpoint=ours.checkpoint_path,
            form=form,
            num_layers=ours.num_layers,
        )
    finally:
        worker.close()
    return path


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
            yield Path(scratch)
        return
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"--gguf {given}: {error.strerror}") from None
    yield Path(given)
