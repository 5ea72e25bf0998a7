"""Commands that run one after another, each into a file, so that an interrupted series goes on.

    step = Step("caches", ("-m", "quantbench", "caches", "--json", "{work}/caches.json"), 1.0,
                "caches.json")
    run([step], folder, work, minutes=20)

Commands run in the checkout. A step whose file exists in the folder is not run again. Its command
writes below `work`; the file is moved to the folder when the command has succeeded, so the folder
holds nothing unfinished.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.cli import say
from quantbench.errors import QuantbenchError
from quantbench.log import shell
from quantbench.text import one_line

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 3.0  # a step is ended when it takes so many times the minutes that were planned
SECONDS_BETWEEN_LINES = 15  # of progress, while a step runs
SECONDS_TO_END = 20  # that a command has after SIGTERM, to write what it knows


@dataclass(frozen=True)
class Step:
    """One command of a series."""

    name: str  # its file in the folder is NAME.json
    command: tuple[str, ...]  # arguments of Python; {work} stands for the work folder
    minutes: float  # that it is planned to take
    made: str  # the file that the command writes, relative to the work folder
    accepted: tuple[int, ...] = (0,)  # exit codes of a command that has written its file
    # Turns what the command wrote into the JSON of the file; None: it is moved as it is. Raises
    # QuantbenchError where it is not what the step is for.
    convert: Callable[[Path, tuple[str, ...]], str] | None = None

    def arguments(self, work: Path) -> tuple[str, ...]:
        """What Python gets, in the checkout: no path of this machine if `work` is inside it."""
        inside = work.resolve().is_relative_to(ROOT)
        place = work.resolve().relative_to(ROOT) if inside else work.resolve()
        return tuple(word.replace("{work}", str(place)) for word in self.command)

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def shown(self, work: Path) -> str:
        """The command as a person types it."""
        return shell.join(["python", *self.arguments(work)])


@dataclass(frozen=True)
class Outcome:
    """What became of a step."""

    step: Step
    state: str  # done, kept, failed, left
    seconds: float = 0.0
    reason: str = ""  # why it failed, or was left


def run(steps: Sequence[Step], folder: Path, work: Path, minutes: float) -> list[Outcome]:
    """Run the steps whose files are missing, within so many minutes; what became of each.

    A step that fails does not stop the others. One that may not end within the minutes is left for
    the next call. Raises KeyboardInterrupt after it has ended the running command.
    """
    started, outcomes = time.monotonic(), list[Outcome]()
    folder.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, 1):
        label = f"[{number}/{len(steps)}] {step.name}"
        if step.file(folder).exists():
            outcomes.append(Outcome(step, "kept"))
            say(f"{label}: its file exists")
            continue
        left = minutes - (time.monotonic() - started) / 60
        if step.minutes > left:
            outcomes.append(Outcome(step, "left", reason="no time left"))
            say(f"{label}: left, it takes {step.minutes:g} minutes and {max(0, left):.1f} are left")
            continue
        say(f"{label}: about {step.minutes:g} min: {step.shown(work)}")
        outcomes.append(_run(step, label, folder, work, min(left, step.minutes * PATIENCE)))
        last = outcomes[-1]
        say(f"{label}: {last.state} after {last.seconds:.0f} s{last.reason and ': '}{last.reason}")
    return outcomes


def _run(step: Step, label: str, folder: Path, work: Path, minutes: float) -> Outcome:
    made, printed = work / step.made, work / f"{step.name}.log"
    _remove(work / Path(step.made).parts[0])  # of an attempt that was interrupted
    made.parent.mkdir(parents=True, exist_ok=True)
    if len(Path(step.made).parts) > 1:
        made.parent.rmdir()  # the command makes its own folder
    started = time.monotonic()
    with open(printed, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *step.arguments(work)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = _wait(process, label, started, minutes)
        except BaseException:
            _end(process)
            raise
    seconds = time.monotonic() - started
    if code is None:
        return Outcome(step, "failed", seconds, f"ended after {minutes:.1f} min; see {printed}")
    if code not in step.accepted or not made.exists():
        return Outcome(step, "failed", seconds, f"{_last_line(printed)}; see {printed}")
    if step.convert:
        try:
            text = step.convert(made, step.arguments(work))
        except QuantbenchError as error:
            return Outcome(step, "failed", seconds, f"{error}; see {printed}")
        made = made.with_suffix(".converted")
        made.write_text(text)
    _move(made, step.file(folder))
    return Outcome(step, "done", seconds)


def _wait(
    process: "subprocess.Popen[bytes]", label: str, started: float, minutes: float
) -> int | None:
    """The command's exit code; None if it was ended because it took longer."""
    deadline = started + 60 * minutes
    while True:
        wait = min(SECONDS_BETWEEN_LINES, max(0.0, deadline - time.monotonic()))
        try:
            return process.wait(wait)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline:
                _end(process)
                return None
            say(f"{label}: {time.monotonic() - started:.0f} s")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the command, with time to clean up."""
    process.terminate()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _move(source: Path, target: Path) -> None:
    """Rename; from another file system, copy and then rename."""
    scratch = target.with_name(f".{target.name}")
    shutil.copyfile(source, scratch)
    os.replace(scratch, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            return one_line(lines[-1])[:200]
    return "it printed nothing"
