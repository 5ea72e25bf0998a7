"""What `latency` measures: models × ranks × prompt lengths × batch sizes × arms.

    plan = make_plan(common, ["--quantization none"], ["tiny"], "1,2", "100", "1,2,4")
    plan.cells[3].config(plan)          # the options of generate.py that run this cell
    plan.difference(other)              # "--runs is 10 there and 20 here", or None

A cell is one of each; its number in `cells` is its number in the store. Arms of one place, a model
with a number of ranks, a prompt length and a batch size, are measured in the same cycles.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

from quantbench.bench.arm import read_arms, refuse_identical, refuse_unused
from quantbench.bench.store import Planned
from quantbench.errors import UsageError
from quantbench.log import shell
from quantbench.log.config import NOT_IN_ARMS, RunConfig
from quantbench.log.options import parse
from quantbench.text import counted, shown

LARGEST = 1 << 24  # of any number in a list: a longer prompt or wider batch is a mistake
LONGEST_LIST = 1000  # numbers
T = TypeVar("T")
# What a plan decides for all arms: generate.py's option, and the plan's.
DECIDED = {
    "checkpoint_path": "--checkpoint_path outside of the arms",
    "batch_size": "--batch_sizes",
    "prompt": "--sequence_lengths",
    "prefill_size": "--sequence_lengths",
    "max_new_tokens": "--decode_length",
    "context_depth": "--sequence_lengths",
    "tp": "--tp outside of the arms",
    **dict.fromkeys(("temperature", "top_k"), "always the likeliest token"),
    **{name: "no matter of an arm" for name in NOT_IN_ARMS},
    "num_samples": "--runs",
}


@dataclass(frozen=True)
class PlannedCell:
    model: str  # checkpoint path
    ranks: int
    sequence_length: int  # tokens of each prompt
    batch_size: int
    arm: Planned

    @property
    def name(self) -> str:
        parts = (self.arm.name, self.model, counted(self.ranks, "rank"))
        return ", ".join([*parts, f"prompt {self.sequence_length}, batch {self.batch_size}"])

    def config(self, decode_length: int) -> RunConfig:
        return dataclasses.replace(
            parse(self.arm.argv),
            checkpoint_path=self.model,
            tp=self.ranks,
            prefill_size=self.sequence_length,
            batch_size=self.batch_size,
            max_new_tokens=decode_length,
            temperature=0.0,
            write_result="none",
        )


@dataclass(frozen=True)
class CellPlan:
    """Everything that `latency` measures. Raises UsageError, one line, for values out of range."""

    models: list[str]  # checkpoint paths
    arms: list[Planned]
    ranks: list[int]  # of tensor parallelism
    sequence_lengths: list[int]  # tokens of a prompt
    batch_sizes: list[int]
    decode_length: int = 8  # tokens generated, the one that prefill gives among them
    runs: int = 16  # of each cell; all of them count
    warmups: int = 1  # runs before them

    def __post_init__(self) -> None:
        for option, least in (("decode_length", 2), ("runs", 1), ("warmups", 0)):
            value = getattr(self, option)
            if not least <= value <= LARGEST:
                why = ": the first token is prefill's" * (option == "decode_length")
                raise UsageError(f"--{option} takes a number from {least}{why}; given: {value}")
        for option in ("ranks", "sequence_lengths", "batch_sizes"):
            numbers = getattr(self, option)
            _check_list(_flag(option), numbers, ",".join(map(str, numbers)))
        for what, names in (("models", self.models), ("arms", [arm.name for arm in self.arms])):
            if not names:
                raise UsageError(f"a plan without {what} measures nothing: give at least one")
            if (twice := _repeated(names)) is not None:
                raise UsageError(f"{shown(twice)} is twice among the {what}: leave one out")

    @cached_property
    def cells(self) -> list[PlannedCell]:
        """In the order in which they are measured: small batches first."""
        sizes = sorted(self.batch_sizes)
        cells = product(self.models, self.ranks, self.sequence_lengths, sizes, self.arms)
        return [PlannedCell(*cell) for cell in cells]

    def difference(self, given: "CellPlan") -> str | None:
        """The first difference between the saved plan and the given one."""
        pairs = zip(self.arms, given.arms, strict=False)
        changed = next((a.name for a, b in pairs if a.text == b.text and a.argv != b.argv), None)
        if changed is not None:
            return f"the arm {shown(changed)} has other options of generate.py there"
        for name in self.__dataclass_fields__:
            kept, new = (_written(getattr(plan, name)) for plan in (self, given))
            if kept != new:
                return f"{_flag(name)} is {shown(kept)} there and {shown(new)} here"
        return None


def make_plan(
    common: RunConfig, arm_texts: Sequence[str], checkpoints: Sequence[str], **given: Any
) -> CellPlan:
    """From a command line. common: options that all arms share. given: the other fields, lists as
    "1,2,4". Raises UsageError, one line."""
    arms = read_arms(common, arm_texts, baseline=False)
    for number, arm in enumerate(arms, 1):
        own = parse([word.text for word in shell.words(arm.text)])
        for option, instead in DECIDED.items():
            if own.differs(option):
                what = f"--{option} does not belong into an arm: it is {instead}"
                raise UsageError(f"arm {number}, {shown(arm.text)}: {what}")
    refuse_unused(common, [arm.config for arm in arms])
    refuse_identical(arms)
    planned = [Planned(arm.name, arm.text, arm.argv) for arm in arms]
    return CellPlan(list(checkpoints), planned, **numbers(given))


def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a CellPlan, of which lists may be as "1,2,4". Raises UsageError, one line."""
    return {
        name: whole_numbers(_flag(name), value) if isinstance(value, str) else value
        for name, value in given.items()
    }


def whole_numbers(option: str, text: str) -> list[int]:
    """The numbers of "1,2,4". Raises UsageError for words, zero, duplicates and an empty list."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        # str.isdecimal knows digits of other scripts, and int() reads them; nobody means them.
        if not (word.isascii() and word.isdecimal() and len(word) < 40):
            raise UsageError(
                f"{option} takes numbers from 1 to {LARGEST} with commas between them, as 1,2,4; "
                f"given: {shown(word)} in {shown(text)}"
            )
    numbers = [int(word) for word in words]
    _check_list(option, numbers, text)
    return numbers


def _written(value: object) -> str:
    """A value as its option takes it."""
    if isinstance(value, list):
        return ",".join(v.text if isinstance(v, Planned) else str(v) for v in value)
    return str(value)


def _flag(field: str) -> str:
    names = {"models": "checkpoint_path", "arms": "arm", "ranks": "tp"}
    return f"--{names.get(field, field)}"


def _check_list(option: str, numbers: Sequence[int], text: str) -> None:
    if not 0 < len(numbers) <= LONGEST_LIST:
        given = counted(len(numbers), "number")
        raise UsageError(f"{option} takes from 1 to {LONGEST_LIST} numbers; given: {given}")
    if wrong := [number for number in numbers if not 1 <= number <= LARGEST]:
        given = f"{wrong[0]} in {shown(text)}"
        raise UsageError(f"{option} takes numbers from 1 to {LARGEST}; given: {given}")
    if (twice := _repeated(numbers)) is not None:
        raise UsageError(f"{option} has {twice} twice in {shown(text)}: leave one out")


def _repeated(values: Sequence[T]) -> T | None:
    """The first value that is in the sequence twice."""
    return next((value for n, value in enumerate(values) if value in values[:n]), None)
