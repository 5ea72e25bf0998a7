"""Seconds of whole steps and prompts on a calibrated machine, by what they are spent on.

    machine = CalibratedMachine(calibration)
    machine.step(config, "int4wo-128", "dense", rows=1, depth=8192)     # Parts
    machine.prompt(config, "int4wo-128", "dense", rows=4, tokens=1024)

The parts come from estimate/curves.py: what products, attention, the rest and the draw take alone.
In a model they follow one another, with caches in another state, and something is left between
them. So for every number of rows two more kinds of figures are fitted to the calibration models'
own steps and prompts: how many times as long a scheme's products take in place, and what a layer
and a step cost beside their parts.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.optimize import lsq_linear

from estimate import layers
from estimate.calibration import Calibration, Speed, WholePoint
from estimate.calibration_models import LARGE, MODELS
from estimate.curves import Curves
from kv_cache import CACHES
from models.config import ModelConfig

CHUNK = 512  # positions of a prompt per pass on the CPU: generate.PREFILL_CHUNK
PRIOR = 0.02  # weight, in the fit, of products taking in place what they take alone
IN_PLACE = (0.4, 2.5)  # limits of that ratio


@dataclass(frozen=True)
class Parts:
    """Seconds of a pass, by what they are spent on."""

    products: float
    attention: float
    rest: float  # norms, rotation, gates, the draw of a token
    fixed: float  # of every layer and of the pass, whatever its size

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.rest + self.fixed

    @property
    def named(self) -> dict[str, float]:
        return dict(zip(("products", "attention", "rest", "fixed"), self.each, strict=True))

    def of_ranks(self, taking_turns: int) -> "Parts":
        """The parts of one rank, of whose cores and memory it has one share of `taking_turns`; what
        a layer's calls cost does not depend on the threads."""
        products, attention, rest = (taking_turns * part for part in self.each[:3])
        return Parts(products, attention, rest, self.fixed)

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(a + b for a, b in zip(self.each, other.each, strict=True)))

    @property
    def each(self) -> tuple[float, float, float, float]:
        return self.products, self.attention, self.rest, self.fixed


@dataclass(frozen=True)
class InPlace:
    """What was fitted for one number of rows."""

    products: dict[str, float]  # by scheme: in place ÷ alone
    rest: float  # in place ÷ alone
    layer: float  # seconds
    once: float  # seconds


