"""Which arm to use: at most three answers, each with the commands that run and verify it.

    answer = recommend(rows, Limits(max_memory=8_000_000_000), found.best)
    print(answer.text())

**Who may be recommended.** Arms that were measured here, beside a baseline, and are shown to
satisfy every limit; where an interval contains a limit, the arm is named as uncertain. Without
quality there is no recommendation: a speed alone says nothing about the text.

**What is recommended.** The fastest whole run; the smallest; and the best compromise, the arm with
the highest speed-up ÷ memory ÷ exp(10 KL), by point estimates: a tenth more speed, a tenth less
memory and 0.01 nats less KL count alike. Of arms that cannot be told from the fastest, the one with
the least memory is taken, then the one with the least KL.
"""

import dataclasses
import math
import os
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from quantbench.compare.limits import Limits, exceeded, memory_bytes, memory_said
from quantbench.compare.row import Row
from quantbench.log import shell
from quantbench.log.config import RunConfig, argv
from quantbench.log.options import parse
from quantbench.quality.thresholds import class_of
from quantbench.quality.types import QualityReference
from quantbench.report.interval import Interval
from quantbench.text import joined

KL_WEIGHT = 10  # in the compromise: 0.01 nats of KL count as 10 % of speed or memory
WIDE = 1.5  # the ends' quotient of a speed-up that says nothing
SAME_MEMORY = 1.01  # peaks of equal runs differ by less
UNKNOWN = "quality"  # a reason like the names of limits
NONE = "No arm is shown to satisfy all limits"
NAMED = 4  # arms that are listed by name; the rest are counted
# Options that a comparison sets for itself.
MEASURING = ("max_new_tokens", "write_result", "num_samples", "debug")
PROGRAM, FUSED = "quantbench", "cpu-step"
WIDTH = 100  # columns of a terminal
# Why an arm that the limits do not exclude was not timed (compare/shortlist.py).
BEATEN = "beaten in bytes and KL on the same kernels"
SLOWER = "predicted to be slower"
UNJUDGED = "quality not measured"
HEADINGS = {
    "fastest": "the fastest of those shown to be within the limits",
    "tied": "not shown to be slower than any other within the limits",
    "few cycles": "one of those that may be the fastest (too few cycles to tell; give more "
    "--max_minutes)",
    "processes": "one of those that may be the fastest (what processes of one arm may differ by is "
    "too much to tell; give more --processes)",
    "smallest": "the smallest",
    "compromise": "the best compromise by point estimates",
}
Best = Callable[[Collection[int]], set[int]]  # of these rows, those that may be the fastest


@dataclass(frozen=True)
class Choice:
    """One arm that is recommended, and for what."""

    arm: str
    what: list[str]  # "fastest", "smallest", "compromise"
    line: str
    run: str  # the command that runs it
    verify: str  # the command that compares it with the baseline again; none for the baseline


@dataclass(frozen=True)
class Recommendation:
    """At most three choices; without any, `nothing` says why and what to do."""

    limits: Limits
    choices: list[Choice]
    remarks: list[str]  # what was excluded, and what is uncertain
    nothing: str | None = None

    def text(self) -> str:
        """For a terminal. Only a single choice has the command that verifies it."""
        lines = wrapped(self.nothing) if self.nothing else []
        for choice in self.choices:
            lines += [*wrapped(choice.line), f"    run:    {choice.run}"]
            if choice.verify and len(self.choices) == 1:
                lines.append(f"    verify: {choice.verify}")
        return "\n".join([*lines, *(line for remark in self.remarks for line in wrapped(remark))])

    def markdown(self) -> str:
        """For report.md."""
        lines = ["## Recommendation", ""]
        lines += [f"- {self.nothing}"] if self.nothing else []
        for choice in self.choices:
            lines += [f"- {choice.line}", f"  - run: `{choice.run}`"]
            lines += [f"  - verify: `{choice.verify}`"] * bool(choice.verify)
        return "\n".join([*lines, *(f"- {remark}" for remark in self.remarks), ""])


