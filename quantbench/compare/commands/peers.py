"""quantbench peers: ours against llama.cpp and Hugging Face transformers, on the CPU.

    quantbench peers --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    quantbench peers --schemes int8wo,fp6 --runtimes llama.cpp --json peers.json

Each scheme is compared with the format of about as many bits that its user would take elsewhere, on
the same weights. Every runtime is a process of its own with the same number of threads, and they
are sampled in turns, as `compare ab` samples its arms.
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from quantbench import files
from quantbench.answer.interval import Interval
from quantbench.answer.readings import caveats, is_limit, median, span
from quantbench.arguments import names_of
from quantbench.bench import process
from quantbench.bench.process import Process
from quantbench.cli import Command
from quantbench.compare.figures.json_rows import PeerRow
from quantbench.compare.figures.limits import over, seconds, step_bytes
from quantbench.compare.peers import packages as peer_packages
from quantbench.compare.peers.work import Work
from quantbench.compare.sampling.comparison import Comparison
from quantbench.compare.sampling.results import (
    ArmResult,
    Results,
    Settings,
    report_output,
    write_json,
)
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.host import cores
from quantbench.log.config import RunConfig, argv
from quantbench.progress import say
from quantbench.quality.block_errors import LEAST_BLOCKS
from quantbench.report.columns import Columns, aligned, interval, number
from quantbench.run.threads import choose
from quantbench.text import counted
from quantbench.typed_json import to_json

PEER = (sys.executable, "-m", "quantbench.compare.peers.worker")
# For each scheme the peers that it is compared with, as (runtime, format).
PEERS = {
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
DEFAULT = {"max_rounds": 12, "max_minutes": 10.0, "prefill_size": 128, "max_new_tokens": 33}


@dataclass(frozen=True)
class Report:
    """The contents of the file that --json names."""

    threads: int
    rows: list[PeerRow]
    comparisons: list[Results]


@click.command(cls=Command)
@click.option("--checkpoint_path", default="dummy:TinyLlama-1.1B-Chat-v1.0", metavar="PATH",
              help="The model, as in generate.py [dummy:TinyLlama-1.1B-Chat-v1.0]")  # fmt: skip
@click.option("--num_layers", type=click.IntRange(1), help="Keep only the first N layers")
@click.option("--schemes", metavar="A,B", help=f"Schemes of ours [{','.join(PEERS)}]")
@click.option("--runtimes", metavar="A,B", help=f"Programs to compare with [{','.join(RUNTIMES)}]")
@click.option("--prefill_size", type=click.IntRange(1), default=DEFAULT["prefill_size"],
              help=f"Tokens of the prompt [{DEFAULT['prefill_size']}]")  # fmt: skip
@click.option("--max_new_tokens", type=click.IntRange(2), default=DEFAULT["max_new_tokens"],
              help=f"Tokens per sample [{DEFAULT['max_new_tokens']}]")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Threads of every program [all cores]")
@click.option("--max_rounds", type=click.IntRange(1), default=DEFAULT["max_rounds"],
              help=f"Rounds of samples [{DEFAULT['max_rounds']}]")  # fmt: skip
@click.option("--max_minutes", type=click.FloatRange(0), default=DEFAULT["max_minutes"],
              help=f"Minutes of rounds for each scheme [{DEFAULT['max_minutes']}]")  # fmt: skip
@click.option("--processes", type=click.IntRange(1), default=4,
              help="Start every program N times [4]; intervals need 4")  # fmt: skip
@click.option("--gguf", metavar="DIR", help="Keep llama.cpp's files here, and use those that exist")
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
    chosen = names_of("--schemes", schemes, tuple(PEERS), tuple(PEERS))
    wanted = names_of("--runtimes", runtimes, RUNTIMES, RUNTIMES)
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": checkpoint_path})
    if gguf is not None and "llama.cpp" not in wanted:
        raise UsageError("--gguf keeps llama.cpp's files, and --runtimes leaves llama.cpp out")
    if gguf is not None:
        files.check_folder("--gguf", gguf)
    peer_packages.check(wanted)
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
    settings = Settings.of_rounds(max_rounds, processes, max_minutes)
    threads = choose(threads, cores(), os.environ).count or os.cpu_count() or 1
    peer_rows: list[PeerRow] = []
    comparisons: list[Results] = []
    with _folder(gguf) as folder:
        for scheme in chosen:
            ours = dataclasses.replace(common, quantization=scheme)
            peers = [(name, form) for name, form in PEERS[scheme] if name.split(",")[0] in wanted]
            if not peers:
                continue
            arms = _arms(ours, peers, folder, threads)
            results = Results(settings, arms, "none")
            run(results, threads)
            peer_rows += rows(scheme, results)
            comparisons.append(results)
    if not peer_rows:
        raise UsageError(
            f"--runtimes {runtimes}: none has a format to compare with --schemes {schemes}"
        )
    if json_path:  # before stdout, which may be closed
        write_json(json_path, Report(threads, peer_rows, comparisons))
        say(f"Wrote {json_path}")
    click.echo(aligned(COLUMNS, peer_rows))
    click.echo("\n" + "\n".join(remarks(peer_rows, comparisons, threads)))
    if failure := failed(peer_rows):
        raise QuantbenchError(failure)


def failed(rows: Sequence[PeerRow]) -> str | None:
    """One line for what failed, with what to do; None where all was measured."""
    bad = [row for row in rows if row.failed]
    if not bad:
        return None
    named = ", ".join(f"{row.scheme} beside {row.beside}" for row in bad)
    return (
        f"{len(bad)} of {counted(len(rows), 'comparison')} failed ({named}): {bad[0].failed}; "
        "leave out what failed with --schemes or --runtimes"
    )


def run(results: Results, threads: int) -> None:
    """Sample the arms in turns. Raises KeyboardInterrupt where it came before the first round."""
    environment = ("env", f"OMP_NUM_THREADS={threads}")

    def command(number: int) -> Sequence[str]:
        return (*environment, *(PEER if number else process.COMMAND))

    Comparison(results, None, say, command, probe_rounds=True).run()
    if results.ended == "interrupted" and results.rounds == 0:
        raise KeyboardInterrupt


def rows(scheme: str, results: Results) -> list[PeerRow]:
    """A row for each peer; our arm is the first."""
    ours, *peers = results.arms
    return [_row(scheme, ours, peer, results) for peer in peers]


def _row(scheme: str, ours: ArmResult, peer: ArmResult, results: Results) -> PeerRow:
    row = PeerRow(scheme, peer.name, results.rounds, ours.failed or peer.failed)
    run = ours.facts.run if ours.facts else None
    if not ours.samples or not peer.samples or not run or not peer.facts:
        return row
    speeds = (_speed(ours, "token_latency", 1), _speed(peer, "token_latency", 1))
    row.decode_ours_tok_s, row.decode_theirs_tok_s = speeds
    row.prompt_ours_tok_s = _speed(ours, "prefill_seconds", run.prompt_tokens)
    row.prompt_theirs_tok_s = _speed(peer, "prefill_seconds", run.prompt_tokens)
    decode, prompt = (over(ours, peer, name) for name in ("token_latency", "prefill_seconds"))
    row.decode_ratio = Interval.of(decode) if decode else None
    row.prompt_ratio = Interval.of(prompt) if prompt else None
    if readings := results.bandwidth.get("cpu"):
        row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
        if is_limit(readings):
            cached = step_bytes(run) - run.step_weight_bytes  # the same for both
            row.ours_limit_share, row.theirs_limit_share = (
                speed * (weights + cached) / row.bandwidth
                for speed, weights in zip(
                    speeds, (run.step_weight_bytes, peer.facts.weight_bytes), strict=True
                )
            )
    return row


def _speed(arm: ArmResult, name: str, tokens: int) -> float:
    """Median tokens per second. name: a figure of `limits.seconds`, which is of so many tokens."""
    return statistics.median(tokens / seconds(sample, name) for sample in arm.samples)


COLUMNS: Columns[PeerRow] = [
    ("scheme", lambda row: row.scheme),
    ("beside", lambda row: row.beside),
    ("decode: ours", number(lambda row: row.decode_ours_tok_s, ".2f", suffix=" tok/s")),
    ("theirs", number(lambda row: row.decode_theirs_tok_s, ".2f", suffix=" tok/s")),
    ("ours ÷ theirs", interval(lambda row: row.decode_ratio)),
    ("of the limit: ours", number(lambda row: row.ours_limit_share, ".0%")),
    ("theirs", number(lambda row: row.theirs_limit_share, ".0%")),
    ("prompt: ours", number(lambda row: row.prompt_ours_tok_s, ".2f", suffix=" tok/s")),
    ("theirs", number(lambda row: row.prompt_theirs_tok_s, ".2f", suffix=" tok/s")),
    ("ours ÷ theirs", interval(lambda row: row.prompt_ratio)),
]


def remarks(rows: Sequence[PeerRow], comparisons: Sequence[Results], threads: int) -> list[str]:
    """How it was measured, and what the table has no room for."""
    lines = [
        f"{threads} threads each, in turns; speeds are medians, ratios those of processes that ran "
        f"together, with 95 % intervals from {LEAST_BLOCKS} processes on"
    ]
    for arm in [arm for results in comparisons for arm in results.arms]:
        if arm.facts and arm.facts.about:
            lines.append(f"{arm.name}: {arm.facts.about}")
        if arm.facts and not arm.facts.ready.warm_up_steady:
            lines.append(f"{arm.name}: its warm-up did not become steady")
    readings = [reading for results in comparisons for reading in results.bandwidth.get("cpu", [])]
    if readings:
        lines += [f"memory was read at {span(readings)}", *caveats(readings)]
    lines += [f"{row.beside}: failed: {row.failed}" for row in rows if row.failed]
    return list(dict.fromkeys(lines))


# ------------------------------------------------------------------------------------------- arms


def _arms(
    ours: RunConfig, peers: Sequence[tuple[str, str]], folder: Path, threads: int
) -> list[ArmResult]:
    """Ours first, then each runtime. Writes the files that llama.cpp reads."""
    arms = [ArmResult(ours.quantization, "", argv(ours))]
    for runtime, form in peers:
        is_file = runtime == "llama.cpp"
        work = Work(
            runtime=runtime,
            prompt=ours.prefill_size or 1,
            new=ours.max_new_tokens,
            threads=threads,
            seed=ours.seed,
            checkpoint=ours.checkpoint_path,
            num_layers=ours.num_layers,
            file=str(_file(ours, form, folder)) if is_file else "",
        )
        name = f"{runtime} {form}" if is_file else runtime
        arms.append(ArmResult(name, "", [json.dumps(to_json(work))]))
    return arms


def _file(ours: RunConfig, form: str, folder: Path) -> Path:
    """The GGUF of the model in that format, written where it is missing."""
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
    except FileExistsError:
        raise LogError(f"--gguf {given}: not a directory") from None
    except OSError as error:
        raise LogError(f"--gguf {given}: {error.strerror}") from None
    yield Path(given)
