"""What the stages of a search found: they take minutes, and a killed search goes on behind them.

    kept = Kept(plan, tokens, specs)
    damage = kept.stage("damage", lambda: damages(…))    # is computed once

All is in the cache, in a folder of this model, these tokens and schemes, options and code: a
search with another budget finds it, too.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from quantbench import files, quality
from quantbench.errors import LogError
from quantbench.quantize.spec import Spec
from quantbench.run.plan import Plan
from quantbench.run.saved_model import facts

T = TypeVar("T")
CODE = (Path(__file__).parent, Path(next(iter(quality.__path__))))


class Kept:
    def __init__(self, plan: Plan, tokens: Tensor, specs: Sequence[Spec]) -> None:
        """tokens: what the damage is estimated on. specs: its schemes."""
        told = facts(plan), tokens.tolist(), [*map(str, specs)], files.digest_of_code(*CODE)
        digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
        self.folder = files.cache_folder() / "recipes" / digest

    def stage(self, name: str, found: Callable[[], T]) -> T:
        """What the stage of this name found: as it was kept, else by calling `found`. Its value is
        of plain types and tensors. A folder that cannot be written keeps nothing."""
        path = self._path(name)
        try:
            value: T = torch.load(path, weights_only=True)
            return value
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):  # none, or a damaged one
            value = found()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace("recipe", path, lambda file: torch.save(value, file))
        except (OSError, LogError):
            pass
        return value

    def forget(self, name: str) -> None:
        """Let the stage be computed anew: what it found is of one moment."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"
