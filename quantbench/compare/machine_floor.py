"""What two processes of an arm differ by on this machine, kept in the cache folder.

    floor = known()               # what earlier sessions found; None without any
    learn(Compared(results))      # at the end of a session, from its restarts

A file that is damaged or of another machine is ignored with a line, and replaced by the next
session. Two sessions that end at once are harmless: what one of them found may be lost.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from quantbench import files
from quantbench.compare.intervals import Compared
from quantbench.errors import QuantbenchError
from quantbench.log.origin import machine
from quantbench.progress import say
from quantbench.stats import Floor, evidence
from quantbench.typed_json import from_json, to_json

FORMAT = 1
VARIABLE = "QUANTBENCH_FLOOR_FILE"  # another file, or none, as tests need
MEASURED = 8.0  # degrees of freedom from which nothing is assumed
MOST = 60.0  # degrees of freedom: what is older counts less
LEAST = 0.003  # deviation: processes that differ by nothing would make an interval of noise alone
LITTLE = 0.1  # degrees of freedom of a session that teaches nothing


@dataclass(frozen=True)
class Kept:
    """What the file holds."""

    format: int
    machine: str
    freedom: float
    squares: float  # sum of squares; a session of noisy turns may have lowered it below 0


def path() -> Path | None:
    given = os.environ.get(VARIABLE)
    return None if given == "none" else Path(given or files.cache_folder() / "processes.json")


def known() -> Floor | None:
    """The floor that sessions of this machine start with; None where too little was measured: one
    degree of freedom that contradicts the assumption would make intervals of no use."""
    kept = _read(path(), warns=True)
    if kept is None or kept.freedom < MEASURED:
        return None
    variance = max(kept.squares / kept.freedom, LEAST**2)
    return Floor(math.sqrt(variance), kept.freedom, assumed=0.0)


def learn(found: Compared) -> None:
    """Add what this session's processes differed by. A file that cannot be written is left."""
    file = path()
    arms = {number: turns for number, turns in found.turns.items() if number}
    if file is None or 0 not in found.turns or not arms:
        return
    variance, freedom = evidence(found.turns[0], arms, found.floor)
    if freedom < LITTLE:
        return
    before = _read(file) or Kept(FORMAT, machine(), 0.0, 0.0)
    every, squares = before.freedom + freedom, before.squares + freedom * variance
    kept = Kept(FORMAT, before.machine, min(MOST, every), squares * min(1.0, MOST / every))
    try:
        with files.named("", file.parent, QuantbenchError):
            file.parent.mkdir(parents=True, exist_ok=True)
        files.write_text("", file, json.dumps(to_json(kept)) + "\n", follow=False)
    except QuantbenchError as error:
        say(f"what processes differ by was not kept: {error}")


def _read(file: Path | None, warns: bool = False) -> Kept | None:
    if file is None:
        return None
    try:
        kept = from_json(Kept, json.loads(files.read_ours(file)))
        if kept.format != FORMAT or kept.machine != machine():
            raise ValueError("it is of another machine or version")
        if not (0 < kept.freedom <= MOST and math.isfinite(kept.squares)):
            raise ValueError("its numbers are out of range")
        return kept
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if warns:
            say(f"{file} is ignored, and what processes differ by is assumed: {error}")
        return None
