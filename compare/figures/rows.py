"""From the samples to the figures of the report: one row an arm."""

from collections.abc import Sequence

from compare.figures.interval import Interval
from compare.figures.readings import is_limit, median
from compare.figures.row import Row
from compare.figures.statistics import Estimate, estimate, paired, typical, verdict
from compare.figures.why import reasons
from compare.sampling.answers import NoQuality, Quality, Reading
from compare.sampling.results import ArmResult, Results
from run.measure import Facts, Peak, Summary

TELLS_NOTHING = 10  # an interval whose ends differ by more than this factor


def rows(results: Results) -> list[Row]:
    """A row for each arm, the baseline's first."""
    ratios = estimates(results)
    return [
        _row(results, number, arm, ratios.get(number)) for number, arm in enumerate(results.arms)
    ]


def estimates(results: Results) -> dict[int, tuple[Estimate, Estimate]]:
    """By number, every arm's seconds ÷ the baseline's: per decoded token, and per whole sample.

    Only arms that have been sampled together with the baseline are in it.
    """
    baseline, ratios = results.baseline, {}
    for number, arm in enumerate(results.arms[1:], 1):
        if arm.failed is None and arm.samples and baseline.samples:
            latency, throughput = (
                estimate(paired(seconds(arm, name), seconds(baseline, name)))
                for name in ("token_latency", "sample_seconds")
            )
            ratios[number] = (latency, throughput)
    return ratios


def seconds(arm: ArmResult, name: str) -> dict[tuple[int, int], list[float]]:
    """By process and round: token_latency, of a typical decoding step; prefill_seconds, of the
    prompt; or sample_seconds, of the prompt and as many steps of that length as there were.

    Where only one token is asked for, its latency is the time to it.
    """
    by_round: dict[tuple[int, int], list[float]] = {}
    for sample in arm.samples:
        prefill, steps = sample.prefill_seconds, sample.token_seconds
        latency = typical(steps) if steps else prefill
        values = {
            "token_latency": latency,
            "prefill_seconds": prefill,
            "sample_seconds": prefill + len(steps) * latency,
        }
        by_round.setdefault((sample.process, sample.round), []).append(values[name])
    return by_round


def progress_line(results: Results, ratios: dict[int, tuple[Estimate, Estimate]]) -> str:
    """The round, and every arm's speed-up so far with its interval."""
    parts = [
        f"{results.arms[number].name} {1 / throughput.ratio:.3f}× {_speed_up(throughput, '.3f')}"
        for number, (_, throughput) in ratios.items()
    ]
    return f"Round {results.rounds}: {'; '.join(parts)}"


def _row(
    results: Results, number: int, arm: ArmResult, ratios: tuple[Estimate, Estimate] | None
) -> Row:
    row = Row(arm.name, arm.failed, len(arm.samples))
    if arm.facts:
        row.peak_memory_bytes = dict(arm.facts.peak_memory_bytes)
        row.warm_up_steady = arm.facts.ready.warm_up_steady
        if arm.facts.run:
            _add_run(row, arm.facts.run)
            if arm.samples:
                _add_samples(row, arm, arm.facts.run)
                _add_bandwidth(row, results.bandwidth.get(arm.facts.device, []))
    match arm.quality:
        case Quality() as quality:
            row.perplexity, row.tokens = quality.perplexity, quality.tokens
            row.kl, row.kl_standard_error = quality.kl, quality.kl_standard_error
            row.top1, row.top5 = quality.top1, quality.top5
        case NoQuality(why_not):
            row.why_no_quality = why_not
    _add_verdict(row, results, number, ratios)
    if arm.facts and arm.samples:
        row.why = reasons(row, arm.facts)
    return row


def _add_run(row: Row, run: Facts) -> None:
    row.scheme, row.kernel, row.decoder = run.scheme, run.kernel, run.decoder
    row.attention_kernel = run.attention_kernel
    row.weight_bytes, row.kv_cache_bytes = run.weight_bytes, run.kv_cache_bytes


def _add_samples(row: Row, arm: ArmResult, run: Facts) -> None:
    summary = Summary.of(arm.samples, run.config.batch_size, run.weight_bytes)
    for name, value in vars(summary).items():
        setattr(row, name, value)
    if steps := [seconds for sample in arm.samples for seconds in sample.token_seconds]:
        row.token_p50_s, row.token_p90_s, row.token_p99_s = (
            percentile(steps, percent) for percent in (50, 90, 99)
        )
    first = [s for s in arm.samples if s.process == arm.samples[0].process]
    row.peak_memory_bytes = (row.peak_memory_bytes or {}) | {
        "generate": _highest([sample.peak_memory_bytes for sample in first])
    }


def _add_bandwidth(row: Row, readings: Sequence[Reading]) -> None:
    if not readings:
        return
    row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
    if is_limit(readings) and row.weight_bytes_per_s is not None:
        row.bandwidth_share = row.weight_bytes_per_s / row.bandwidth


def _add_verdict(
    row: Row, results: Results, number: int, ratios: tuple[Estimate, Estimate] | None
) -> None:
    arm, baseline = results.arms[number], results.baseline
    if arm.failed is not None:
        row.verdict = "failed"
    elif number == 0:
        row.verdict = "baseline"
    elif ratios is None:
        row.verdict = "no baseline" if baseline.failed else "not measured"
    else:
        logs = paired(seconds(arm, "sample_seconds"), seconds(baseline, "sample_seconds"))
        row.verdict = verdict(logs, len(results.alive) - 1, results.ended == "interrupted")
        row.ratio_latency, row.ratio_throughput = map(Interval.of, ratios)
        row.speed_up = 1 / ratios[1].ratio
        row.in_words = in_words(ratios[1], row.verdict)


def in_words(throughput: Estimate, verdict: str) -> str:
    """The speed-up as a sentence without a full stop."""
    times = 1 / throughput.ratio
    interval = f"{times:.2f} × the baseline's speed {_speed_up(throughput, '.2f')}"
    if verdict == "faster":
        return f"{times - 1:.0%} faster: {interval}"
    if verdict == "slower":
        return f"{1 - times:.0%} slower: {interval}"
    return f"no difference shown: {interval}"


def _speed_up(throughput: Estimate, form: str) -> str:
    """The interval of 1 ÷ the ratio, if it says anything."""
    if throughput.high > TELLS_NOTHING * throughput.low:
        return "(too few rounds to tell)"
    return f"({1 / throughput.high:{form}} to {1 / throughput.low:{form}})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _highest(peaks: Sequence[Peak]) -> Peak:
    return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}