@dataclass(frozen=True)
class _Arm:
    number: int
    row: Row
    speed: Interval
    memory: int
    kl: float
    beyond: dict[str, float] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)

    @property
    def says_nothing(self) -> str | None:
        """What makes the ends of a speed-up, which is neither shown above nor below 1, lie far
        apart; None where they do not."""
        low, high = self.speed.low or 0.0, self.speed.high or math.inf
        if self.number == 0 or not low < 1 < high or high <= WIDE * low:
            return None
        wide = math.log(high / low) / 2 if low and math.isfinite(high) else math.inf
        return "processes" if 2 * (self.row.floor or 0.0) ** 2 > wide**2 else "few cycles"

    @property
    def merit(self) -> float:
        return math.log(self.speed.value) - math.log(self.memory) - KL_WEIGHT * self.kl


def recommend(
    rows: Sequence[Row], limits: Limits, best: Best, reference: QualityReference | None = None
) -> Recommendation:
    """The answer for these rows, the baseline's first. reference: of quality; None: the baseline"""
    arms = _arms(rows, limits)
    within = [arm for arm in arms if not arm.beyond]
    remarks = _remarks(rows, arms, limits)
    if rows and rows[0].scheme not in (None, "none"):
        what = "speed-ups" if reference else "KL and speed-ups"
        remarks.append(f"{what} are against {rows[0].arm}, not full precision")
    if reference:
        remarks.append(reference.sentence())
    nothing = None
    if rows and rows[0].verdict == "failed":
        nothing = f"No recommendation: the baseline, {rows[0].arm}, failed"
    elif len(arms) < 2 and not any(row.dropped for row in rows):
        nothing = "No recommendation: no arm was measured beside a baseline"
    elif not any(row.kl is not None for row in rows):
        reasons = dict.fromkeys(row.why_no_quality for row in rows if row.why_no_quality)
        why = f" ({'; '.join(reasons)})" if reasons else ""
        nothing = (
            f"No recommendation: quality was not measured{why}, and speed alone says nothing about "
            "the text; leave --tokens out"
        )
    elif not within:
        nothing = _relax(rows, arms, limits)
    uncertain = [arm for arm in arms if arm.beyond and arm.beyond.keys() == arm.unclear]
    choices = [] if nothing else _choices(rows[0], within, uncertain, best)
    return Recommendation(limits, choices, remarks, nothing)


def wrapped(sentence: str) -> list[str]:
    """The sentence in lines of a terminal's width."""
    return textwrap.wrap(sentence, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def command(arguments: Sequence[str], decoder: str | None = None) -> str:
    """The command that runs generate.py as the arm did; options at their defaults are left out.
    decoder: that ran; of one that is not compiled --compile is left out."""
    config = parse(arguments).without((*MEASURING, *(["compile"] if decoder == FUSED else [])))
    words = [PROGRAM, "generate", *argv(config, said=True, always=("checkpoint_path",))]
    return at_home(shell.join(words))


def at_home(line: str) -> str:
    """The command with ~ for the home folder, which a shell expands in words without quotes."""
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"(?<= ){re.escape(home)}(?=/)", "~", line) if home.startswith("/") else line


def verifying(arguments: Sequence[str], baseline: Sequence[str], compiled: bool = True) -> str:
    """The command that compares the arm with the baseline again. compiled: whether --compile does
    anything in one of them."""
    without = [] if compiled else ["compile"]
    own, other = (parse(words).without(without) for words in (arguments, baseline))
    usual = RunConfig()
    differ = [name for name in vars(own) if getattr(own, name) != getattr(other, name)]
    of_arms = {"quantization", *differ} - set(MEASURING)
    common = other.without((*of_arms, *MEASURING))
    words = [PROGRAM, "ab", *argv(common, said=True, always=("checkpoint_path",))]
    files = "checkpoint_path" in differ  # each file has its own default for --quantization
    words += ["--same_model"] * files
    for config in (other, own):
        values = {name: getattr(config, name) for name in of_arms}
        arm = dataclasses.replace(usual, **values)
        words += ["--arm", shell.join(argv(arm, said=True, always=("quantization",) * (not files)))]
    return at_home(shell.join(words))


