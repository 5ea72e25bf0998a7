"""quantbench peers: ours against other programs.

    quantbench peers --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    quantbench peers --schemes int8wo,fp6 --runtimes llama.cpp --json peers.json
    quantbench peers --batch_size 8 --runtimes llama.cpp    # eight sequences at once
    quantbench peers --checkpoint_path model.Q4_K_M.gguf    # as it is, in every program
    quantbench peers --device cuda --schemes none           # transformers alone: on the card
    quantbench peers --ik_llama ~/ik_llama.cpp/build/bin/llama-server
    quantbench peers --checkpoint_path gptq-folder --gptqmodel_python ~/gptqmodel/bin/python

Each scheme is compared with the format of similar size that its user would take elsewhere, on
the same weights. Every runtime is a process of its own with the same number of threads, and they
take short turns in cycles, as the arms of `ab` do.
"""

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.answer import decode_limit
from quantbench.answer.json_rows import PeerRow
from quantbench.arguments import names_of
from quantbench.bench.store import Results, Settings
from quantbench.cli import Command
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.host import cores
from quantbench.log.about import report_output, write_json
from quantbench.log.config import RunConfig
from quantbench.log.kinds import Number, Whole
from quantbench.log.options import options
from quantbench.peers import arms as programs
from quantbench.progress import duration, say
from quantbench.report import limit_tables as tables
from quantbench.report.columns import aligned
from quantbench.run.environment import choose_threads
from quantbench.text import counted

# Options of generate.py that this command takes, and where its defaults are others.
TAKEN = {"checkpoint_path", "num_layers", "prefill_size", "max_new_tokens", "threads", "device",
         "batch_size", "debug"}  # fmt: skip
DEFAULTS = {"checkpoint_path": "dummy:TinyLlama-1.1B-Chat-v1.0", "prefill_size": 128,
            "max_new_tokens": 33, "device": "cpu"}  # fmt: skip
GRACE = 60.0  # seconds behind --max_minutes in which a comparison may come to its end


@dataclass(frozen=True)
class Report:
    """The contents of the file that --json names."""

    threads: int
    rows: list[PeerRow]
    comparisons: list[Results]


@click.command(cls=Command)
@click.option("--schemes", metavar="A,B",
              help=f"Schemes of ours [{','.join(programs.WRITTEN)}]; "
                   f"{', '.join(programs.SAME_FILE)}: one file, read by all")  # fmt: skip
@click.option("--runtimes", metavar="A,B",
              help=f"Programs [{','.join(programs.DEFAULT)}]; openvino, too")  # fmt: skip
@click.option("--ik_llama", metavar="PATH", help="Compare with this llama-server of ik_llama.cpp")
@click.option("--gptqmodel_python", metavar="PATH",
              help="Compare a GPTQ or AWQ folder with this Python's GPTQModel")  # fmt: skip
@click.option("--cycles", type=Whole(1), default=24,
              help="Turns of each process [24]; intervals need 8")  # fmt: skip
@click.option("--max_minutes", type=Number(), default=10.0,
              help="Stop after N minutes, files and loading included [10]")  # fmt: skip
@click.option("--processes", type=Whole(1), default=2,
              help="Start every program N times [2]")  # fmt: skip
