"""What recorded runs tell of their settings, and what they do not.

    conclusions = conclude(recording, {})
    conclusions.answer                  # at most three lines

**Two questions.** Settings of identical plans do the same work: do the plans differ, and, where
settings were repeated, do these? Each is a one-way layout (one_way.py): intervals against the
default are Dunnett's, the candidates for the fastest Hsu's, as in `ab`, and both questions together
declare a difference in at most 2 % of the files in which there is none. A setting that was run once
gets no verdict. Where neither question can be asked, each option is tested by itself over all runs
(option_tests.py).

**The default** is the setting of the first run, or what the file or --default names.

**Time.** Nobody took turns, so a difference between groups that were taken one after the other may
be the machine's: order.py says so, and what is left with a linear drift taken out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quantbench.compare.arguments import nearest
from quantbench.compare.figures import order
from quantbench.compare.figures.contrasts import LEAST_FREEDOM, Fit
from quantbench.compare.figures.families import FALSE_VERDICTS, against_baseline, against_best
from quantbench.compare.figures.interval import Ratio
from quantbench.compare.figures.one_way import LEAST_RUNS, Scatter, one_way, scatter
from quantbench.compare.figures.option_tests import OptionTest, by_option
from quantbench.compare.figures.recorded_plans import PlanGroup, assignments, plans_of, written
from quantbench.compare.figures.recorded_runs import Recording, Run, Value
from quantbench.errors import UsageError

Verdict = Literal["default", "faster", "slower", "no difference shown", "too few runs"]


@dataclass(frozen=True)
class Group:
    """Runs that are compared as one: of a setting, or of identical plans."""

    name: str  # of a setting what differs from the default; of a plan its letter
    options: Mapping[str, str]  # those that all of its runs have alike, of those that vary
    plan: str  # letters of its runs' plans; "" where nothing is known
    runs: list[int]  # their numbers in the file
    seconds: list[float]
    changes: int = 0  # options that differ from the default's
    speed_up: Ratio | None = None  # over the default; None of the default itself
    verdict: Verdict = "default"
    can_be_best: bool = True

    @property
    def span(self) -> str:
        """162.16 to 205.77 s; of a single run 162.16 s."""
        low, high = min(self.seconds), max(self.seconds)
        return f"{low:.2f} s" if len(self.seconds) == 1 else f"{low:.2f} to {high:.2f} s"


@dataclass(frozen=True)
class Conclusions:
    """All that is said of a file."""

    recording: Recording
    settings: list[Group]  # the default first, the others as in the file
    plans: list[Group]  # the default's first; empty where nothing is known of any
    plan_words: dict[str, str]  # by the plan's letter: what was counted and decided
    scatter: Scatter  # of runs that should be equal
    noise_of: str  # which these are
    options: list[OptionTest]  # only where no other question could be asked
    confounded: list[str]


def conclude(recording: Recording, default: Mapping[str, str]) -> Conclusions:
    """default: values of options that name it. Raises UsageError where no run has them."""
    runs = recording.runs
    keys = list(runs[0].settings)
    varying = [key for key in keys if len({written(run.settings[key]) for run in runs}) > 1]
    first = _default(recording, default, keys)
    known = plans_of(runs, varying)
    plan_of = {run.number: plan.name for plan in known for run in plan.runs}
    settings = _settings(runs, varying, first, plan_of)
    plans = [_as_group(plan, first, varying) for plan in known]
    plans.sort(key=lambda plan: first.number not in plan.runs)
    askable = [_askable(plans), _askable(settings)]
    level = FALSE_VERDICTS / max(1, sum(askable))
    plans, settings = _compared(plans, level), _compared(settings, level)
    own = plans or settings
    tests: list[OptionTest] = []
    if not any(askable):
        values = {key: [written(run.settings[key]) for run in runs] for key in varying}
        tests = by_option([run.seconds for run in runs], values)
    return Conclusions(
        recording,
        settings,
        plans,
        {plan.name: plan.words for plan in known},
        scatter([group.seconds for group in own]),
        "runs of identical plans" if plans else "runs of one setting",
        tests,
        _confounded(plans if askable[0] else settings, settings, runs, varying),
    )


def _default(recording: Recording, given: Mapping[str, str], keys: Sequence[str]) -> Run:
    """The first run with these settings. Raises UsageError where there is none."""
    asked = {key: written(value) for key, value in recording.given_default.items()} | dict(given)
    for key in asked:
        if key not in keys:
            raise UsageError(f"--default {key}={asked[key]}: no run has a setting {key!r}; "
                             f"{nearest(key, keys)}")  # fmt: skip
    fits = (
        run
        for run in recording.runs
        if all(written(run.settings[key]).lower() == asked[key].lower() for key in asked)
    )
    if (run := next(fits, None)) is None:
        named = ", ".join(f"{key}={value}" for key, value in asked.items())
        raise UsageError(f"--default {named}: no run that counts has it; the first one has "
                         f"{assignments(recording.runs[0].settings, list(asked))}")  # fmt: skip
    return run


def _settings(
    runs: Sequence[Run], varying: Sequence[str], first: Run, plan_of: Mapping[int, str]
) -> list[Group]:
    """A group for each setting, the default first."""
    groups: dict[str, list[Run]] = {assignments(first.settings, varying): []}
    for run in runs:
        groups.setdefault(assignments(run.settings, varying), []).append(run)
    made = []
    for members in groups.values():
        own = members[0].settings
        changed = [key for key in varying if written(own[key]) != written(first.settings[key])]
        letters = dict.fromkeys(plan_of.get(run.number, "") for run in members)
        made.append(
            Group(
                assignments(own, changed) or "default",
                {key: written(own[key]) for key in varying},
                ", ".join(filter(None, letters)),
                [run.number for run in members],
                [run.seconds for run in members],
                len(changed),
            )
        )
    return made


def _as_group(plan: PlanGroup, first: Run, varying: Sequence[str]) -> Group:
    alike = {
        key: written(plan.runs[0].settings[key])
        for key in varying
        if len({written(run.settings[key]) for run in plan.runs}) == 1
    }
    return Group(
        plan.name,
        plan.options or alike,
        plan.name,
        [run.number for run in plan.runs],
        [run.seconds for run in plan.runs],
        sum(alike.get(key) not in (None, written(first.settings[key])) for key in varying),
    )


def _askable(groups: Sequence[Group]) -> bool:
    """Whether runs suffice for an interval of any of the groups against the first."""
    repeated = [group for group in groups if len(group.seconds) >= LEAST_RUNS]
    freedom = sum(len(group.seconds) - 1 for group in groups)
    first = bool(groups) and len(groups[0].seconds) >= LEAST_RUNS
    return first and len(repeated) > 1 and freedom >= LEAST_FREEDOM


def _compared(groups: Sequence[Group], level: float) -> list[Group]:
    """The groups with their intervals against the first, and whether they may be the fastest."""
    if len(groups) < 2:
        return list(groups)
    fitted: Fit = one_way([group.seconds for group in groups])
    repeated = [n for n, group in enumerate(groups) if len(group.seconds) >= LEAST_RUNS]
    count = max(1, sum(n > 0 for n in repeated))
    intervals = {i.arm: i for i in against_baseline(fitted, level, count, 1 - FALSE_VERDICTS)}
    best = set(repeated)
    if len(repeated) > 1:
        best = {one.arm for one in against_best(fitted, level, repeated) if one.can_be_best}
    result = []
    for number, group in enumerate(groups):
        can_be_best = number not in repeated or number in best
        if not number:
            result.append(_with(group, None, "default", can_be_best))
            continue
        interval = intervals[number]
        verdict: Verdict = "too few runs" if interval.confidence is None else interval.verdict
        result.append(_with(group, Ratio.of(interval).inverse, verdict, can_be_best))
    return result


def _with(group: Group, speed_up: Ratio | None, verdict: Verdict, can_be_best: bool) -> Group:
    return replace(group, speed_up=speed_up, verdict=verdict, can_be_best=can_be_best)


# ---------------------------------------------------------------------------------- the order


def _placed(group: Group) -> order.Placed:
    return order.Placed(group.runs, group.seconds)


def _confounded(
    compared: Sequence[Group],
    settings: Sequence[Group],
    runs: Sequence[Run],
    varying: Sequence[str],
) -> list[str]:
    """What the order of the runs, and options that changed together, may explain as well."""
    lines = []
    if compared:
        default, *others = compared
        shown = [n for n, other in enumerate(others) if other.verdict in ("faster", "slower")]
        for n in shown:
            lines += _order_of(default, others, n)
            lines += _together(default, others[n], runs, varying)
    alike = [_placed(group) for group in (compared or settings)]
    if (tau := order.trend(alike)) is not None:
        how = "faster" if tau < 0 else "slower"
        lines.append(
            f"runs that should be equal became {how} over the log (Kendall's tau {tau:.2f}): a "
            "page cache that warms, or another drift, is in every difference"
        )
    return lines


def _order_of(default: Group, others: Sequence[Group], chosen: int) -> list[str]:
    other = others[chosen]
    where = order.apart(_placed(default), _placed(other))
    if where is None:
        return []
    line = (
        f"order and setting are confounded: all runs of {_called(default)} (runs "
        f"{_numbers(default.runs)}) were taken {where} those of {_called(other)} (runs "
        f"{_numbers(other.runs)}), so a drift, as of a page cache that warms, may be the reason"
    )
    if where == "before" and order.falls(_placed(default)):
        line += "; the default's own runs became faster one after the other"
    left = order.without_drift(_placed(default), [_placed(group) for group in others], chosen)
    if left is not None:
        line += (
            "; with a linear drift taken out, "
            f"{Ratio.of(left).inverse.written('.2f')} × the default: {left.verdict}"
        )
    return [line]


def _together(
    default: Group, other: Group, runs: Sequence[Run], varying: Sequence[str]
) -> list[str]:
    """Options beside those that make the groups, of which one has values that the other lacks."""
    by_number = {run.number: run for run in runs}
    kept = {number: by_number[number] for number in (*default.runs, *other.runs)}
    limited: dict[str, Value] = {}
    for key in varying:
        if key in default.options or key in other.options:
            continue
        sides = [
            {written(by_number[n].settings[key]) for n in group.runs} for group in (default, other)
        ]
        common = sides[0] & sides[1]
        if sides[0] != sides[1] and len(common) == 1:
            value = common.pop()
            limited[key] = value
            kept = {n: run for n, run in kept.items() if written(run.settings[key]) == value}
    first = [kept[n].seconds for n in default.runs if n in kept]
    second = [kept[n].seconds for n in other.runs if n in kept]
    if not limited or not first or not second:
        return []
    (interval,) = against_baseline(one_way([first, second]))
    verdict = "too few runs" if interval.confidence is None else interval.verdict
    return [
        f"other options changed as well; of the runs with {assignments(limited, list(limited))} "
        f"alone ({len(first)} of {_called(default)}, {len(second)} of {_called(other)}) "
        f"{Ratio.of(interval).inverse.written('.2f')} × the default: {verdict}"
    ]


def _called(group: Group) -> str:
    return f"plan {group.name}" if group.name == group.plan else group.name


def _numbers(numbers: Sequence[int]) -> str:
    """1 to 4; 2, 5, 7."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
