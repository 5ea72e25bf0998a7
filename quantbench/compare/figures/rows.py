"""The figures of the report, computed from the samples: one row an arm.

for row in rows(results):
    print(row.arm, row.speed_up, row.verdict)
best_of(results)({0, 2, 5})                 # of these rows, those that may be the fastest
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.compare.figures import timings
from quantbench.compare.figures.contrasts import Fit, contrasts, fit
from quantbench.compare.figures.families import (
    FALSE_VERDICTS,
    Interval,
    against_baseline,
    against_best,
)
from quantbench.compare.figures.interval import Interval as Figure
from quantbench.compare.figures.interval import Ratio
from quantbench.compare.figures.plan import shown
from quantbench.compare.figures.readings import is_limit, median
from quantbench.compare.figures.row import Row
from quantbench.compare.figures.why import reasons
from quantbench.compare.sampling.answers import ArmFacts, Reading
from quantbench.compare.sampling.results import ArmResult, Results
from quantbench.log.config import repro
from quantbench.quality.types import NoQuality, Quality
from quantbench.run.energy import Energy, NotCounted, pooled
from quantbench.run.facts import Facts, Peak, Summary


@dataclass(frozen=True)
class Compared:
    """What the statistics say of all arms; by the arm's number."""

    throughput: Mapping[int, Interval]  # seconds per token, prompt included: arm ÷ baseline
    latency: Mapping[int, Interval]  # seconds per decoding step: arm ÷ baseline
    steps: Mapping[int, Interval]  # the median decoding step: arm ÷ baseline
    best: set[int] | None  # that may be the fastest; None where nobody can say


def rows(results: Results) -> list[Row]:
    """A row for each arm, the baseline's first."""
    compared = compare(results)
    return [_row(results, number, arm, compared) for number, arm in enumerate(results.arms)]


def compare(results: Results) -> Compared:
    """Intervals of all looks together; and, as further information, of what is there by now."""
    level = results.looks[-1].level if results.looks else FALSE_VERDICTS
    if not results.looks:
        return Compared({}, {}, {}, None)
    decoding = contrasts(timings.decode_timings(results))
    latency = against_baseline(fit(decoding), level, confidence=1 - FALSE_VERDICTS)
    steps = contrasts(timings.process_timings(results), "typical_step")
    running = [n for n, arm in enumerate(results.arms) if arm.failed is None and not arm.dropped]
    best = best_of(results)(running)
    return Compared(
        throughput=shown(results.looks),
        latency={interval.arm: interval for interval in latency},
        steps={one.arm: one for one in against_baseline(fit(steps), FALSE_VERDICTS)},
        best=best if len(best) < len(running) or len(results.looks[-1].intervals) else None,
    )


def best_of(results: Results) -> Callable[[Sequence[int]], set[int]]:
    """A function that names those among some rows that may be the fastest of them (Hsu), at the
    level of the last look; all of them where there are too few processes to tell."""
    fitted = _fitted(results)
    level = results.looks[-1].level if results.looks else FALSE_VERDICTS

    def best(among: Sequence[int]) -> set[int]:
        if fitted is None:
            return set(among)
        return {one.arm for one in against_best(fitted, level, among) if one.can_be_best}

    return best


def _fitted(results: Results) -> Fit | None:
    """The statistics of the results; None without a measured arm and baseline."""
    values = timings.of(results)
    return fit(values) if values.arms and len(values.values) else None


def _row(results: Results, number: int, arm: ArmResult, compared: Compared) -> Row:
    row = Row(arm.name, arm.failed, len(arm.samples))
    row.dropped, row.processes, row.argv = arm.dropped, arm.processes, arm.argv
    if arm.facts:
        row.peak_memory_bytes = dict(arm.facts.peak_memory_bytes)
        row.warm_up_steady = arm.facts.ready.warm_up_steady
        if arm.facts.run:
            _add_run(row, arm.facts.run)
            if arm.samples:
                _add_samples(row, arm, arm.facts.run)
                _add_energy(row, arm.facts.energy, arm.facts.run)
                _add_estimate(row, arm.facts)
                _add_bandwidth(row, results.bandwidth.get(arm.facts.device, []))
    _add_quality(row, arm)
    _add_verdict(row, results, number, compared)
    if arm.facts and arm.samples:
        row.why = reasons(row, arm.facts)
    return row


def _add_quality(row: Row, arm: ArmResult) -> None:
    match arm.quality:
        case Quality() as quality:
            row.perplexity, row.tokens = quality.perplexity, quality.tokens
            row.kl, row.kl_standard_error = quality.kl, quality.kl_standard_error
            row.top1, row.top5, row.quality_model = quality.top1, quality.top5, quality.model
            if quality.perplexity_ratio is not None:
                ends = quality.perplexity_ratio_interval or []
                row.perplexity_ratio = Figure(quality.perplexity_ratio, *ends)
            if quality.decoding and quality.decoding.differs:
                row.decoding_differs = quality.decoding.sentence()
        case NoQuality(why_not):
            row.why_no_quality = why_not