class CalibratedMachine:
    """Predicts passes by one calibration. without: a calibration model that is left out, to see
    what the fit makes of a model that it does not know."""

    def __init__(self, calibration: Calibration, without: str | None = None) -> None:
        self.calibration, self.curves = calibration, Curves(calibration)
        self.wholes = [p for p in calibration.wholes if p.model != without]

    # ------------------------------------------------------------------------ passes

    def step(
        self,
        config: ModelConfig,
        scheme: str,
        cache: str,
        rows: int,
        depth: int,
        greedy: bool = True,
    ) -> Parts:
        """A decoding step of `rows` sequences at position `depth`."""
        alone = self._alone(config, scheme, cache, rows, 1, depth, rows, greedy)
        parts = self._placed(alone, self._steps, scheme, rows, config.num_layers)
        if more := self._of_caches.get(cache):
            return replace(parts, fixed=parts.fixed + config.num_layers * _along(more, rows))
        return parts

    def prompt(
        self,
        config: ModelConfig,
        scheme: str,
        cache: str,
        rows: int,
        tokens: int,
        chunk: int = CHUNK,
        depth: int = 0,
        greedy: bool = True,
    ) -> Parts:
        """A prompt of `tokens` positions of `rows` sequences, up to the first new token; `depth`
        positions are before it."""
        total = Parts(0.0, 0.0, 0.0, 0.0)
        for start in range(0, tokens, chunk):
            some = min(chunk, tokens - start)
            last = rows if start + some == tokens else 0
            at = depth + start
            parts = self._alone(config, scheme, cache, rows, some, at, last, greedy)
            fitted = self._prompts if some > 1 else self._steps
            total += self._placed(parts, fitted, scheme, rows * some, config.num_layers)
        return total

    def _alone(
        self,
        config: ModelConfig,
        scheme: str,
        cache: str,
        rows: int,
        tokens: int,
        depth: int,
        logits: int,
        greedy: bool = True,
    ) -> Parts:
        """A pass, its parts as they take alone. logits: rows that get any."""
        curves, L = self.curves, config.num_layers
        fused = tokens == 1  # a step is one op
        products = layers.products(curves, config, scheme, rows * tokens, fused)
        filled = depth + 1 if tokens == 1 else depth
        window = min(filled, config.sliding_window or filled)
        cached = _cache_bytes(config, cache, rows, window, self.calibration.precision)
        attention = L * curves.attention(config, cache, rows, tokens, window, cached)
        rest = layers.gates(curves, config, rows * tokens, fused)
        if tokens > 1:
            rest += L * curves.layer_rest(layers.gated(config), rows * tokens)
        if logits:
            products += curves.product(scheme, logits, config.dim, config.vocab_size, called=False)
            rest += curves.draw(logits, config.vocab_size, greedy)
        return Parts(products, attention, rest, 0.0)

    def _placed(
        self, alone: Parts, fitted: dict[int, InPlace], scheme: str, rows: int, layers: int
    ) -> Parts:
        if not fitted:
            return alone

        def along(values: dict[int, float]) -> float:
            return _along(values, rows)

        known = {r: f.products[scheme] for r, f in fitted.items() if scheme in f.products}
        rest = along({r: f.rest for r, f in fitted.items()})
        layer = along({r: f.layer for r, f in fitted.items()})
        once = along({r: f.once for r, f in fitted.items()})
        return Parts(
            along(known) * alone.products,
            alone.attention,
            rest * alone.rest,
            layers * layer + once,
        )

    def at_speed(self, parts: Parts, now: Speed, read: int) -> float:
        """Seconds of a pass while the machine is as fast as `now`: its products go with memory or
        with arithmetic, whichever sets their speed. read: bytes of the weights that a step reads; 0
        for a prompt."""
        slower = self.curves.slower(parts.products, now, read)
        return parts.seconds + (slower - 1) * parts.products

    # ------------------------------------------------------------------------ what is fitted

    @cached_property
    def _steps(self) -> dict[int, InPlace]:
        points = [p for p in self.wholes if p.tokens == 1 and p.kv_cache == "dense"]
        points = [p for p in points if p.model in MODELS]
        return {
            rows: self._fitted([p for p in points if p.rows == rows])
            for rows in sorted({p.rows for p in points})
        }

    @cached_property
    def _prompts(self) -> dict[int, InPlace]:
        points = [p for p in self.wholes if 1 < p.tokens <= CHUNK and p.model in LARGE]
        by_rows = sorted({p.rows * p.tokens for p in points})
        return {
            rows: self._fitted([p for p in points if p.rows * p.tokens == rows]) for rows in by_rows
        }

    @cached_property
    def _of_caches(self) -> dict[str, dict[int, float]]:
        """By kind of cache and rows: seconds that each layer of a step takes more than over a dense
        cache, beside attention, because another decoder carries it out."""
        more: dict[str, dict[int, list[float]]] = {}
        for point in self.wholes:
            if point.tokens > 1 or point.kv_cache == "dense":
                continue
            config = MODELS[point.model]
            how = config, point.scheme, point.kv_cache, point.rows
            alone = self._alone(*how, 1, point.depth, point.rows)
            parts = self._placed(alone, self._steps, point.scheme, point.rows, config.num_layers)
            expected = self.at_speed(parts, point.speed, self._read(point))
            beyond = (point.seconds - expected) / config.num_layers
            more.setdefault(point.kv_cache, {}).setdefault(point.rows, []).append(beyond)
        return {
            kind: {rows: max(0.0, statistics.fmean(values)) for rows, values in by_rows.items()}
            for kind, by_rows in more.items()
        }

    def weight_bytes(self, config: ModelConfig, scheme: str) -> int:
        """Bytes of the weights that a step reads, from the calibration's bytes a weight."""
        points = [p for p in self.calibration.products if p.scheme == scheme]
        each = sum(p.bytes for p in points) / sum(p.inner * p.outer for p in points)
        return int(each * sum(n * k for n, k in config.linear_shapes().values()))

    def _fitted(self, points: Sequence[WholePoint]) -> InPlace:
        """Least squares of the relative error, each ratio drawn a little towards 1."""
        schemes = list(dict.fromkeys(p.scheme for p in points))
        ratios = len(schemes) + 1  # the last is that of the rest
        matrix, right = [], []
        for point in points:
            config, measured = MODELS[point.model], point.seconds
            alone = self._alone(config, point.scheme, point.kv_cache, point.rows, point.tokens,
                                point.depth, point.rows)  # fmt: skip
            row = [0.0] * len(schemes) + [alone.rest, config.num_layers, 1.0]
            known = alone.attention
            if point.model in LARGE:
                slower = self.curves.slower(alone.products, point.speed, self._read(point))
                row[schemes.index(point.scheme)] = slower * alone.products
            else:  # weights that a cache holds
                read = self.weight_bytes(config, point.scheme)
                known += read / self.curves.cached_rate(read)
            matrix.append([value / measured for value in row])
            right.append(1 - known / measured)
        for number in range(ratios):
            matrix.append([PRIOR * (i == number) for i in range(ratios + 2)])
            right.append(PRIOR)
        scale = np.array([1.0] * ratios + [1e-3, 1e-3])
        low = np.array([IN_PLACE[0]] * ratios + [0.0, 0.0]) / scale
        # Beside a prompt's products the cost of calls is nothing, and noise would hide in it.
        most = 1.0 if points[0].tokens == 1 else 1e-9
        high = np.array([IN_PLACE[1]] * ratios + [most, most]) / scale
        solved = lsq_linear(np.array(matrix) * scale, right, (low, high), "bvls").x * scale
        *factors, rest, layer, once = map(float, solved)
        return InPlace(dict(zip(schemes, factors, strict=True)), rest, layer, once)

    # ------------------------------------------------------------------------ how sure

    def predicted(self, point: WholePoint) -> float:
        """Seconds of a calibration model's step or prompt, at the speed read beside it."""
        config = MODELS[point.model]
        how = point.scheme, point.kv_cache, point.rows
        if point.tokens == 1:
            parts = self.step(config, *how, point.depth)
        else:
            parts = self.prompt(config, *how, point.tokens)
        return self.at_speed(parts, point.speed, self._read(point))

    def _read(self, point: WholePoint) -> int:
        return self.weight_bytes(MODELS[point.model], point.scheme) if point.tokens == 1 else 0


