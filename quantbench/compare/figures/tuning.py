"""The answer of a tune: the setting to take, or the default, read off the rows of the comparison.

    results.tune = answer(results, rows, limits)

A setting is taken only where it is shown to be faster than the default. Settings that cannot be
told from the fastest (Hsu) are named, and of them the one is taken that changes the fewest options:
a winner inside the noise is none.
"""

from collections.abc import Sequence

from quantbench.compare.figures.choices import Limits, TuneAnswer
from quantbench.compare.figures.recommendation import command, recommend
from quantbench.compare.figures.row import Row
from quantbench.compare.figures.rows import best_of
from quantbench.compare.sampling.results import ArmResult, Results
from quantbench.log.config import RunConfig
from quantbench.log.options import parse
from quantbench.text import counted

NAMED = 4  # settings that are listed by name


def answer(results: Results, rows: Sequence[Row], limits: Limits) -> TuneAnswer:
    """At most two lines and a command. rows: the default's, or the baseline's, first."""
    baseline = rows[0]
    if results.baseline.failed is not None:
        why = f"Nothing to answer: the baseline, {baseline.arm}, failed: {results.baseline.failed}"
        return TuneAnswer(limits, [why], None)
    recommended = recommend(rows, limits, best_of(results))
    out = {arm for ruled in recommended.ruled_out for arm in ruled.arms}
    left = [n for n, row in enumerate(rows) if n == 0 or (row.speed_up and row.arm not in out)]
    judged = [n for n in left[1:] if (ratio := rows[n].speed_up) and ratio.confidence is not None]
    ruled = f"Ruled out: {words}" if (words := _ruled_out(recommended.exclusions())) else ""
    if not judged:
        line = f"Keep {baseline.arm}: too few processes to tell any setting from it"
        more = "more of --max_minutes or --processes would help, with --resume DIR, too"
        if len(left) == 1:
            line, more = f"Keep {baseline.arm}: no other setting was measured within the limits", ""
        return _answer(limits, [line, more or ruled], rows[0])
    best = best_of(results)(left)
    faster = [n for n in judged if rows[n].verdict == "faster"]
    candidates = [n for n in faster if n in best] or faster
    if not candidates:
        nearest = max(judged, key=lambda n: _speed(rows[n]))
        line = f"Keep {baseline.arm}: no setting is shown to be faster; {_said(rows[nearest])}"
        return _answer(limits, [line, _tied(rows, sorted(best | {0}), None) or ruled], baseline)
    changes = [_changes(results.arms[n], results.baseline) for n in range(len(rows))]
    chosen = min(candidates, key=lambda n: (changes[n], -_speed(rows[n])))
    line = f"Take {_said(rows[chosen])}{_quality(rows[chosen])}"
    tied = _tied(rows, sorted(best), rows[chosen].arm)
    return _answer(limits, [line, "; ".join(filter(None, (tied, ruled)))], rows[chosen])


def _answer(limits: Limits, lines: Sequence[str], row: Row) -> TuneAnswer:
    return TuneAnswer(limits, [line for line in lines if line], command(row.argv))


def _ruled_out(words: str) -> str:
    return words.removeprefix("Ruled out: ")


def _speed(row: Row) -> float:
    return row.speed_up.value if row.speed_up else 1.0


def _said(row: Row) -> str:
    ratio = row.speed_up
    assert ratio is not None
    ends = f"{ratio.word} {ratio.low:.2f} to {ratio.high:.2f}"
    return f"{row.arm}: {ratio.value:.2f} × the baseline's speed ({ends})"


def _quality(row: Row) -> str:
    if row.perplexity_ratio is None:
        return ""
    return f", perplexity {100 * (row.perplexity_ratio.value - 1):+.1f} %"


def _tied(rows: Sequence[Row], best: Sequence[int], chosen: str | None) -> str:
    """Which settings cannot be told from the fastest; "" where there is one alone."""
    if len(best) < 2:
        return ""
    names = [rows[n].arm for n in best]
    listed = "; ".join(names[:NAMED])
    listed += f"; and {len(names) - NAMED} more" if len(names) > NAMED else ""
    line = f"{counted(len(best), 'setting')} cannot be told from the fastest: {listed}"
    return f"{line}; {chosen} changes the fewest options" if chosen else line


def _changes(arm: ArmResult, baseline: ArmResult) -> int:
    """How many options differ from the baseline's."""
    own, other = (parse(one.argv) for one in (arm, baseline))
    return sum(getattr(own, name) != getattr(other, name) for name in vars(RunConfig()))
