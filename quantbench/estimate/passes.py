"""Seconds of whole steps and prompts on a calibrated machine, by what they are spent on.

    machine = CalibratedMachine(calibration)
    machine.step(config, "int4wo-128", "dense", rows=1, depth=8192)     # Parts
    machine.prompt(config, "int4wo-128", "dense", rows=4, tokens=1024)

The parts come from estimate/curves.py: what attention, norms, gates and the draw take alone. What
products take in a model, where others have used the caches in between, is fitted to the steps and
prompts of the calibration models: for each scheme and number of rows, seconds for every weight, for
every output (results are summed, scaled and written), for every input (activations are read, and
rounded for some schemes), for every layer, and for a step. A layer of a prompt takes as long beside
its products whatever the scheme and the length. A weight of a step takes in proportion to what it
takes in a stack of as many bytes as the step reads: caches hold a part of either. One of a prompt
takes the longer, the more inputs its product has.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from quantbench.devices import prefill_chunk
from quantbench.estimate import layers
from quantbench.estimate.calibration import Calibration, Speed, WholePoint
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.curves import SHORTEST, Curves, Placed, fit
from quantbench.estimate.drift import Drift, by_rate, learned
from quantbench.kv_cache import CACHES
from quantbench.models.config import ModelConfig

SHALLOW = 256  # positions: steps behind fewer spend next to no time on attention
CLEAR = 0.2  # of a step: attention that takes less is lost in the scatter of the rest
# What is expected before rounds tell. Prompts multiply; a part of what is read of arithmetic's
# speed is the noise of short readings.
PROMPT_DRIFT = Drift(0.0, 0.8)


@dataclass(frozen=True)
class Parts:
    """Seconds of a pass, by what they are spent on."""

    products: float
    attention: float
    rest: float  # norms, rotation, gates, the draw of a token
    fixed: float  # of every layer and of a step, whatever its size
    cached: float = 0.0  # bytes of keys and values that attention reads

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
        return Parts(products, attention, rest, self.fixed, taking_turns * self.cached)

    def __add__(self, other: "Parts") -> "Parts":
        values = zip(vars(self).values(), vars(other).values(), strict=True)
        return Parts(*(a + b for a, b in values))

    @property
    def each(self) -> tuple[float, float, float, float]:
        return self.products, self.attention, self.rest, self.fixed


class CalibratedMachine:
    """Predicts passes by one calibration. without: a calibration model that is left out, to see
    what the fit makes of a model that it does not know."""

    def __init__(self, calibration: Calibration, without: str | None = None) -> None:
        self.calibration, self.curves = calibration, Curves(calibration)
        self.device = torch.device(str(calibration.device["type"]))
        quiet = [p for p in calibration.wholes if calibration.undisturbed(p.speed)]
        self.quiet = quiet or calibration.wholes
        self.wholes = [p for p in self.quiet if p.model != without]
        # By scheme and rows of the products: seconds of a step beside them, for a layer and at all.
        self.layer_of_step: dict[tuple[str, int], float] = {}
        self.once: dict[tuple[str, int], float] = {}
        self.layer_of_prompt = 0.0  # seconds beside its products
        # By scheme and rows of steps: attention behind depth in a model ÷ alone.
        self.behind_depth: dict[tuple[str, int], float] = {}
        points = [p for p in self.wholes if p.kv_cache == "dense"]
        self._place_steps([p for p in points if p.tokens == 1 and p.depth < SHALLOW])
        self._place_prompts([p for p in points if p.tokens > 1])  # a prompt ends as a step does
        self._place_attention(list(filter(_is_deep, points)))

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
        parts = self._pass(config, scheme, cache, rows, 1, depth, rows, greedy)
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
        chunk: int | None = None,
        depth: int = 0,
        greedy: bool = True,
    ) -> Parts:
        """A prompt of `tokens` positions of `rows` sequences, up to the first new token; `depth`
        positions are before it. chunk: positions of a sequence per pass; None: as a run takes."""
        chunk = chunk or prefill_chunk(self.device, rows)
        total = Parts(0.0, 0.0, 0.0, 0.0)
        for start in range(0, tokens, chunk):
            some = min(chunk, tokens - start)
            last = rows if start + some == tokens else 0
            at = depth + start
            total += self._pass(config, scheme, cache, rows, some, at, last, greedy)
        return total

    def _pass(
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
        """One pass. logits: rows that get any."""
        curves, L = self.curves, config.num_layers
        fused = tokens == 1  # a step is one op
        filled = depth + 1 if tokens == 1 else depth
        window = min(filled, config.sliding_window or filled)
        cached = _cache_bytes(config, cache, rows, window, self.calibration.precision)
        among = curves.weight_bytes[scheme] * _weights(config) + L * cached if fused else 0.0
        products = layers.products(curves, config, scheme, rows * tokens, fused, among)
        attention = L * curves.attention(config, cache, rows, tokens, window, cached, among)
        if tokens == 1:
            attention *= _of(self.behind_depth, scheme, rows, default=1.0)
        rest = layers.gates(curves, config, rows * tokens, fused)
        if tokens > 1:
            rest += L * curves.layer_rest(layers.gated(config), rows * tokens)
        if logits:
            D, V = config.dim, config.vocab_size
            products += curves.product(scheme, logits, D, V, called=False, among=among)
            rest += curves.draw(logits, config.vocab_size, greedy)
        fixed = L * self.layer_of_prompt
        if fused:
            fixed = L * _of(self.layer_of_step, scheme, rows) + _of(self.once, scheme, rows)
        return Parts(products, attention, rest, fixed, L * cached)

    # ------------------------------------------------------------------------ speeds that drift

    def at_speed(self, parts: Parts, now: Speed, scheme: str, rows: int, step: bool) -> Parts:
        """The parts while the machine is as fast as `now`, where these are of its usual speed.
        rows: of the products of a pass."""
        then = self.curves.speed
        slower = self._drift_between(scheme, rows, step).slower(now, then)
        attention = 1.0
        if parts.attention:
            attention = self._attention_drift(parts, rows, step).slower(now, then)
        return Parts(
            slower * parts.products,
            attention * parts.attention,
            slower * parts.rest,
            slower * parts.fixed,
            parts.cached,
        )

    def _drift_between(self, scheme: str, rows: int, step: bool) -> Drift:
        known = {r: d for (name, r, s), d in self._drifts.items() if (name, s) == (scheme, step)}
        return _drift_along(known, rows) if known else PROMPT_DRIFT

    def _attention_drift(self, parts: Parts, rows: int, step: bool) -> Drift:
        """How attention goes with speed: that of steps as deep steps of the calibration show, if it
        has any; else as its rate of reading says."""
        if step and self._attention_drifts:
            return _drift_along(self._attention_drifts, rows)
        return by_rate(parts.cached / parts.attention, self.curves.speed.read)

    @cached_property
    def _attention_drifts(self) -> dict[int, Drift]:
        """By rows of steps behind depth: from the rounds of what they take beside their other
        parts. Schemes are taken together, for attention is the same kernel in all of them."""
        then = self.curves.speed
        works: dict[int, dict[object, list[tuple[float, Speed]]]] = {}
        rates: dict[int, list[float]] = {}
        for p in filter(_is_deep, self.quiet):
            parts = self.step(MODELS[p.model], p.scheme, p.kv_cache, p.rows, p.depth)
            others = self._drift_between(p.scheme, p.rows, step=True).slower(p.speed, then)
            attention = p.seconds - others * (parts.seconds - parts.attention)
            if attention > CLEAR * p.seconds:
                each = works.setdefault(p.rows, {}).setdefault((p.scheme, p.model), [])
                each.append((attention, p.speed))
                rates.setdefault(p.rows, []).append(parts.cached / parts.attention)
        return {
            rows: learned(list(each.values()), by_rate(statistics.median(rates[rows]), then.read))
            for rows, each in works.items()
        }

    @cached_property
    def _drifts(self) -> dict[tuple[str, int, bool], Drift]:
        """By scheme, rows of the products and whether it is a step: from the rounds of the
        calibration models."""
        groups: dict[tuple[str, int, bool], dict[object, list[tuple[float, Speed]]]] = {}
        for p in self.quiet:
            if p.kv_cache == "dense" and p.depth < SHALLOW:
                group = groups.setdefault((p.scheme, p.rows * p.tokens, p.tokens == 1), {})
                group.setdefault((p.model, p.rows), []).append((p.seconds, p.speed))
        return {
            key: learned(list(works.values()), self._expected_drift(*key))
            for key, works in groups.items()
        }

    def _expected_drift(self, scheme: str, rows: int, step: bool) -> Drift:
        """Steps go with memory as far as their products read at its speed."""
        if not step:
            return PROMPT_DRIFT
        return by_rate(self.curves.weight_rate(scheme, rows), self.curves.speed.read)

    # ------------------------------------------------------------------------ what is fitted

    def _place_steps(self, points: Sequence[WholePoint]) -> None:
        """Fit what products, layers and a step take in a model to these steps."""
        for key, group in _by_rows(points).items():
            works = self._rounds(group)
            terms, seconds = zip(*(self._of_step(p, whole) for p, whole in works), strict=True)
            wholes = [whole for _, whole in works]
            waits, output, input_, layer, once = fit(terms, seconds, wholes).coefficients
            self.curves.in_place[key] = Placed(output, input_, waits=waits)
            self.layer_of_step[key], self.once[key] = layer, once

    def _place_prompts(self, points: Sequence[WholePoint]) -> None:
        """Fit what products take in a model to these prompts, and a layer beside them.

        A layer's calls from Python are the same in every scheme and for every length. Fitted for
        each of these alone they were anything from 0 to 4 ms, taken from terms of the products.
        """
        groups = _by_rows(points)
        terms, seconds, wholes = [], [], []
        for number, group in enumerate(groups.values()):
            for point, whole in self._rounds(group):
                own, beyond = self._of_prompt(point, whole)
                before = [0.0] * (number * len(own))
                after = [0.0] * ((len(groups) - 1 - number) * len(own))
                terms.append([*before, *own, *after, MODELS[point.model].num_layers])
                seconds.append(beyond)
                wholes.append(whole)
        if not groups:
            return
        *products, self.layer_of_prompt = fit(terms, seconds, wholes).coefficients
        for number, key in enumerate(groups):
            each = len(products) // len(groups)
            self.curves.in_place[key] = Placed(*products[number * each :][:each])

    def _place_attention(self, points: Sequence[WholePoint]) -> None:
        """Fit how many times as long attention takes in a model as alone to steps behind depth."""
        ratios = {}
        for key, group in _by_rows(points).items():
            works: dict[str, list[float]] = {}
            for p in group:
                parts = self.step(MODELS[p.model], p.scheme, "dense", p.rows, p.depth)
                now = self.at_speed(parts, p.speed, p.scheme, p.rows, step=True)
                each = (p.seconds - now.seconds + now.attention) / now.attention
                works.setdefault(p.model, []).append(each)
            ratios[key] = max(0.0, statistics.fmean(map(statistics.median, works.values())))
        self.behind_depth |= ratios

    def _rounds(self, points: Sequence[WholePoint]) -> list[tuple[WholePoint, float]]:
        """A point of each piece of work, and the median of its rounds' seconds at the calibration's
        median speed."""
        works: dict[tuple[str, int, int, int], list[WholePoint]] = {}
        for p in points:
            works.setdefault((p.model, p.rows, p.tokens, p.depth), []).append(p)
        return [
            (some[0], statistics.median(self._at_reference(p) for p in some))
            for some in works.values()
        ]

    def _of_step(self, point: WholePoint, whole: float) -> tuple[list[float], float]:
        """The terms of a step's products, layers and itself; and the seconds that they take."""
        config, scheme, curves = MODELS[point.model], point.scheme, self.curves
        each = config.linear_shapes().values()
        weights = float(sum(n * k for n, k in each))
        waiting = curves.waiting(scheme, point.rows, weights * curves.weight_bytes[scheme])
        ends = [sum(n for n, _ in each), sum(k for _, k in each)]
        terms = [weights * waiting, *ends, config.num_layers, 1.0]
        return terms, max(whole - self._beside_products(point), SHORTEST)

    def _of_prompt(self, point: WholePoint, whole: float) -> tuple[list[float], float]:
        """The terms of the products of a prompt's layers, as `Placed` has them; and the seconds of
        these and of what a layer takes beside them. Its output layer is that of a step."""
        config, curves = MODELS[point.model], self.curves
        shapes = config.linear_shapes()
        outer, inner = shapes.pop("output")
        beside = self._beside_products(point)
        beside += curves.product(point.scheme, point.rows, inner, outer, called=False)
        each = shapes.values()
        weights, outputs = float(sum(n * k for n, k in each)), sum(n for n, _ in each)
        wider = float(sum(n * k * k for n, k in each))  # x leaves the caches where it is wide
        return [outputs, sum(k for _, k in each), weights, wider], max(whole - beside, SHORTEST)

    def _beside_products(self, point: WholePoint) -> float:
        """Seconds of a calibration model's attention, norms, gates and draw."""
        config, rows, curves = MODELS[point.model], point.rows, self.curves
        slots = point.depth + 1 if point.tokens == 1 else point.depth
        cached = _cache_bytes(config, point.kv_cache, rows, slots, self.calibration.precision)
        layer = curves.attention(config, point.kv_cache, rows, point.tokens, slots, cached)
        if point.tokens > 1:
            layer += curves.layer_rest(config, rows * point.tokens)
        return config.num_layers * layer + curves.draw(rows, config.vocab_size, greedy=True)

    @cached_property
    def _of_caches(self) -> dict[str, dict[int, float]]:
        """By kind of cache and rows: seconds that each layer of a step takes more than over a dense
        cache, beside attention: to encode keys and values, and where another decoder runs."""
        more: dict[str, dict[int, list[float]]] = {}
        for point in self.wholes:
            if point.tokens > 1 or point.kv_cache == "dense":
                continue
            config = MODELS[point.model]
            how = config, point.scheme, point.kv_cache, point.rows
            parts = self._pass(*how, 1, point.depth, point.rows)
            beyond = (self._at_reference(point) - parts.seconds) / config.num_layers
            more.setdefault(point.kv_cache, {}).setdefault(point.rows, []).append(beyond)
        return {
            kind: {rows: max(0.0, statistics.median(values)) for rows, values in by_rows.items()}
            for kind, by_rows in more.items()
        }

    def _at_reference(self, point: WholePoint) -> float:
        """Seconds of a point as they would have been at the calibration's median speed."""
        drift = self._drift_between(point.scheme, point.rows * point.tokens, point.tokens == 1)
        return point.seconds / drift.slower(point.speed, self.curves.speed)

    # ------------------------------------------------------------------------ how sure

    def predicted(self, point: WholePoint) -> float:
        """Seconds of a calibration model's step or prompt, at the speed read beside it."""
        config = MODELS[point.model]
        how = point.scheme, point.kv_cache, point.rows
        if point.tokens == 1:
            parts = self.step(config, *how, point.depth)
        else:
            parts = self.prompt(config, *how, point.tokens)
        rows = point.rows * point.tokens
        return self.at_speed(parts, point.speed, point.scheme, rows, point.tokens == 1).seconds