def scatter(calibration: Calibration) -> dict[str, float]:
    """Of steps and of prompts: the root mean square of log(predicted ÷ measured) of calibration
    models that the fit left out, each in turn."""
    errors: dict[str, list[float]] = {"token": [], "prompt": []}
    for name in LARGE:
        machine = CalibratedMachine(calibration, without=name)
        if not machine.wholes:
            machine = CalibratedMachine(calibration)
        for point in calibration.wholes:
            if point.model == name:
                error = math.log(machine.predicted(point) / point.seconds)
                errors["token" if point.tokens == 1 else "prompt"].append(error)
    return {phase: root_mean_square(values) for phase, values in errors.items()}


def root_mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(statistics.fmean(squares)) if squares else math.nan


def _cache_bytes(config: ModelConfig, cache: str, rows: int, slots: int, precision: str) -> int:
    """Bytes of one layer's keys and values of `slots` positions."""
    import torch

    dtype = getattr(torch, precision)
    if not slots:
        return 0
    layer = CACHES[cache](rows, config.num_kv_heads, slots, config.head_dim, dtype, "meta")
    return layer.nbytes


def _along(points: dict[int, float], at: int) -> float:
    """Linear in log(rows) between fitted rows, constant outside."""
    known = sorted(points)
    xs = [math.log(k) for k in known]
    return float(np.interp(math.log(at), xs, [points[k] for k in known]))