def said(row: Row) -> str:
    """An arm's figures in one line: decodes 1.60 × as fast (1.46 to 1.75), prompts …"""
    parts = []
    for words, ratio in (("decodes", row.decode_speed_up), ("prompts", row.prompt_speed_up)):
        if ratio is not None:
            parts.append(f"{words} {ratio.value:.2f} × as fast ({ratio.ends})")
    parts.append(f"{memory_said(row)} peak memory")
    if row.verdict == "baseline":
        parts.insert(0, "the baseline")
    if row.kl is not None:
        on = f" on the model {row.quality_model}" if row.quality_model else ""
        parts.append(f"KL {row.kl:.2g}{on} ({class_of(row.kl)})")
    return ", ".join(parts)


def _arms(rows: Sequence[Row], limits: Limits) -> list[_Arm]:
    """The rows to choose from: those with a speed-up. If the quality of any is known, one whose
    quality is not is uncertain: full precision alone needs none."""
    is_known = limits.max_kl is not None and any(row.kl is not None for row in rows)
    arms = []
    for number, row in enumerate(rows):
        memory, is_baseline = memory_bytes(row), row.verdict == "baseline"
        speed = Interval(1.0) if is_baseline else row.speed_up
        if row.verdict == "failed" or row.dropped or memory is None or speed is None:
            continue
        arm = _Arm(number, row, speed, memory, row.kl or 0.0, *exceeded(row, limits))
        if is_known and row.kl is None and (row.why_no_quality or not is_baseline):
            arm.beyond[UNKNOWN] = math.inf
            arm.unclear.add(UNKNOWN)
        arms.append(arm)
    return arms


def _choices(
    baseline: Row, arms: Sequence[_Arm], uncertain: Sequence[_Arm], best: Best
) -> list[Choice]:
    """arms: shown to be within the limits. uncertain: those that may be."""
    numbers = best([arm.number for arm in arms])
    with_uncertain = best([arm.number for arm in (*arms, *uncertain)])
    rivals = [arm.row.arm for arm in uncertain if arm.number in with_uncertain]
    tied = [arm for arm in arms if arm.number in numbers] or list(arms)
    answers = {
        "fastest": _smallest(tied, lambda arm: arm.kl),
        "smallest": _smallest(arms, lambda arm: -arm.speed.value),
        "compromise": max(arms, key=lambda arm: arm.merit),
    }
    picked: dict[int, list[str]] = {}
    for what, arm in answers.items():
        picked.setdefault(arm.number, []).append(what)
    by_number = {arm.number: arm for arm in arms}
    choices: list[Choice] = []
    for number, roles in picked.items():
        row = by_number[number].row
        speed = by_number[number].says_nothing or ("tied" if len(tied) > 1 else "fastest")
        *others, last = (HEADINGS[speed if name == "fastest" else name] for name in roles)
        role = f"{', '.join(others)} and {last}" if others else last
        line = f"{'Or' if choices else 'Use'} {row.arm}: {role}; {said(row)}"
        if "fastest" in roles and len(tied) > 1:
            names = listed([arm.row.arm for arm in tied if arm.number != number])
            line += f"; not told apart from {names}"
        if "fastest" in roles and rivals:
            line += f"; {listed(rivals)}, which may exceed a limit, may be faster"
        compiled = not row.decoder == baseline.decoder == FUSED
        verify = "" if row is baseline else verifying(row.argv, baseline.argv, compiled)
        choices.append(Choice(row.arm, roles, line, command(row.argv, row.decoder), verify))
    return choices


