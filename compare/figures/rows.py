"""From the samples to the figures of the report: one row an arm."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from compare.figures.readings import figures, is_limit
from compare.figures.statistics import Estimate, estimate, paired, typical, verdict
from compare.figures.why import reasons
from compare.sampling.results import ArmResult, Reading, Results
from run.measure import Sample, Summary

SAMPLED = [field.name for field in fields(Sample)]
TELLS_NOTHING = 10  # an interval whose ends differ by more
# The ratio's name, and the sample's figure it is of: seconds, so that below 1 the target is better.
RATIOS = {"ratio_latency": "token_latency", "ratio_throughput": "sample_seconds"}


def rows(results: Results) -> list[dict[str, Any]]:
    """Figures in seconds, bytes and nats; None for what is not known.

    tok_s is the mean over the samples, as in the log; latencies of tokens are over all samples'
    decoding steps; peaks are the highest of the arm's first process. ratio_latency: target's
    seconds per decoded token ÷ baseline's; ratio_throughput: baseline's tokens per second ÷
    target's, prefill included; both without the slowest and the fastest tenth of each sample's
    steps. They are below 1 where the target is better, each a list: ratio, and its 95 % interval's
    two ends.
    """
    found = estimates(results)
    return [
        _row(results, number, arm, found.get(number)) for number, arm in enumerate(results.arms)
    ]


def estimates(results: Results) -> dict[int, tuple[Estimate, Estimate]]:
    """By number, the ratios of every arm that has been sampled together with the baseline."""
    base, found = results.baseline, {}
    for number, arm in enumerate(results.arms[1:], 1):
        if arm.failed is None and arm.samples and base.samples:
            latency, throughput = (
                estimate(paired(seconds(arm, name), seconds(base, name)))
                for name in RATIOS.values()
            )
            found[number] = (latency, throughput)
    return found


def seconds(arm: ArmResult, name: str) -> dict[tuple[int, int], list[float]]:
    """By process and round: token_latency, of a typical decoding step; prefill_seconds, of the
    prompt; or sample_seconds, of the prompt and as many steps of that length as there were.

    Where only one token is asked for, its latency is the time to it.
    """
    found: dict[tuple[int, int], list[float]] = {}
    for sample in arm.samples:
        prefill, steps = sample["prefill_seconds"], sample["token_seconds"]
        latency = typical(steps) if steps else prefill
        values = {
            "token_latency": latency,
            "prefill_seconds": prefill,
            "sample_seconds": prefill + len(steps) * latency,
        }
        found.setdefault((sample["process"], sample["round"]), []).append(values[name])
    return found


def progress_line(results: Results, found: dict[int, tuple[Estimate, Estimate]]) -> str:
    """The round, and every arm's speed-up so far with its interval."""
    parts = [
        f"{results.arms[number].name} {1 / throughput.ratio:.3f}× {_speed_up(throughput, '.3f')}"
        for number, (_, throughput) in found.items()
    ]
    return f"Round {results.rounds}: {'; '.join(parts)}"


def _row(
    results: Results, number: int, arm: ArmResult, ratios: tuple[Estimate, Estimate] | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": arm.name, "failed": arm.failed, "samples": len(arm.samples)}
    if arm.facts:
        row |= _measured(arm, arm.facts, results.bandwidth)
    quality = arm.quality or {}
    for name in ("perplexity", "kl", "kl_standard_error", "top1", "top5", "tokens"):
        row[name] = quality.get(name)
    row["why_no_quality"] = quality.get("why_not")
    row |= _compared(results, number, arm, ratios)
    row["why"] = reasons(row, arm.facts) if arm.facts and arm.samples else []
    return row


def _measured(
    arm: ArmResult, facts: dict[str, Any], bandwidth: dict[str, list[Reading]]
) -> dict[str, Any]:
    peaks = dict(facts["peak_memory_bytes"])
    row: dict[str, Any] = {
        "scheme": facts["scheme"],
        "kernel": facts["kernel"],
        "decoder": facts.get("decoder"),  # results of older versions have none
        "attention_kernel": facts["attention_kernel"],
        "weight_bytes": facts["weight_bytes"],
        "kv_cache_bytes": facts["kv_cache_bytes"],
        "warm_up_steady": facts["warm_up_steady"],
    }
    if arm.samples:
        samples = [Sample(**{name: one[name] for name in SAMPLED}) for one in arm.samples]
        batch_size = facts["config"]["batch_size"]
        row |= asdict(Summary.of(samples, batch_size, facts["weight_bytes"]))
        steps = [seconds for sample in arm.samples for seconds in sample["token_seconds"]]
        for percent in (50, 90, 99):
            row[f"token_p{percent}_s"] = percentile(steps, percent) if steps else None
        first = [s for s in arm.samples if s["process"] == arm.samples[0]["process"]]
        peaks["generate"] = _highest([sample["peak_memory_bytes"] for sample in first])
        if readings := bandwidth.get(facts["config"]["device"]):
            row |= figures(readings)
            if is_limit(readings):
                row["bandwidth_share"] = row["weight_bytes_per_s"] / row["bandwidth"]
    row["peak_memory_bytes"] = peaks
    return row


def _compared(
    results: Results, number: int, arm: ArmResult, ratios: tuple[Estimate, Estimate] | None
) -> dict[str, Any]:
    if arm.failed is not None:
        return {"verdict": "failed"}
    if number == 0:
        return {"verdict": "baseline"}
    if ratios is None:
        return {"verdict": "no baseline" if results.baseline.failed else "not measured"}
    logs = paired(seconds(arm, "sample_seconds"), seconds(results.baseline, "sample_seconds"))
    said = verdict(logs, len(results.alive) - 1, results.ended == "interrupted")
    throughput = ratios[1]
    return {
        **{
            name: [one.ratio, one.low, one.high if one.low else None]
            for name, one in zip(RATIOS, ratios, strict=True)
        },
        "speed_up": 1 / throughput.ratio,
        "verdict": said,
        "in_words": in_words(throughput, said),
    }


def in_words(throughput: Estimate, said: str) -> str:
    """The speed-up as one would say it."""
    times = 1 / throughput.ratio
    interval = f"{times:.2f} × the baseline's speed {_speed_up(throughput, '.2f')}"
    if said == "faster":
        return f"{times - 1:.0%} faster: {interval}"
    if said == "slower":
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


def _highest(peaks: Sequence[dict[str, int]]) -> dict[str, int]:
    return {kind: max(peak[kind] for peak in peaks) for kind in peaks[0]}
