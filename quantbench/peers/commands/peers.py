"""quantbench peers: ours against other programs.

    quantbench peers --checkpoint_path dummy:TinyLlama-1.1B-Chat-v1.0
    quantbench peers --schemes int8wo,fp6 --llama_cpp llama-server --json peers.json
    quantbench peers --batch_size 8 --llama_cpp llama-server    # eight sequences at once
    quantbench peers --checkpoint_path model.Q4_K_M.gguf        # as it is, in every program
    quantbench peers --device cuda --schemes none               # transformers alone: on the card
    quantbench peers --ik_llama ~/ik_llama.cpp/build/bin/llama-server

Each scheme is compared with the format of similar size that its user would take elsewhere, on
the same weights. Every runtime is a process of its own with the same number of threads, and they
take short turns in cycles, as the arms of `ab` do.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from quantbench import files
from quantbench.cli import Command
from quantbench.compare.compare_options import decoding, turn_options, turn_settings
from quantbench.compare.json_rows import PeerRow
from quantbench.environment import choose_threads
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.help_text import names_of
from quantbench.host import cores
from quantbench.log.config import RunConfig
from quantbench.log.options import options
from quantbench.log.origin import report_output, write_json
from quantbench.peers import arms as programs
from quantbench.peers import tables
from quantbench.peers.plan import Report, compare, stopped_at
from quantbench.progress import say
from quantbench.report.columns import aligned
from quantbench.text import counted

# Other than generate.py's.
DEFAULTS = {"checkpoint_path": "dummy:TinyLlama-1.1B-Chat-v1.0", "prefill_size": 128,
            "max_new_tokens": 33, "device": "cpu"}  # fmt: skip


@click.command(cls=Command)
@click.option("--schemes", metavar="A,B",
              help=f"Schemes of ours [{','.join(programs.WRITTEN)}]; "
                   f"{', '.join(programs.SAME_FILE)}: one file, read by all")  # fmt: skip
@click.option("--runtimes", metavar="A,B",
              help=f"Programs [{','.join(programs.DEFAULT)}, and those named below]")  # fmt: skip
@click.option("--llama_cpp", metavar="PATH", help="Compare with this llama-server of llama.cpp")
@click.option("--ik_llama", metavar="PATH", help="Compare with this llama-server of ik_llama.cpp")
@turn_options
@click.option("--gguf", metavar="DIR", help="Keep the GGUF files here, and use those that exist")
@click.option("--json", "json_path", metavar="PATH", help="Write every turn here, too")
@options("num_layers", "threads", "batch_size", defaults=DEFAULTS)
def peers(
    schemes: str | None,
    runtimes: str | None,
    gguf: str | None,
    json_path: str | None,
    config: RunConfig,
    **given: Any,
) -> None:
    """Compare with transformers, llama.cpp and ik_llama.cpp: the same model, the same threads."""
    named = {name: given.pop(option[2:]) for name, option in programs.OPTIONS.items()}
    paths = {name: path for name, path in named.items() if path}
    plan, common = turn_settings(given), decoding(config)
    from quantbench import devices  # imports torch, which takes seconds
    from quantbench.models.formats import open_checkpoint
    from quantbench.models.formats.gguf import Gguf

    is_file = isinstance(open_checkpoint(common.checkpoint_path), Gguf)
    known = ["as-is"] if is_file else [*programs.WRITTEN, *programs.SAME_FILE]
    chosen = names_of("--schemes", schemes, known[: len(programs.WRITTEN)], known)
    if is_file and common.num_layers:
        raise UsageError("--num_layers: llama.cpp reads all layers of a GGUF file")
    on_card = devices.resolve(common.device).type != "cpu"
    usual = [*programs.ON_A_CARD] * on_card
    asked = names_of("--runtimes", runtimes, usual, programs.RUNTIMES)
    if on_card and (others := [name for name in asked if name not in programs.ON_A_CARD]):
        raise UsageError(f"--runtimes {', '.join(others)}: compared on the CPU alone "
                         "(--device cpu)")  # fmt: skip
    if gguf is not None:
        if asked and not any(name in asked for name in programs.FILE_READERS):
            raise UsageError("--gguf keeps llama.cpp's files, and --runtimes leaves llama.cpp out")
        files.check_folder("--gguf", gguf)
    files.check_outputs([report_output(json_path)], {"--checkpoint_path": common.checkpoint_path})
    wanted = programs.chosen_runtimes(asked, paths)
    each = {scheme: programs.of_runtimes(scheme, wanted) for scheme in chosen}
    peers_of = {scheme: others for scheme, others in each.items() if others}
    if not peers_of:
        why = f"none has a format to compare with --schemes {schemes}"
        raise UsageError(f"--runtimes {runtimes}: {why}")
    count = choose_threads(common.threads, cores(), os.environ).count or os.cpu_count() or 1
    report, end = Report(count, [], []), time.monotonic() + 60 * plan.max_minutes
    with tempfile.TemporaryDirectory(prefix="quantbench-") as scratch, stopped_at(end):
        folder = Path(gguf or scratch)
        with files.named("--gguf", folder, LogError):
            folder.mkdir(parents=True, exist_ok=True)
        compare(report, common, peers_of, plan, folder, paths)
    if json_path:  # before stdout, which may be closed
        write_json(json_path, report)
        say(f"Wrote {json_path}")
    click.echo(aligned(tables.PEERS, report.rows))
    remarks = tables.peer_remarks(report.rows, report.comparisons, count)
    if time.monotonic() >= end or any(one.ended == "max_minutes" for one in report.comparisons):
        remarks.append("--max_minutes was reached")
    measured = {(row.scheme, row.beside) for row in report.rows}
    asked_for = [(scheme, programs.name_of(*p)) for scheme in peers_of for p in peers_of[scheme]]
    if left_out := [" against ".join(pair) for pair in asked_for if pair not in measured]:
        remarks.append(f"not compared: {', '.join(left_out)}")
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
