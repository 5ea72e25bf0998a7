"""How many threads a run computes with: --threads, or as many cores as the process may use.

    chosen = choose(config.threads, cores(), os.environ)
    chosen.count           # for torch.set_num_threads
    chosen.recorded        # for the repro command: None if it need not say --threads

More threads than cores are slower than one thread. A parallel loop ends with its last thread, which
waits for a core while other threads occupy all cores by waiting for it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quantbench.errors import UsageError


@dataclass(frozen=True)
class Threads:
    """A choice of threads."""

    count: int | None  # None: leave torch's default
    cores: int | None  # physical cores that the process may use; None: not known
    recorded: int | None  # the --threads of the repro command; None: leave it out

    def warning(self) -> str | None:
        """One line if there are more threads than cores, else None."""
        if self.count is None or self.cores is None or self.count <= self.cores:
            return None
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        return f"{self.count} threads on {cores}: slower than {self.cores} (--threads {self.cores})"


def choose(
    asked: int | None, cores: int | None, variables: Mapping[str, str], ranks: int = 1
) -> Threads:
    """The number `asked` for; or else that of OMP_NUM_THREADS in `variables`; or else `cores`,
    divided among the `ranks` of a run on this machine.

    It is recorded if it was asked for, or if it differs from `cores`. Raises UsageError if more are
    asked for than OMP_THREAD_LIMIT allows; without a request that limit is applied silently.
    """
    limit = first_number(variables.get("OMP_THREAD_LIMIT", ""))
    cores = max(1, cores // ranks) if cores else None
    if asked is not None:
        if limit and asked > limit:
            raise UsageError(
                f"--threads {asked} is more than OMP_THREAD_LIMIT={limit} allows; "
                f"take --threads {limit} or unset that variable"
            )
        return Threads(asked, cores, asked)
    count = first_number(variables.get("OMP_NUM_THREADS", "")) or cores
    if count and limit:
        count = min(count, limit)
    return Threads(count, cores, count if count != cores else None)


def crowded(ranks: int, cores: int | None) -> str | None:
    """One line if there are more ranks on this machine than cores, else None."""
    if cores is None or ranks <= cores:
        return None
    return (
        f"{ranks} ranks on {cores} core{'s' * (cores > 1)} take turns and wait for one another at "
        f"every layer: slower than --tp {cores}"
    )


def first_number(text: str) -> int | None:
    """The first number of an OpenMP list such as "4,2"; None if it is not a positive number."""
    number = re.match(r"\s*([0-9]{1,6})\s*(,|$)", text)
    return (int(number[1]) or None) if number else None