@click.option("--gguf", metavar="DIR", help="Keep the GGUF files here, and use those that exist")
@click.option("--json", "json_path", metavar="PATH", help="Write every turn here, too")
@options(without=vars(RunConfig()).keys() - TAKEN, defaults=DEFAULTS)
def peers(
    schemes: str | None,
    runtimes: str | None,
    ik_llama: str | None,
    gptqmodel_python: str | None,
    cycles: int,
    max_minutes: float,
    processes: int,
    gguf: str | None,
    json_path: str | None,
    **given: Any,
) -> None:
    """Compare with llama.cpp, transformers and others: the same model, the same threads."""
    common = RunConfig(**given, compile=True, temperature=0, write_result="none")
    if common.max_new_tokens < 2:
        raise UsageError("--max_new_tokens takes 2 or more: the first is the prompt's")
    from quantbench import devices  # imports torch, which takes seconds
    from quantbench.models.formats import open_checkpoint
    from quantbench.models.formats.gguf import Gguf

    is_file = isinstance(open_checkpoint(common.checkpoint_path), Gguf)
    of_folder = ("gptqmodel",) if gptqmodel_python else ()  # the only one that reads such folders
    known: Sequence[str] = (*programs.WRITTEN, *programs.SAME_FILE)
    known = ("as-is",) if is_file or of_folder else known
    chosen = names_of("--schemes", schemes, known[: len(programs.WRITTEN)], known)
    if is_file and common.num_layers:
        raise UsageError("--num_layers: llama.cpp reads all layers of a GGUF file")
    if of_folder and (is_file or ik_llama or gguf):
        raise UsageError("--gptqmodel_python: GPTQModel reads folders, and no GGUF file")
    asked = names_of("--runtimes", runtimes, of_folder, of_folder or programs.RUNTIMES)
    if devices.resolve(common.device).type != "cpu":
        asked = asked or [*programs.ON_A_CARD]
        if others := [name for name in asked if name not in programs.ON_A_CARD]:
            raise UsageError(
                f"--runtimes {', '.join(others)}: compared on the CPU alone (--device cpu)"
            )
    if asked and not any(programs.of_runtimes(scheme, asked) for scheme in chosen):
        why = f"none has a format to compare with --schemes {schemes}"
        raise UsageError(f"--runtimes {runtimes}: {why}")
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": common.checkpoint_path})
    if gguf is not None:
        if asked and not any(name in asked for name in programs.FILE_READERS):
            raise UsageError("--gguf keeps llama.cpp's files, and --runtimes leaves llama.cpp out")
        files.check_folder("--gguf", gguf)
    named = {"ik_llama.cpp": ik_llama, "gptqmodel": gptqmodel_python}
    paths = {name: path for name, path in named.items() if path}
    wanted = programs.chosen_runtimes(asked, paths)
    if common.batch_size > 1 and (alone := set(wanted) - set(programs.BATCHED)):
        raise UsageError(f"--batch_size: not for {', '.join(sorted(alone))} (--runtimes)")
    peers_of = {
        scheme: found for scheme in chosen if (found := programs.of_runtimes(scheme, wanted))
    }
    count = choose_threads(common.threads, cores(), os.environ).count or os.cpu_count() or 1
    report, end = Report(count, [], []), time.monotonic() + 60 * max_minutes
    plan = Settings(max_minutes=max_minutes, cycles=cycles, processes=processes, tokens=0)
    with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch, stopped_at(end):
        folder = Path(gguf or scratch)
        with files.named("--gguf", folder, LogError):
            folder.mkdir(parents=True, exist_ok=True)
        left_out = compare(report, common, peers_of, plan, folder, paths)
    if json_path:  # before stdout, which may be closed
        write_json(json_path, report)
        say(f"Wrote {json_path}")
    click.echo(aligned(tables.PEERS, report.rows))
    remarks = tables.peer_remarks(report.rows, report.comparisons, count)
    if time.monotonic() >= end or any(one.ended == "max_minutes" for one in report.comparisons):
        remarks.append("--max_minutes was reached")
    remarks += [f"not compared: {', '.join(left_out)}"] if left_out else []
    click.echo("\n" + "\n".join(remarks))
    check(report.rows)


def compare(
    report: Report,
    common: RunConfig,
    peers_of: Mapping[str, Sequence[tuple[str, str]]],
    plan: Settings,
    folder: Path,
    paths: Mapping[str, str],
) -> list[str]:
    """Add each scheme's comparison to the report, and return what is left out for lack of time.
    folder: of GGUF files. paths: of programs that options name."""
    from quantbench.models.loading import load_config

    architecture = load_config(common.checkpoint_path)
    if common.num_layers:
        architecture = architecture.with_layers(common.num_layers)
    end, left, left_out = time.monotonic() + 60 * plan.max_minutes, list(peers_of), list[str]()
    for scheme, others in peers_of.items():
        share = max(0.0, end - time.monotonic()) / 60 / len(left)  # in minutes
        if not share and report.rows:
            break
        ours = dataclasses.replace(common, quantization=scheme, threads=None)
        before = programs.seconds_before(scheme, others, ours, folder, architecture.parameters())
        number = counted(1 + len(others), "program")
        say(f"{scheme}: files and loading take about {duration(before)} for {number}")
        try:
            arms = programs.make_arms(ours, others, folder, report.threads, paths)
            own = dataclasses.replace(plan, max_minutes=share)
            results = decode_limit.measure(arms, own, programs.command(report.threads))
        except KeyboardInterrupt:
            if time.monotonic() < end:
                raise
            break
        left.remove(scheme)
        rows = decode_limit.peer_rows(scheme, results)
        report.rows.extend(row for row in rows if row.failed or row.cycles)
        unmeasured = [row.beside for row in rows if not row.failed and not row.cycles]
        left_out += [f"{scheme} against {name}" for name in unmeasured]
        report.comparisons.append(results)
        if results.ended == "interrupted":
            break
    if not report.rows:
        raise QuantbenchError(
            f"--max_minutes {plan.max_minutes:g} ended before the first comparison: files and "
            f"loading take about {duration(before)}; give more, or name fewer --runtimes"
        )
    return left_out + left


@contextlib.contextmanager
def stopped_at(end: float) -> Iterator[None]:
    """KeyboardInterrupt where GRACE seconds after `end` the block still runs: a session ends by
    itself between cycles, but not while a file is written or a program is loaded."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.0, end - time.monotonic()) + GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(rows: Sequence[PeerRow]) -> None:
    """QuantbenchError, one line, with the comparisons that failed."""
    bad = [row for row in rows if row.failed]
    named = ", ".join(f"{row.scheme} against {row.beside}" for row in bad)
    if bad:
        raise QuantbenchError(
            f"{len(bad)} of {counted(len(rows), 'comparison')} failed ({named}): {bad[0].failed}; "
            "leave out what failed with --schemes or --runtimes"
        )
