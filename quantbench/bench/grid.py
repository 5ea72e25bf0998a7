"""Arms of the values that --over gives: every combination of them.

    common, texts = combined(common, [], ["threads=1,2", "compile=on,off"])
    texts               # ["--threads 1 --compile", "--threads 1", "--threads 2 --compile", …]

The first combination is the baseline, and --arm, where it is given, has each of them.
"""

import itertools
import math
from collections.abc import Sequence

from quantbench.errors import UsageError
from quantbench.log import shell
from quantbench.log.config import RunConfig, option_table
from quantbench.log.kinds import Switch
from quantbench.text import key, shown

MOST = 64  # arms
SWITCHES = {"on": True, "off": False}


def combined(
    common: RunConfig, texts: Sequence[str], overs: Sequence[str]
) -> tuple[RunConfig, list[str]]:
    """The options of all arms, without the switches that arms turn off, and the text of each arm.
    Raises UsageError for what is no OPTION=VALUE,VALUE; the values are checked as those of arms."""
    axes = [_axis(text) for text in overs]
    if (count := max(1, len(texts)) * math.prod(map(len, axes))) > MOST:
        raise UsageError(f"--over: {count} arms, and {MOST} at most are compared: give fewer")
    switches = [name for name in map(_name, overs) if isinstance(_kind(name), Switch)]
    arms = itertools.product(texts or [""], *axes)
    return common.without(switches), [" ".join(filter(None, parts)) for parts in arms]


def _name(over: str) -> str:
    return key(over.partition("=")[0].strip())


def _kind(name: str) -> object:
    option = option_table().get(name)
    return option.kind if option else None


def _axis(over: str) -> list[str]:
    """The options of each value."""
    values = [value.strip() for value in over.partition("=")[2].split(",")]
    if not _name(over) or "" in values:
        raise UsageError(f"--over {shown(over)} takes OPTION=VALUE,VALUE, such as threads=1,2")
    name = _name(over)
    if not isinstance(_kind(name), Switch):
        return [shell.join([f"--{name}", value]) for value in values]
    if not SWITCHES.keys() >= set(values):
        raise UsageError(f"--over {shown(over)}: --{name} is a switch, which takes on and off here")
    return [f"--{name}" * SWITCHES[value] for value in values]
