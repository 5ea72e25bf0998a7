"""What a layer's experts cost, and who computes each: the fast tier, with or without a copy, or
the slow one.

    costs = Costs(fast=Line(20e-6, 1e-6), slow=Line(50e-6, 90e-6), fetch=Line(60e-6, 900e-6))
    plan = plan_layer(tokens_per_expert, fast, costs, Overlap.COPIES)
    plan.where[expert], plan.seconds

An expert that lies in fast memory is computed there. For each of the others that has tokens there
is a choice: fetch it into fast memory and compute it there, or compute it where it lies. The plan
takes the least time:

- where all takes turns, times add up, and each expert is decided alone;
- what works at once takes as long as the slowest part. To share out work between two machines is a
  partition problem, in general a hard one. Here it is not: both costs of an expert are a + b · n in
  its n tokens, so a plan's time depends only on how many experts are fetched, m, and on how many
  tokens these have, N. Which pairs (m, N) exist is found exactly by going through the experts once,
  as in the sum of subsets, with a bit for each N. For each m the time is a convex function of N, so
  that only the two numbers next to its minimum matter.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


@dataclass(frozen=True)
class Line:
    """Seconds for n tokens or experts: fixed + each · n, and nothing for none; none negative."""

    fixed: float
    each: float

    def seconds(self, count: int) -> float:
        return self.fixed + self.each * count if count else 0.0

    def total(self, experts: int, tokens: int) -> float:
        """Seconds for so many experts that have so many tokens together."""
        return self.fixed * experts + self.each * tokens

    def times(self, factor: float) -> "Line":
        return Line(self.fixed * factor, self.each * factor)


@dataclass(frozen=True)
class Costs:
    """Seconds that experts take, of one scheme on one machine (experts/costs.py measures)."""

    fast: Line  # computing one with n tokens in the fast tier
    slow: Line  # computing it where it lies, in the slow tier
    fetch: Line  # bringing n experts into fast memory that are asked for together
    begin: Line = Line(0.0, 0.0)  # of that, asking for them: the processor computes nothing else
    ask: float = 0.0  # a layer some of whose experts are not in fast memory, besides

    def times(self, factor: float) -> "Costs":
        """The same, each so many times as long."""
        return Costs(
            fast=self.fast.times(factor),
            slow=self.slow.times(factor),
            fetch=self.fetch.times(factor),
            begin=self.begin.times(factor),
            ask=self.ask * factor,
        )

    def arrival(self, experts: int, pending: float) -> float:
        """Seconds until so many experts are there that are asked for now, behind others that take
        `pending` seconds still."""
        if pending:
            return pending + self.fetch.each * experts
        return self.fetch.seconds(experts)


class Where(Enum):
    """Who computes an expert."""

    FAST = "fast"  # the fast tier, which has it
    FETCH = "fetch"  # the fast tier, after a copy
    COMPUTE_THERE = "compute_there"  # the slow tier


class Overlap(Enum):
    """What works at the same time."""

    NONE = "none"  # nothing: fetching, the fast tier and the slow tier take turns
    COPIES = "copies"  # copies, beside one tier after the other; one processor computes in both
    # Copies, beside computing what is there at once; what arrives is computed when all is there.
    ARRIVALS = "arrivals"
    TIERS = "tiers"  # both tiers; the fast one waits for its copies
    ALL = "all"  # both tiers, and copies beside them


@dataclass(frozen=True)
class LayerPlan:
    """Who computes each expert that has tokens, and how long the layer's experts take."""

    where: dict[int, Where]  # by expert; without those that have no token
    fast_seconds: float  # computing in the fast tier
    fetch_seconds: float
    slow_seconds: float  # computing in the slow tier
    seconds: float  # all of it, with what overlaps


def plan_layer(
    tokens: Sequence[int],
    fast: Collection[int],
    costs: Costs,
    overlap: Overlap,
    ways: Sequence[Where] = (Where.FETCH, Where.COMPUTE_THERE),
    pending: float = 0.0,
    arriving: Collection[int] = (),
) -> LayerPlan:
    """The quickest way to compute a layer's experts.

    tokens: of each expert. fast: the experts in fast memory, or on their way there. ways: what may
    happen to the others, FETCH, COMPUTE_THERE or both. pending: seconds until what is on its way is
    there; copies that are asked for now come after it. arriving: those of `fast` that are on their
    way; only ARRIVALS tells them from the others.
    """
    resident = [e for e, n in enumerate(tokens) if n and e in fast]
    coming = [e for e in resident if e in arriving] if overlap is Overlap.ARRIVALS else []
    here = [e for e in resident if e not in coming]
    others = [e for e, n in enumerate(tokens) if n and e not in fast]
    others.sort(key=lambda e: tokens[e])
    counts = tuple(tokens[e] for e in others)
    work = costs.fast.total(len(here), sum(tokens[e] for e in here))
    late = costs.fast.total(len(coming), sum(tokens[e] for e in coming)) if coming else None
    if len(ways) > 1:
        step = costs.fetch.each / 8 or 1.0  # few different values, so that answers are found again
        rounded = round(pending / step) * step
        fetched = _quickest(counts, work, late, rounded, costs, overlap)
    else:
        fetched = (Where.FETCH in ways,) * len(counts)
    where = dict.fromkeys(resident, Where.FAST)
    where |= {
        e: Where.FETCH if is_fetched else Where.COMPUTE_THERE
        for e, is_fetched in zip(others, fetched, strict=True)
    }
    moved = [n for n, is_fetched in zip(counts, fetched, strict=True) if is_fetched]
    parts = _parts(work, late, counts, len(moved), sum(moved), costs, pending)
    computing = parts.fast + parts.late + parts.fetched
    return LayerPlan(where, computing, parts.fetch, parts.slow, parts.seconds(overlap))


