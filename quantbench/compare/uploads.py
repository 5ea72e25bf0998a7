"""`recommend` of one model's files instead of its schemes: the quantizations that a repository of
the hub has (org/name-GGUF:all), or the --checkpoint_path that --same_model says are one model.

The largest file that fits is the baseline, which the quality of the others is relative to. They are
read from the finest to the coarsest, and downloaded then: one that is coarser than a file far
beyond --max_kl is not downloaded at all.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from quantbench.bench.arm import make_arms, of_one_model
from quantbench.bench.process import Process
from quantbench.bench.store import ArmResult, Results
from quantbench.compare.limits import Limits
from quantbench.compare.menu import Need
from quantbench.compare.recommend import wrapped
from quantbench.compare.shortlist import Shortlist
from quantbench.compare.stop import TOO_COARSE
from quantbench.errors import UsageError
from quantbench.log import shell
from quantbench.log.config import RunConfig
from quantbench.progress import say
from quantbench.quality.types import QualityReference
from quantbench.text import counted, joined, size


@dataclass(frozen=True)
class FinestFirst(Shortlist):
    """The rule for files, which are in the order of their sizes: see bench.session.Rule."""

    def out(self, results: Results, arm: int) -> str | None:
        unread = results.arms[arm].quality is None
        if unread and any(self._far(finer) for finer in results.arms[:arm]):
            return TOO_COARSE.format(self.limits.max_kl)
        return super().out(results, arm)


def needed(paths: Sequence[str]) -> list[Need]:
    """The bytes of each file, the largest first. Nothing is downloaded of `org/name-GGUF:all`."""
    from quantbench.models.formats import hub, open_checkpoint  # imports torch

    if len(paths) == 1:
        sizes = hub.published(paths[0][: -len(":all")])
    else:
        sizes = {
            path: sum(file.stat().st_size for file in open_checkpoint(path).files) for path in paths
        }
    needs = [Need(path, count, count) for path, count in sizes.items()]
    return sorted(needs, key=lambda need: -need.held)


def chosen(needs: Sequence[Need], asked: Limits, free: int | None) -> list[Need]:
    """The baseline, and the other files that may be recommended; says which are left out. free:
    bytes of memory, None if not known. Raises UsageError where nothing is left to compare."""
    fitting = [need for need in needs if free is None or need.held <= free]
    most = asked.max_memory
    others = [need for need in fitting[1:] if most is None or need.held <= most]
    if not others:
        limits = [f"--max_memory {size(most)}"] if most is not None else []
        limits += [f"{size(free)} of free memory"] if free is not None else []
        raise UsageError(f"nothing is left to compare by {' and '.join(limits)}: {_listed(needs)}")
    kept = [fitting[0], *others]
    too_large = [need for need in fitting if need not in kept]
    for left_out, of in ((needs[: -len(fitting)], "memory"), (too_large, "--max_memory")):
        if left_out:
            for line in wrapped(f"Not measured, as larger than {of}: {_listed(left_out)}"):
                say(line)
    return kept


def arms(
    common: RunConfig, needs: Sequence[Need], downloaded: bool
) -> tuple[list[ArmResult], QualityReference]:
    """An arm for each file, and what their quality is relative to. downloaded: whether all files
    are here, and can be compared before they are read."""
    common = dataclasses.replace(common, checkpoint_path=needs[0].scheme)
    words = [shell.join(["--checkpoint_path", need.scheme]) for need in needs]
    made = make_arms(common, words, may_differ=("checkpoint_path",))
    with closing(Process()) as worker:
        if downloaded:
            return of_one_model(common, made, worker)
        say(f"The baseline is {needs[0].scheme}: {size(needs[0].held)}")
        [first], reference = of_one_model(common, made[:1], worker)
    named = zip([first, *made[1:]], needs, strict=True)
    return [dataclasses.replace(arm, name=short(need.scheme)) for arm, need in named], reference


def what(needs: Sequence[Need], path: str, downloaded: bool) -> str:
    """What the session does with them, for the line that announces it."""
    files, most = f"Quality of {counted(len(needs), 'file')}", sum(need.held for need in needs)
    if downloaded:
        return files
    return f"{files} of {path}, the finest first, at most {size(most)} to download"


def _listed(needs: Sequence[Need]) -> str:
    return joined([f"{short(need.scheme)} ({size(need.held)})" for need in needs])


def short(name: str) -> str:
    """A file's name, or its quantization in its repository; a scheme's name as it is."""
    return Path(name).name.rpartition(":")[2]
