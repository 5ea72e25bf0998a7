"""The plan of a layer takes the least time that any assignment takes: compared with all of them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantbench.experts.plan import Costs, Line, Overlap, Where, plan_layer

# Whole numbers of seconds: sums are exact in any order, so that times are equal or are not.
SECONDS = st.integers(0, 30).map(float)
LINES = st.builds(Line, SECONDS, SECONDS)
COSTS = st.builds(Costs, LINES, LINES, LINES, LINES)
TOKENS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=7)
OVERLAPS = st.sampled_from(Overlap)


def every_time(tokens, fast, costs, overlap, pending=0, arriving=()):
    """The times of all assignments, by brute force, from each expert's own cost."""
    active = [e for e, n in enumerate(tokens) if n]
    choices = [[Where.FAST] if e in fast else [Where.FETCH, Where.COMPUTE_THERE] for e in active]
    for wheres in itertools.product(*choices):
        by = dict(zip(active, wheres, strict=True))
        yield by, time_of(by, tokens, costs, overlap, pending, arriving)


def time_of(by, tokens, costs, overlap, pending=0, arriving=()):
    def computing(line, *wheres):
        chosen = [tokens[e] for e, where in by.items() if where in wheres]
        return sum(line.fixed + line.each * n for n in chosen)

    fetched = sum(where is Where.FETCH for where in by.values())
    copied = pending + costs.fetch.each * fetched
    if fetched and not pending:  # the first copy begins now
        copied += costs.fetch.fixed
    in_fast = computing(costs.fast, Where.FAST, Where.FETCH)
    last = (costs.fast.fixed + costs.fast.each) if pending else 0
    if fetched:
        last = computing(costs.fast, Where.FETCH) / fetched
    there = computing(costs.slow, Where.COMPUTE_THERE)
    match overlap:
        case Overlap.NONE:
            return in_fast + copied + there
        case Overlap.COPIES:
            return max(in_fast + there, copied + last)
        case Overlap.ARRIVALS:
            wheres = {e: Where.FETCH if e in arriving else where for e, where in by.items()}
            late = [e for e, w in wheres.items() if w is Where.FETCH]
            after = sum(costs.fast.fixed + costs.fast.each * tokens[e] for e in late)
            asking = costs.begin.fixed + costs.begin.each * fetched if fetched else 0
            return max(in_fast - after + there + asking, copied if late else 0) + after
        case Overlap.TIERS:
            return max(in_fast + copied, there)
        case Overlap.ALL:
            return max(in_fast, copied + last, there)


@settings(max_examples=400, deadline=None)
@given(tokens=TOKENS, fast=st.sets(st.integers(0, 6)), costs=COSTS, overlap=OVERLAPS)
def test_no_assignment_takes_less(tokens, fast, costs, overlap):
    plan = plan_layer(tokens, fast, costs, overlap)
    assert plan.seconds == min(time for _, time in every_time(tokens, fast, costs, overlap))
    assert plan.seconds == time_of(plan.where, tokens, costs, overlap)
    assert set(plan.where) == {e for e, n in enumerate(tokens) if n}
    assert all((where is Where.FAST) == (e in fast) for e, where in plan.where.items())


@settings(max_examples=100, deadline=None)
@given(
    tokens=TOKENS,
    fast=st.sets(st.integers(0, 6)),
    costs=COSTS,
    overlap=OVERLAPS,
    arriving=st.sets(st.integers(0, 6)),
    eighths=st.integers(0, 40),
)
def test_nor_when_copies_are_under_way(tokens, fast, costs, overlap, arriving, eighths):
    pending, arriving = eighths * costs.fetch.each / 8, arriving & fast
    plan = plan_layer(tokens, fast, costs, overlap, pending=pending, arriving=arriving)
    times = [time for _, time in every_time(tokens, fast, costs, overlap, pending, arriving)]
    assert plan.seconds == min(times)


MICROSECONDS = st.floats(1e-7, 1e-3)
REAL = st.builds(Line, MICROSECONDS, MICROSECONDS)


