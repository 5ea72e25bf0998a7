"""quantbench peers: ours against llama.cpp and Hugging Face transformers.

    quantbench peers --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    quantbench peers --schemes int8wo,fp6 --runtimes llama.cpp --json peers.json
    quantbench peers --checkpoint_path model.Q4_K_M.gguf    # as it is, in both programs
    quantbench peers --device cuda --schemes none           # transformers alone: on the card

Each scheme is compared with the format of similar size that its user would take elsewhere, on
the same weights. Every runtime is a process of its own with the same number of threads, and they
take short turns in cycles, as the arms of `ab` do.
"""

import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
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
from quantbench.progress import say
from quantbench.report import limit_tables as tables
from quantbench.report.columns import aligned
from quantbench.run.environment import choose_threads
from quantbench.text import counted

# Options of generate.py that this command takes, and where its defaults are others.
TAKEN = {"checkpoint_path", "num_layers", "prefill_size", "max_new_tokens", "threads", "device",
         "debug"}  # fmt: skip
DEFAULTS = {"checkpoint_path": "dummy:TinyLlama-1.1B-Chat-v1.0", "prefill_size": 128,
            "max_new_tokens": 33, "device": "cpu"}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The contents of the file that --json names."""

    threads: int
    rows: list[PeerRow]
    comparisons: list[Results]


@click.command(cls=Command)
@click.option("--schemes", metavar="A,B",
              help=f"Schemes of ours [{','.join(programs.WRITTEN)}]; "
                   f"{', '.join(programs.SAME_FILE)}: one file, read by both")  # fmt: skip
@click.option("--runtimes", metavar="A,B", help=f"Programs [{','.join(programs.RUNTIMES)}]")
@click.option("--cycles", type=Whole(1), default=24,
              help="Turns of each process [24]; intervals need 8")  # fmt: skip
@click.option("--max_minutes", type=Number(), default=10.0,
              help="Stop after N minutes, loading included [10]")  # fmt: skip
@click.option("--processes", type=Whole(1), default=2,
              help="Start every program N times [2]")  # fmt: skip
@click.option("--gguf", metavar="DIR", help="Keep llama.cpp's files here, and use those that exist")
@click.option("--json", "json_path", metavar="PATH", help="Write every turn here, too")
@options(without=vars(RunConfig()).keys() - TAKEN, defaults=DEFAULTS)
def peers(
    schemes: str | None,
    runtimes: str | None,
    cycles: int,
    max_minutes: float,
    processes: int,
    gguf: str | None,
    json_path: str | None,
    **given: Any,
) -> None:
    """Compare with llama.cpp and Hugging Face transformers: the same model, the same threads."""
    common = RunConfig(**given, compile=True, temperature=0, write_result="none")
    if common.max_new_tokens < 2:
        raise UsageError("--max_new_tokens takes 2 or more: the first is the prompt's")
    from quantbench import devices  # imports torch, which takes seconds
    from quantbench.models.formats import open_checkpoint
    from quantbench.models.formats.gguf import Gguf

    is_file = isinstance(open_checkpoint(common.checkpoint_path), Gguf)
    default = ("as-is",) if is_file else programs.WRITTEN
    known = (*default, *(programs.SAME_FILE if not is_file else ()))
    chosen = names_of("--schemes", schemes, default, known)
    if is_file and common.num_layers:
        raise UsageError("--num_layers: llama.cpp reads all layers of a GGUF file")
    on_cpu = devices.resolve(common.device).type == "cpu"
    running = programs.RUNTIMES if on_cpu else programs.ON_A_CARD
    wanted = names_of("--runtimes", runtimes, running, programs.RUNTIMES)
    if others := [name for name in wanted if name not in running]:
        raise UsageError(
            f"--runtimes {', '.join(others)}: compared on the CPU alone (--device cpu)"
        )
    compared = [scheme for scheme in chosen if programs.of_runtimes(scheme, wanted)]
    if not compared:
        why = f"none has a format to compare with --schemes {schemes}"
        raise UsageError(f"--runtimes {runtimes}: {why}")
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": common.checkpoint_path})
    if gguf is not None:
        if "llama.cpp" not in wanted:
            raise UsageError("--gguf keeps llama.cpp's files, and --runtimes leaves llama.cpp out")
        files.check_folder("--gguf", gguf)
    programs.check_packages(wanted)
    end, left_out = time.monotonic() + 60 * max_minutes, list[str]()
    count = choose_threads(common.threads, cores(), os.environ).count or os.cpu_count() or 1
    report = Report(count, [], [])
    with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch:
        folder = Path(gguf or scratch)
        with files.named("--gguf", folder, LogError):
            folder.mkdir(parents=True, exist_ok=True)
        for done, scheme in enumerate(compared):
            share = max(0.0, end - time.monotonic()) / 60 / (len(compared) - done)  # in minutes
            if not share and done:
                left_out += compared[done:]
                break
            plan = Settings(max_minutes=share, cycles=cycles, processes=processes, tokens=0)
            ours = dataclasses.replace(common, quantization=scheme, threads=None)
            named = programs.of_runtimes(scheme, wanted)
            arms = programs.make_arms(ours, named, folder, count)
            results = decode_limit.measure(arms, plan, programs.command(count))
            rows = decode_limit.peer_rows(scheme, results)
            report.rows.extend(row for row in rows if row.failed or row.cycles)
            others = [row.beside for row in rows if not row.failed and not row.cycles]
            left_out += [f"{scheme} against {name}" for name in others]
            report.comparisons.append(results)
            if results.ended == "interrupted":
                break
    if json_path:  # before stdout, which may be closed
        write_json(json_path, report)
        say(f"Wrote {json_path}")
    click.echo(aligned(tables.PEERS, report.rows))
    remarks = tables.peer_remarks(report.rows, report.comparisons, count)
    if any(results.ended == "max_minutes" for results in report.comparisons):
        remarks.append("--max_minutes was reached")
    remarks += [f"not compared: {', '.join(left_out)}"] if left_out else []
    click.echo("\n" + "\n".join(remarks))
    check(report.rows)


def check(rows: Sequence[PeerRow]) -> None:
    """QuantbenchError, one line, with the comparisons that failed."""
    bad = [row for row in rows if row.failed]
    named = ", ".join(f"{row.scheme} against {row.beside}" for row in bad)
    if bad:
        raise QuantbenchError(
            f"{len(bad)} of {counted(len(rows), 'comparison')} failed ({named}): {bad[0].failed}; "
            "leave out what failed with --schemes or --runtimes"
        )
