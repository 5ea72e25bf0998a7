"""Which tasks of lm-evaluation-harness are asked for. They are looked up before a model is read.

    find("hellaswag,my_task.yaml").names        # raises UsageError for one that is not there

Nothing here needs torch.
"""

import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench.errors import UsageError
from quantbench.progress import progress
from quantbench.text import shown


@dataclass(frozen=True)
class Tasks:
    """Tasks that are there."""

    names: list[str]  # names of the harness, patterns of them, or files
    manager: Any = None  # the harness's TaskManager; None where all of them are files


def find(text: str) -> Tasks:
    """The tasks of "A,B". Raises UsageError, one line, where the harness or one of them is not
    there."""
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise UsageError(f"--lm_eval takes names with commas between them; given: {shown(text)}")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("--lm_eval needs lm-evaluation-harness: pip install lm-eval")
    for name in names:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise UsageError(f"--lm_eval {name}: no such file")
    own = [name for name in names if not Path(name).is_file()]
    return Tasks(names, _manager(own) if own else None)


def _manager(names: Sequence[str]) -> Any:
    """The harness's index of its tasks, which has these. To make it takes seconds."""
    with progress("Looking up the tasks of lm-evaluation-harness", lasting=False):
        from lm_eval.tasks import TaskManager

        manager = TaskManager()
    for name in names:
        if not manager.match_tasks([name]):
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {close[0]}?" if close else "`lm-eval ls tasks` lists them"
            raise UsageError(f"--lm_eval {name}: lm-evaluation-harness has no such task; {hint}")
    return manager