@dataclass(frozen=True)
class Parts:
    """Seconds of what a layer does."""

    fast: float  # computing what lies in fast memory
    late: float  # computing what was on its way there before
    fetched: float  # computing what is fetched, in the fast tier
    last: float  # of these, the mean of one expert: no copy hides the last one
    begin: float  # of copying, asking for what is fetched
    fetch: float  # copying, with what was on its way before
    arrival: float  # of that, what something of this layer waits for
    slow: float  # computing in the slow tier

    def seconds(self, overlap: Overlap) -> float:
        computing = self.fast + self.late + self.fetched
        match overlap:
            case Overlap.NONE:
                return computing + self.fetch + self.slow
            case Overlap.COPIES:
                return max(computing + self.slow, self.fetch + self.last)
            case Overlap.ARRIVALS:
                there = self.fast + self.slow + self.begin
                return max(there, self.arrival) + self.late + self.fetched
            case Overlap.TIERS:
                return max(computing + self.fetch, self.slow)
            case Overlap.ALL:
                return max(computing, self.fetch + self.last, self.slow)


def _parts(
    work: float,
    late: float | None,
    counts: Sequence[int],
    fetched: int,
    tokens: int,
    costs: Costs,
    pending: float,
) -> Parts:
    """work: of experts in fast memory; late: of those on their way, if there are any. fetched,
    tokens: how many of the experts with these counts are fetched, and the tokens of those."""
    computing = costs.fast.total(fetched, tokens)
    arriving = costs.fast.seconds(1) if pending else 0.0
    copying = costs.arrival(fetched, pending)
    return Parts(
        fast=work,
        late=late or 0.0,
        fetched=computing,
        last=computing / fetched if fetched else arriving,
        begin=costs.begin.seconds(fetched),
        fetch=copying,
        arrival=copying if fetched or late is not None else 0.0,
        slow=costs.slow.total(len(counts) - fetched, sum(counts) - tokens),
    )


@lru_cache(maxsize=4096)  # decoding asks the same few questions again and again
def _quickest(
    counts: tuple[int, ...],
    work: float,
    late: float | None,
    pending: float,
    costs: Costs,
    overlap: Overlap,
) -> tuple[bool, ...]:
    """Which of the experts with these counts of tokens to fetch; work, late: as for _parts."""

    def seconds(fetched: int, tokens: int) -> float:
        return _parts(work, late, counts, fetched, tokens, costs, pending).seconds(overlap)

    if overlap is Overlap.NONE and (pending or not costs.fetch.fixed):  # all costs add up
        fetch = costs.fetch.each
        return tuple(fetch + costs.fast.seconds(n) <= costs.slow.seconds(n) for n in counts)
    # Copies that alone take longer than either extreme are in no best plan.
    bound = min(seconds(0, 0), seconds(len(counts), sum(counts)))
    most = sum(costs.arrival(m, pending) <= bound for m in range(1, len(counts) + 1))
    sums = _sums(counts, most)
    plans = [
        (seconds(fetched, tokens), fetched, tokens)
        for fetched, totals in enumerate(sums[-1])
        for tokens in _around(totals, _lowest(seconds, fetched, sum(counts)))
    ]
    _, fetched, tokens = min(plans)
    return _subset(counts, sums, fetched, tokens)


def _lowest(seconds: Callable[[int, int], float], fetched: int, most: int) -> int:
    """The number of tokens, up to `most`, at which a convex function of them is least."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if seconds(fetched, middle) <= seconds(fetched, middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


# A set of whole numbers is an int whose bit N is set where N is in the set.


def _sums(counts: Sequence[int], most: int) -> list[list[int]]:
    """sums[i][m]: the set of totals of m of the first i counts, for m up to `most`."""
    sums = [[1] + [0] * most]
    for count in counts:
        without = sums[-1]
        sums.append([1, *(without[m] | without[m - 1] << count for m in range(1, most + 1))])
    return sums


def _around(totals: int, middle: int) -> list[int]:
    """The largest number of a set up to `middle`, and the smallest above it, if there are any."""
    below, above = totals & ((2 << middle) - 1), totals >> (middle + 1)
    numbers = [below.bit_length() - 1] if below else []
    return numbers + ([(above & -above).bit_length() + middle] if above else [])


def _subset(
    counts: Sequence[int], sums: Sequence[Sequence[int]], taken: int, total: int
) -> tuple[bool, ...]:
    """Which counts to take so that `taken` of them have this total; sums: as _sums gives them."""
    is_taken = []
    for count, without in zip(reversed(counts), reversed(sums[:-1]), strict=True):
        take = not without[taken] >> total & 1
        is_taken.append(take)
        taken, total = taken - take, total - count * take
    return tuple(reversed(is_taken))