def _add_run(row: Row, run: Facts) -> None:
    row.scheme, row.kernel, row.decoder = run.scheme, run.kernel, run.decoder
    row.attention_kernel = run.attention_kernel
    row.weight_bytes, row.kv_cache_bytes = run.weight_bytes, run.kv_cache_bytes
    row.command = repro(run.config)


def _add_samples(row: Row, arm: ArmResult, run: Facts) -> None:
    summary = Summary.of(arm.samples, run.config.batch_size, run.step_weight_bytes)
    for name, value in vars(summary).items():
        setattr(row, name, value)
    if steps := [seconds for sample in arm.samples for seconds in sample.token_seconds]:
        row.token_p50_s, row.token_p90_s, row.token_p99_s = (
            float(value) for value in np.percentile(steps, (50, 90, 99))
        )
    first = [s for s in arm.samples if s.process == arm.samples[0].process]
    row.peak_memory_bytes = (row.peak_memory_bytes or {}) | {
        "generate": _highest([sample.peak_memory_bytes for sample in first])
    }


def _add_energy(row: Row, energies: Sequence[Energy | NotCounted], run: Facts) -> None:
    counted = [one for one in energies if isinstance(one, Energy)]
    if counted:
        every = pooled(counted)
        tokens = run.config.batch_size * run.config.max_new_tokens
        row.joules_per_token, row.idle_watts = every.joules / tokens, every.idle_watts
    else:
        row.why_no_joules = next(
            (one.why_not for one in energies if not isinstance(one, Energy)), None
        )


def _add_estimate(row: Row, facts: ArmFacts) -> None:
    """What was estimated before, and how far it is from what was measured."""
    estimate, row.why_no_estimate = facts.estimate, facts.no_estimate
    if estimate is None:
        return
    if facts.limit and row.decode_tok_s:
        row.share_of_limit = facts.limit.share(1 / row.decode_tok_s)
    peaks = (row.peak_memory_bytes or {}).get("generate") or {}
    measured = {
        "prompt_seconds": row.time_to_first_token_s,
        "token_seconds": 1 / row.decode_tok_s if row.decode_tok_s else None,
        "tokens_per_second": row.tok_s_all_rows,
        "peak_memory_bytes": next(iter(peaks.values()), None),
        "joules_per_token": row.joules_per_token,
    }
    row.estimated = dict(estimate)
    row.estimate_errors = {
        name: estimate[name] / value - 1
        for name, value in measured.items()
        if value and name in estimate
    }


def _add_bandwidth(row: Row, readings: Sequence[Reading]) -> None:
    if not readings:
        return
    row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
    if is_limit(readings) and row.weight_bytes_per_s is not None:
        row.bandwidth_share = row.weight_bytes_per_s / row.bandwidth


def _add_verdict(row: Row, results: Results, number: int, compared: Compared) -> None:
    arm, interval = results.arms[number], compared.throughput.get(number)
    if arm.failed is not None:
        row.verdict = "failed"
    elif number == 0:
        row.verdict = "baseline"
    elif interval is None:
        row.verdict = "no baseline" if results.baseline.failed else "not measured"
    else:
        _add_ratios(row, number, interval, compared)
    if row.verdict not in ("failed", "not measured", "no baseline") and compared.best is not None:
        row.can_be_best = number in compared.best


def _add_ratios(row: Row, number: int, interval: Interval, compared: Compared) -> None:
    row.verdict = interval.verdict
    row.ratio_throughput = Ratio.of(interval)
    row.speed_up = row.ratio_throughput.inverse
    if number in compared.latency:
        row.ratio_latency = Ratio.of(compared.latency[number])
    if steps := compared.steps.get(number):
        row.typical_step = Ratio.of(steps).inverse


def scatter(results: Results) -> str:
    """How far processes of one arm scatter on this machine, as a sentence without a full stop."""
    fitted = _fitted(results)
    if fitted is None:
        return ""
    if not math.isfinite(float(fitted.scatter)):
        return "too few processes to say how far they scatter on this machine"
    return (
        f"processes of one arm scatter by {float(fitted.scatter):.1%} on this machine (standard "
        f"deviation, {int(np.max(fitted.freedom))} degrees of freedom)"
    )


def identical_plans(results: Results) -> list[str]:
    """A sentence for each setting that was measured for others, too, whose plan is the same."""
    return [
        f"identical plans: {arm.name} was measured for {'; '.join(arm.also)}, too"
        for arm in results.arms
        if arm.also
    ]


def _highest(peaks: Sequence[Peak]) -> Peak:
    return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}
