"""The least share of the memory's limit that each scheme is held to, by instruction set.

python -m quantbench.report.floor build/roofline.json   # make floor: docs/data/floor/ISA.json
warning(config, rows)       # what roofline says of a scheme that has fallen below it
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench import files
from quantbench.answer.json_rows import DecodeRow
from quantbench.bench.process import ROOT
from quantbench.errors import LogError
from quantbench.log.about import About
from quantbench.log.config import RunConfig
from quantbench.report.doc_tables import read
from quantbench.typed_json import to_json

FOLDER = ROOT / "docs" / "data" / "floor"
DECISIVE = ("checkpoint_path", "precision", "batch_size", "num_layers")  # for shares
BELOW = 0.05  # of the limit: a share that is lower by less is taken for noise


@dataclass(frozen=True)
class Floor:
    about: About
    config: RunConfig
    shares: dict[str, float]  # of the limit, by scheme


def file() -> Path:
    """The file for the instruction set in use; it may be missing."""
    from quantbench.ops.cpu import build  # imports torch

    return FOLDER / f"{build.isa()}.json"


def warning(config: RunConfig, rows: Sequence[DecodeRow]) -> str | None:
    """One line on the schemes of a run on the CPU whose whole interval is BELOW their floor; None
    where there is none, or no floor of this machine's instruction set for such a run."""
    if not FOLDER.exists() or not (path := file()).exists():
        return None
    floor = read(Floor, str(path))
    if any(getattr(config, name) != getattr(floor.config, name) for name in DECISIVE):
        return None
    most = {row.scheme or "": s.high or s.value for row in rows if (s := row.limit_share)}
    fallen = [name for name, share in floor.shares.items() if most.get(name, 1) < share - BELOW]
    if not fallen:
        return None
    said = (f"{name} at most {most[name]:.0%} ({floor.shares[name]:.0%})" for name in fallen)
    return (
        f"below the floor in {path.relative_to(ROOT)} by 5 points or more: {', '.join(said)}; "
        f"`quantbench roofline --parts layers --schemes {','.join(fallen)}` shows which layers"
    )


def write(path: str) -> Path:
    """The floor of what `roofline --parts model --json PATH` measured here. Raises LogError."""
    rows = read(list[DecodeRow], path, "model")
    shares = {row.scheme: row.limit_share.value for row in rows if row.scheme and row.limit_share}
    if not shares:
        raise LogError(f"{path} has no scheme's share of the limit: {rows[0].failed or 'no turns'}")
    floor = Floor(read(About, path, "about"), read(RunConfig, path, "config"), shares)
    FOLDER.mkdir(parents=True, exist_ok=True)
    files.write_text("--json", file(), json.dumps(to_json(floor), indent=1) + "\n")
    return file()


if __name__ == "__main__":
    print(f"Wrote {write(sys.argv[1])}")
