"""What peers does: each scheme of ours is compared with its peers, one scheme after the other."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.bench.store import Results, Settings
from quantbench.compare.json_rows import PeerRow
from quantbench.errors import QuantbenchError
from quantbench.log.config import RunConfig
from quantbench.peers import answer as peered
from quantbench.peers import arms as programs
from quantbench.progress import duration, say
from quantbench.text import counted

GRACE = 60.0  # seconds behind --max_minutes in which a comparison may come to its end


@dataclass(frozen=True)
class Report:
    """The contents of the file that --json names."""

    threads: int
    rows: list[PeerRow]
    comparisons: list[Results]


def compare(
    report: Report,
    common: RunConfig,
    peers_of: Mapping[str, Sequence[tuple[str, str]]],
    plan: Settings,
    folder: Path,
    paths: Mapping[str, str],
) -> None:
    """Add each scheme's comparison to the report, while there is time. folder: of GGUF files.
    paths: of programs that options name."""
    from quantbench.models.loading import load_config

    weights = load_config(common.checkpoint_path, common.num_layers).parameters()
    end = time.monotonic() + 60 * plan.max_minutes
    for number, (scheme, others) in enumerate(peers_of.items()):
        share = max(0.0, end - time.monotonic()) / 60 / (len(peers_of) - number)  # in minutes
        if not share and report.rows:
            break
        ours = dataclasses.replace(common, quantization=scheme, threads=None)
        before = duration(programs.seconds_before(scheme, others, ours, folder, weights))
        say(f"{scheme}: files and loading take about {before} for "
            f"{counted(1 + len(others), 'program')}")  # fmt: skip
        try:
            arms = programs.make_arms(ours, others, folder, report.threads, paths)
            own = dataclasses.replace(plan, max_minutes=share)
            results = peered.measure(arms, own, programs.command(report.threads))
        except KeyboardInterrupt:
            if time.monotonic() < end:
                raise
            break
        rows = peered.peer_rows(scheme, results)
        report.rows.extend(row for row in rows if row.failed or row.cycles)
        report.comparisons.append(results)
        if results.ended == "interrupted":
            break
    if not report.rows:
        raise QuantbenchError(
            f"--max_minutes {plan.max_minutes:g} ended before the first comparison: files and "
            f"loading take about {before}; give more, or name fewer --runtimes"
        )


@contextlib.contextmanager
def stopped_at(end: float) -> Iterator[None]:
    """KeyboardInterrupt where GRACE seconds after `end` the block still runs: a session ends by
    itself between cycles, but not while a file is written or a program is loaded."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, max(0.0, end - time.monotonic()) + GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