def _smallest(arms: Sequence[_Arm], then: Callable[[_Arm], float]) -> _Arm:
    """The arm of the least memory; of those that take as little, the one for which `then` is
    least."""
    least = min(arm.memory for arm in arms) * SAME_MEMORY
    able = [arm for arm in arms if arm.memory <= least]
    return min(able, key=lambda arm: (then(arm), -arm.speed.value))


def _remarks(rows: Sequence[Row], arms: Sequence[_Arm], limits: Limits) -> list[str]:
    """What is not recommended, by reason; uncertain ones named."""
    reasons: dict[str, list[str]] = {}
    words = {**limits.words(), UNKNOWN: UNJUDGED}
    not_timed = []  # under the limits of an earlier run
    for row in rows:
        if row.dropped in (BEATEN, SLOWER, UNJUDGED):
            reasons.setdefault(row.dropped, []).append(row.arm)
        elif row.dropped and (why := _still_out(row, limits)):
            reasons.setdefault(why, []).append(row.arm)
        elif row.dropped:
            not_timed.append(row.arm)
    uncertain = []
    for arm in arms:
        for name in arm.beyond:
            if name in arm.unclear:
                uncertain.append(f"{arm.row.arm} ({words[name]})")
            else:
                reasons.setdefault(words[name], []).append(arm.row.arm)
    failed = [row.arm for row in rows if row.verdict == "failed"]
    known = {arm.row.arm for arm in arms} | set(failed) | {r.arm for r in rows if r.dropped}
    if failed:
        reasons["failed"] = failed
    if missing := [row.arm for row in rows if row.arm not in known]:
        reasons["not measured"] = missing
    lines = [f"{why}: {listed(names)}" for why, names in reasons.items()]
    said_out = [f"Excluded: {'; '.join(lines)}"] if lines else []
    said_out += [f"May exceed a limit: {listed(uncertain)}"] if uncertain else []
    if not_timed:
        said_out.append(
            f"Not ruled out by these limits, but never timed, as that run's were stricter: "
            f"{listed(not_timed)}; measure again to compare them"
        )
    return said_out


def _still_out(row: Row, limits: Limits) -> str | None:
    """Why an arm that was not timed is ruled out by these limits; None where it is not."""
    if row.kl is None:
        return row.dropped
    beyond, unclear = exceeded(row, limits)
    return next((limits.words()[name] for name in beyond if name not in unclear), None)


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """The first names, and how many more there are."""
    shown = joined(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _relax(rows: Sequence[Row], arms: Sequence[_Arm], limits: Limits) -> str:
    """Which limits to relax, and by how much, so that the nearest arm satisfies all of them."""
    if not arms:
        words = limits.words()
        why = {_still_out(row, limits) for row in rows if row.dropped}
        names = " and ".join(f"--{name}" for name, said in words.items() if said in why)
        return f"{NONE}: each was ruled out before it was timed; relax {names or '--max_kl'}"

    def distance(arm: _Arm) -> float:
        far = 0.0
        for name, value in arm.beyond.items():
            limit = getattr(limits, name)
            relative = name in ("max_memory", "min_tok_s")
            far += abs(math.log(value / limit) if relative else KL_WEIGHT * (value - limit))
        return far

    known = [arm for arm in arms if UNKNOWN not in arm.beyond]  # the baseline's always is
    nearest = min(known or arms, key=distance)
    needed = " ".join(f"--{name} {_relaxed(name, value)}" for name, value in nearest.beyond.items())
    return f"{NONE}; the nearest, {nearest.row.arm}, needs {needed}"


def _relaxed(name: str, value: float) -> str:
    """The limit `name` rounded so that `value` satisfies it: to 0.01 GB or MB, else to three
    digits."""
    if name == "max_memory":
        unit, words = (1e9, "GB") if value >= 1e9 else (1e6, "MB")
        return f"{math.ceil(100 * value / unit) / 100:g}{words}"
    digit = 10.0 ** (math.floor(math.log10(abs(value))) - 2) if value else 1.0
    rounded = (math.floor if name.startswith("min_") else math.ceil)(value / digit)
    return f"{rounded * digit:g}"