def scatter(calibration: Calibration) -> dict[str, float]:
    """Of steps and of prompts: the root mean square of log(predicted ÷ measured) of calibration
    models that the fit left out, each in turn."""
    errors: dict[str, list[float]] = {"token": [], "prompt": []}
    for name in MODELS:
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


def _is_deep(point: WholePoint) -> bool:
    """Whether it is a step behind a deep dense cache."""
    return point.kv_cache == "dense" and point.tokens == 1 and point.depth >= SHALLOW


def _weights(config: ModelConfig) -> float:
    """Numbers of all matrices of a model."""
    return float(sum(n * k for n, k in config.linear_shapes().values()))


def _cache_bytes(config: ModelConfig, cache: str, rows: int, slots: int, precision: str) -> int:
    """Bytes of one layer's keys and values of `slots` positions."""
    dtype = getattr(torch, precision)
    if not slots:
        return 0
    layer = CACHES[cache](rows, config.num_kv_heads, slots, config.head_dim, dtype, "meta")
    return layer.nbytes


def _by_rows(points: Iterable[WholePoint]) -> dict[tuple[str, int], list[WholePoint]]:
    """Points by their scheme and by the rows of their products."""
    groups: dict[tuple[str, int], list[WholePoint]] = {}
    for point in points:
        groups.setdefault((point.scheme, point.rows * point.tokens), []).append(point)
    return groups


def _of(
    values: dict[tuple[str, int], float], scheme: str, rows: int, default: float = 0.0
) -> float:
    known = {r: value for (name, r), value in values.items() if name == scheme}
    return _along(known, rows) if known else default


def _drift_along(points: dict[int, Drift], at: int) -> Drift:
    return Drift(
        _along({rows: drift.memory for rows, drift in points.items()}, at),
        _along({rows: drift.arithmetic for rows, drift in points.items()}, at),
    )


def _along(points: dict[int, float], at: int) -> float:
    """Linear in log(rows) between fitted rows, constant outside."""
    known = sorted(points)
    xs = [math.log(k) for k in known]
    return float(np.interp(math.log(at), xs, [points[k] for k in known]))
