"""Curves through what `calibrate` measured: seconds of any product, attention, step or prompt.

    curves = Curves(calibration)
    curves.product("int4wo-128", rows=1, inner=2048, outer=11264)
    curves.layer_rest(rows=512, config)

Every curve is a sum of terms with a meaning (bytes, operations, outputs, calls), whose
coefficients, none below zero, are fitted to the measurements by least squares of the relative
error. Between measured rows, seconds are interpolated, logarithm to logarithm. Nothing is fitted to
what is predicted.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from scipy.optimize import isotonic_regression, nnls

from quantbench.errors import UsageError
from quantbench.estimate.calibration import (
    AttentionPoint,
    Calibration,
    DrawPoint,
    ProductPoint,
    RestPoint,
    Speed,
    StackPoint,
    copies_of,
)
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.drift import by_rate
from quantbench.models.config import ModelConfig

SHORTEST = 1e-9  # seconds of a product: a fit may give none of a small one
FEW_ROWS = 16  # up to here products read weights; above they are bound by arithmetic
# Shares of memory's read speed: below the first, arithmetic alone sets the speed of a product;
# above the second, memory alone.
HALF_MEMORY, ALL_MEMORY = 0.4, 0.6
SLOTS_AT_ONCE = (1, 16, 64)  # of a cache, by kernels of attention; which it is, is found by the fit
LARGEST = 1 << 60  # bytes that no cache holds
# Inputs of a product: the most that calibration models have.
WIDEST = max(k for config in MODELS.values() for _, k in config.linear_shapes().values())

P = TypeVar("P", StackPoint, AttentionPoint)
# By name and rows: sizes of stacks, as logarithms, and seconds of a byte in each.
Stacks = dict[tuple[str, int], tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Fit:
    """seconds = Σ coefficient · term."""

    coefficients: tuple[float, ...]
    scatter: float  # standard deviation of log(fitted ÷ measured)

    def __call__(self, terms: Sequence[float]) -> float:
        return sum(c * t for c, t in zip(self.coefficients, terms, strict=True))


def fit(
    terms: Sequence[Sequence[float]],
    seconds: Sequence[float],
    relative_to: Sequence[float] | None = None,
) -> Fit:
    """The coefficients, none below zero, with the least squared error, relative to the seconds; or
    to others, if these are a part of them."""
    measured = np.asarray(seconds, dtype=float)
    unit = measured if relative_to is None else np.asarray(relative_to, dtype=float)
    matrix = np.asarray(terms, dtype=float) / unit[:, None]
    scale = matrix.max(0)
    scale[scale == 0] = 1.0
    coefficients = nnls(matrix / scale, measured / unit)[0] / scale
    ratios = np.maximum(matrix @ coefficients * unit / measured, 1e-12)
    return Fit(tuple(map(float, coefficients)), float(np.std(np.log(ratios))))


@dataclass(frozen=True)
class Placed:
    """Seconds of products in a model."""

    output: float
    input: float
    weight: float = 0.0
    wider: float = 0.0  # more of a weight for each input of its product
    waits: float = 0.0  # of a weight, for each second that it takes in a stack

    def __call__(self, inner: int, outer: int, waiting: float) -> float:
        """Of x times a weight (outer, inner). waiting: seconds for each weight in a stack of as
        many bytes as the step reads."""
        each = self.weight + self.wider * min(inner, WIDEST) + self.waits * waiting
        return each * inner * outer + self.output * outer + self.input * inner


def between(points: Mapping[int, float], at: int) -> float:
    """The value at `at`, interpolated logarithm to logarithm; outside in proportion to `at`, for a
    time per row does not change there."""
    known = sorted(points)
    if at in points:
        return points[at]
    if at < known[0]:
        return points[known[0]]
    if at > known[-1]:
        return points[known[-1]] * at / known[-1]
    above = next(k for k in known if k > at)
    below = known[known.index(above) - 1]
    share = math.log(at / below) / math.log(above / below)
    return math.exp((1 - share) * math.log(points[below]) + share * math.log(points[above]))


def medians_of_three(values: Sequence[float]) -> list[float]:
    """Each value, or the median of it and its neighbours; at an end, of it, its neighbour, and what
    the line through the two next to it says there (Tukey, Exploratory Data Analysis, 1977)."""
    if len(values) < 3:
        return list(values)
    inner = [statistics.median(values[i - 1 : i + 2]) for i in range(1, len(values) - 1)]
    first, second = inner[0], inner[min(1, len(inner) - 1)]
    before, last = inner[max(-2, -len(inner))], inner[-1]
    return [
        statistics.median([values[0], first, 3 * first - 2 * second]),
        *inner,
        statistics.median([values[-1], last, 3 * last - 2 * before]),
    ]


class Curves:
    """One calibration's curves. Times are those at the calibration's median speed."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.speed = calibration.speed
        # By scheme and rows: seconds for each weight, output and input of a product in a model.
        self.in_place: dict[tuple[str, int], Placed] = {}
        for what in ("bandwidth", "products", "attention", "draws", "wholes"):
            if not getattr(calibration, what):
                raise UsageError(f"--calibration: it has no {what}; calibrate again")

    # ------------------------------------------------------------------------ speeds that drift

    def at_reference(self, seconds: float, speed: Speed, read: int = 0) -> float:
        """Seconds as they would have been at the calibration's median speed. read: bytes of
        weights that were read meanwhile."""
        return seconds / self.slower(seconds, speed, read)

    def slower(self, seconds: float, speed: Speed, read: int = 0) -> float:
        """How many times as long products take at `speed` as at the calibration's median speed.
        seconds: what they took at the one or at the other; read: bytes of their weights."""
        share = memory_bound(read / seconds / self.speed.read)
        memory, arithmetic = self.speed.read / speed.read, self.speed.multiply / speed.multiply
        return float(memory**share * arithmetic ** (1 - share))

    # ------------------------------------------------------------------------ products

    @cached_property
    def schemes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.scheme for point in self.calibration.products))

    @cached_property
    def _products(self) -> dict[tuple[str, int], Fit]:
        groups: dict[tuple[str, int], list[ProductPoint]] = {}
        for point in self.calibration.products:
            groups.setdefault((point.scheme, point.rows), []).append(point)
        return {
            key: fit(
                [_product_terms(p.inner, p.outer, p.rows, len(points)) for p in points],
                [self.at_reference(p.seconds, p.speed, p.bytes) for p in points],
            )
            for key, points in groups.items()
        }  # fmt: skip

    def product(
        self,
        scheme: str,
        rows: int,
        inner: int,
        outer: int,
        called: bool = True,
        among: float = 0.0,
    ) -> float:
        """Seconds of x (rows, inner) times a weight (outer, inner): as it takes in a model, where
        that was fitted (`in_place`), or alone. called: with the call's cost, which products inside
        of a larger op do not have. among: bytes that the whole step reads, this weight's included;
        0: so many that no cache holds them."""
        placed = {r: f for (name, r), f in self.in_place.items() if name == scheme}
        if placed:
            seconds = {
                r: max(f(inner, outer, self.waiting(scheme, r, among)), SHORTEST)
                for r, f in placed.items()
            }
            beyond = 1.0  # more rows than a calibration model's: as much longer as alone
            if rows > (most := max(placed)):
                alone = self._alone(scheme, inner, outer)
                beyond = between(alone, rows) / max(between(alone, most), SHORTEST)
                rows = most
            return beyond * between(seconds, rows) + called * self.calibration.call_seconds
        return between(self._alone(scheme, inner, outer, called), rows)

    def _alone(self, scheme: str, inner: int, outer: int, called: bool = True) -> dict[int, float]:
        """Seconds of a product alone, by its rows."""
        terms = _product_terms(inner, outer)
        terms[-1] *= called
        seconds = {r: f(terms) for (name, r), f in self._products.items() if name == scheme}
        if not seconds:
            raise UsageError(f"{scheme} was not calibrated; {', '.join(self.schemes)} were")
        return seconds

    def weight_rate(self, scheme: str, rows: int) -> float:
        """Bytes of weights per second, of the largest product measured at these rows."""
        points = [p for p in self.calibration.products if p.scheme == scheme and p.rows == rows]
        largest = max(points, key=lambda p: p.bytes)
        return largest.bytes / self.at_reference(largest.seconds, largest.speed, largest.bytes)

    # ------------------------------------------------------------------------ what caches hold

    @cached_property
    def weight_bytes(self) -> dict[str, float]:
        """By scheme: bytes that the kernel holds for each weight of a product."""
        ratios: dict[str, list[float]] = {}
        for p in self.calibration.products:
            ratios.setdefault(p.scheme, []).append(p.bytes / (p.inner * p.outer))
        return {scheme: statistics.median(values) for scheme, values in ratios.items()}

    def waiting(self, scheme: str, rows: int, among: float) -> float:
        """Seconds of a weight where the scheme's kernel reads a stack of `among` bytes again and
        again."""
        return self.weight_bytes[scheme] * self._byte_in_stack(
            self._weight_stacks, scheme, rows, among
        )

    def cache_waiting(self, cache: str, among: float) -> float:
        """Seconds of a byte where attention reads a stack of `among` bytes again and again."""
        return self._byte_in_stack(self._cache_stacks, cache, 1, among)

    def _byte_in_stack(self, stacks: Stacks, name: str, rows: int, among: float) -> float:
        """Seconds of a byte, linear in log(size); as the reading of a block says it, where a
        calibration has no stacks."""
        if (name, rows) not in stacks:
            return self.byte_seconds(among)
        sizes, seconds = stacks[name, rows]
        return float(np.interp(math.log(among or LARGEST), sizes, seconds))

    @cached_property
    def _weight_stacks(self) -> Stacks:
        return self._by_size(self.calibration.weight_stacks)

    @cached_property
    def _cache_stacks(self) -> Stacks:
        return self._by_size(self.calibration.cache_stacks)

    def _by_size(self, points: Iterable[StackPoint]) -> Stacks:
        """By name and rows: log(bytes) of stacks, and seconds of a byte. These do not fall where
        stacks grow, and one that is unlike those beside it does not count."""
        groups: dict[tuple[str, int], list[StackPoint]] = {}
        for p in sorted(points, key=lambda p: p.bytes):
            groups.setdefault((p.name, p.rows), []).append(p)
        stacks: Stacks = {}
        for key, group in groups.items():
            some = self._medians(group)
            sizes = [math.log(p.bytes) for p in some]
            each = [seconds / p.bytes for p, seconds in some.items()]
            stacks[key] = sizes, isotonic_regression(medians_of_three(each)).x
        return stacks

    def _medians(self, points: Sequence[P]) -> dict[P, float]:
        """What was measured, and the median of its rounds' seconds at the calibration's median
        speed, without those that another process disturbed, unless it disturbed all."""
        quiet = [p for p in points if self.calibration.undisturbed(p.speed)]
        rounds: dict[P, list[float]] = {}
        for p in quiet or points:
            what = replace(p, seconds=0.0, speed=self.speed)
            rounds.setdefault(what, []).append(self._read_at_reference(p))
        return {what: statistics.median(seconds) for what, seconds in rounds.items()}

    def byte_seconds(self, size: float) -> float:
        """Seconds of a byte of a block of this size that is read again and again: a part of it is
        still in the caches. 0: no part. Linear in log(size)."""
        if not size:
            return 1 / self.speed.read
        sizes, shares = zip(*self._blocks, strict=True)
        return float(np.interp(math.log(size), sizes, shares)) / self.speed.read

    @cached_property
    def _blocks(self) -> list[tuple[float, float]]:
        """By size: log(bytes) of a block, and its seconds for a byte ÷ those of memory."""
        points = sorted(self.calibration.bandwidth, key=lambda p: p.bytes)
        return [
            (math.log(p.bytes), min(1.0, (p.speed or self.speed).read / p.read)) for p in points
        ]

    # ------------------------------------------------------------------------ attention

    @cached_property
    def _step_attention(self) -> dict[str, tuple[Fit, int, list[int]]]:
        """By kind of cache: the fit, the slots that its kernel takes at once, and the groups of
        query heads that were measured."""
        kinds = _by_cache(p for p in self.calibration.attention if p.queries == 1)
        return {kind: self._fitted_steps(points) for kind, points in kinds.items()}

    def _fitted_steps(self, measured: Sequence[AttentionPoint]) -> tuple[Fit, int, list[int]]:
        points = self._medians(measured)
        seconds = [alone + self._more_from_memory(p) for p, alone in points.items()]
        groups = sorted({p.heads // p.kv_heads for p in points})
        tried = [
            (fit([_step_terms(p, slots, groups) for p in points], seconds), slots, groups)
            for slots in SLOTS_AT_ONCE
        ]
        return min(tried, key=lambda one: one[0].scatter)

    @cached_property
    def _chunk_attention(self) -> dict[str, Fit]:
        points = [p for p in self.calibration.attention if p.queries > 1]
        alone = [p for p in points if p.depth == 0]
        fits = {}
        for kind, behind in _by_cache(points).items():
            some = self._medians([*behind, *(p for p in alone if p.cache != kind)])
            fits[kind] = fit([_chunk_terms(p) for p in some], list(some.values()))
        return fits

    def _more_from_memory(self, p: AttentionPoint) -> float:
        """Seconds by which a step's attention would have taken longer from memory: what was
        measured lay in the processor's caches in part."""
        lay = copies_of(p.bytes) * p.bytes
        return p.bytes * (self.cache_waiting(p.cache, 0) - self.cache_waiting(p.cache, lay))

    def _read_at_reference(self, point: AttentionPoint | StackPoint) -> float:
        """Seconds as they would have been at the calibration's median speed."""
        drift = by_rate(point.bytes / point.seconds, point.speed.read)
        return point.seconds / drift.slower(point.speed, self.speed)

    def attention(
        self,
        config: ModelConfig,
        cache: str,
        rows: int,
        queries: int,
        depth: int,
        cached: int,
        among: float = 0.0,
    ) -> float:
        """Seconds of one layer's attention of `queries` positions after `depth`. cached: bytes of
        the keys and values before them. among: bytes that the whole step reads, these included."""
        kinds = self._step_attention if queries == 1 else self._chunk_attention
        if cache not in kinds:
            raise UsageError(f"--kv_cache {cache} was not calibrated; {', '.join(kinds)} were")
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        none = Speed(self.speed.read, self.speed.multiply)
        point = AttentionPoint(cache, rows, queries, depth, *heads, cached, 0.0, none)
        if queries > 1:
            return self._chunk_attention[cache](_chunk_terms(point))
        fitted, slots, groups = self._step_attention[cache]
        # It computes and waits in turn (docs/LOG.md), and what is fitted waited for memory.
        waiting = self.cache_waiting(cache, among) - self.cache_waiting(cache, 0)
        return max(fitted(_step_terms(point, slots, groups)) + cached * waiting, SHORTEST)

    # ------------------------------------------------------------------------ rest and draws

    @cached_property
    def _rest(self) -> dict[int, Fit]:
        """By rows: large tensors leave the caches, and cost more for every number."""
        groups: dict[int, list[RestPoint]] = {}
        for point in self.calibration.rest:
            groups.setdefault(point.rows, []).append(point)
        return {
            rows: fit([_rest_terms(p) for p in points], [p.seconds for p in points])
            for rows, points in groups.items()
        }

    def layer_rest(self, config: ModelConfig, rows: int) -> float:
        """Seconds of what a layer of a prompt of `rows` positions does beside products and
        attention."""
        H, K, E = config.num_heads, config.num_kv_heads, config.head_dim
        normed = (H + K) * E if config.qk_norm else 0
        none = Speed(self.speed.read, self.speed.multiply)
        point = RestPoint(rows, config.dim, (H + 2 * K) * E, config.ffn_dim, normed, 0.0, none)
        terms = [term / rows for term in _rest_terms(point)]
        each = {r: f([r * term for term in terms]) for r, f in self._rest.items()}
        return between(each, rows)

    @cached_property
    def _draws(self) -> dict[tuple[bool, int], Fit]:
        groups: dict[tuple[bool, int], list[DrawPoint]] = {}
        for point in self.calibration.draws:
            groups.setdefault((point.greedy, point.rows), []).append(point)
        return {
            key: fit([[p.vocabulary, 1.0] for p in points], [p.seconds for p in points])
            for key, points in groups.items()
        }

    def draw(self, rows: int, vocabulary: int, greedy: bool) -> float:
        """Seconds of choosing the next token of every row."""
        seconds = {
            r: f([vocabulary, 1.0]) for (kind, r), f in self._draws.items() if kind == greedy
        }
        return between(seconds, rows)


def _by_cache(points: Iterable[AttentionPoint]) -> dict[str, list[AttentionPoint]]:
    kinds: dict[str, list[AttentionPoint]] = {}
    for point in points:
        kinds.setdefault(point.cache, []).append(point)
    return kinds


def _product_terms(
    inner: int, outer: int, rows: int = FEW_ROWS + 1, points: int = 4
) -> list[float]:
    """Weights, outputs, inputs, the call. Few rows are bound by their weights, and few points tell
    no more terms apart."""
    ends = rows > FEW_ROWS and points > 3
    return [inner * outer, outer * ends, inner * ends, 1.0 * (points > 3)]


def _step_terms(p: AttentionPoint, slots: int, groups: Sequence[int]) -> list[float]:
    """Bytes; a slot's multiplications for a key head, by the query heads that share it; results,
    key heads, the call: of a kernel that takes so many slots at once."""
    taken = p.rows * p.kv_heads * -(-p.depth // slots) * slots * p.head_dim
    group = p.heads / p.kv_heads
    shares = [taken * np.interp(group, groups, one) for one in np.eye(len(groups))]
    shares[-1] *= max(1.0, group / groups[-1])
    results = p.rows * p.heads * p.head_dim
    return [p.bytes, *shares, results, p.rows * p.kv_heads, 1.0]


def _chunk_terms(p: AttentionPoint) -> list[float]:
    """Multiplications and scores: of the chunk with itself, and with what is before it; results,
    their joining, the call."""
    queries = p.rows * p.heads * p.queries
    results = queries * p.head_dim
    return [
        results * p.queries,
        queries * p.queries,
        results * p.depth,
        queries * p.depth,
        results,
        results if p.depth else 0,
        1.0,
    ]


def _rest_terms(p: RestPoint) -> list[float]:
    return [p.rows * p.dim, p.rows * p.heads, p.rows * p.ffn_dim, p.rows * p.normed]


def memory_bound(share: float) -> float:
    """How far work goes with memory's speed, 0 to 1, that reads at this share of it."""
    return min(max((share - HALF_MEMORY) / (ALL_MEMORY - HALF_MEMORY), 0.0), 1.0)