@settings(max_examples=200, deadline=None)
@given(
    tokens=TOKENS,
    fast=st.sets(st.integers(0, 6)),
    costs=st.builds(Costs, REAL, REAL, REAL, REAL),
    overlap=OVERLAPS,
)
def test_nor_with_fractions_of_seconds(tokens, fast, costs, overlap):
    plan = plan_layer(tokens, fast, costs, overlap)
    least = min(time for _, time in every_time(tokens, fast, costs, overlap))
    # Sums in another order: each of some ten additions rounds by 1e-16.
    assert plan.seconds == pytest.approx(least, rel=1e-14)


@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, fast=st.sets(st.integers(0, 6)), costs=COSTS, overlap=OVERLAPS)
def test_where_one_way_is_left_all_experts_go_it(tokens, fast, costs, overlap):
    for expected in (Where.FETCH, Where.COMPUTE_THERE):
        plan = plan_layer(tokens, fast, costs, overlap, [expected])
        assert {plan.where[e] for e in plan.where if e not in fast} <= {expected}
        assert plan.seconds == time_of(plan.where, tokens, costs, overlap)


def test_by_hand():
    costs = Costs(fast=Line(1, 1), slow=Line(2, 3), fetch=Line(0, 4))
    tokens = [0, 5, 1, 2]  # in the slow tier 5, 1 and 2 tokens take 17, 5 and 8
    alone = plan_layer(tokens, {3}, costs, Overlap.NONE)
    # Fetching expert 1 takes 4 + 6 < 17; expert 2 takes 4 + 2 > 5.
    assert alone.where == {3: Where.FAST, 1: Where.FETCH, 2: Where.COMPUTE_THERE}
    assert (alone.fast_seconds, alone.fetch_seconds, alone.slow_seconds) == (3 + 6, 4, 5)
    assert alone.seconds == 18
    # A processor for both tiers: 3 + 6 + 5 while expert 1 arrives; with both fetched 3 + 6 + 2,
    # while the copies take 8 and the last expert 4 more on average: 12.
    assert plan_layer(tokens, {3}, costs, Overlap.COPIES).seconds == 12
    # Two processors: 3 + 10 in the fast tier while the slow one takes 5; the other way is worse.
    assert plan_layer(tokens, {3}, costs, Overlap.TIERS).seconds == 13
    # With copies beside them: expert 1 is there at 4 and takes 6 more.
    assert plan_layer(tokens, {3}, costs, Overlap.ALL).seconds == 10


def test_a_share_of_the_work_is_left_to_the_slow_tier():
    """Each expert alone is quicker when fetched, but not one after the other."""
    costs = Costs(fast=Line(0, 1), slow=Line(0, 4), fetch=Line(0, 1))
    plan = plan_layer([1] * 6, (), costs, Overlap.TIERS)
    # m fetched: max(2 m, 4 (6 - m)); 4 give 8, 5 give 10.
    assert plan.seconds == 8
    assert list(plan.where.values()).count(Where.FETCH) == 4


def test_nothing_to_do():
    costs = Costs(Line(1, 1), Line(1, 1), Line(0, 1))
    plan = plan_layer([0, 0], (), costs, Overlap.TIERS)
    assert plan.where == {} and plan.seconds == 0


def test_a_prompt_of_many_tokens_over_many_experts():
    """128 experts with thousands of tokens end in both tiers at once, nearly."""
    tokens = [(37 * e * e + 11 * e) % 251 + 1 for e in range(128)]
    costs = Costs(fast=Line(2e-5, 1e-6), slow=Line(3e-5, 8e-6), fetch=Line(0, 1e-4))
    plan = plan_layer(tokens, range(0, 128, 4), costs, Overlap.TIERS)
    assert plan.seconds == pytest.approx(time_of(plan.where, tokens, costs, Overlap.TIERS))
    # Both tiers end within one token's time of each other where there are this many sums.
    ends = plan.fast_seconds + plan.fetch_seconds, plan.slow_seconds
    assert abs(ends[0] - ends[1]) <= costs.fast.each + costs.slow.each
