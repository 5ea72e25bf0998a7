"""The figures of the report, computed from the samples: one row an arm.

for row in rows(results):
    print(row.arm, row.speed_up, row.verdict)
Compared(results).best({0, 2, 5})            # of these rows, those that may be the fastest
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench import stats
from quantbench.bench.answers import ArmFacts
from quantbench.bench.store import ArmResult, Kind, Results
from quantbench.compare.intervals import CONFIDENCE, Compared
from quantbench.compare.limit import is_limit, limit_share, median, span
from quantbench.compare.row import Row
from quantbench.log.config import RunConfig
from quantbench.progress import duration
from quantbench.quality.types import NoQuality, Quality
from quantbench.report.interval import Interval
from quantbench.run import machine
from quantbench.run.energy import Energy, NotCounted, pooled
from quantbench.run.facts import Facts, Summary
from quantbench.run.why import held_back, of_limit

# Shares of what memory allows of a step. It reads activations as well, so a memory-bound arm stays
# below 1.
MEMORY_BOUND, NOT_MEMORY_BOUND, ALL_OF_IT = 0.85, 0.4, 0.95
STATES = 10  # that a session has to meet, so that its turns tell what they do to an arm
ALL_ASSUMED = 0.995  # share of the floor's degrees of freedom


def rows(results: Results, found: Compared | None = None) -> list[Row]:
    """A row for each arm, the baseline's first."""
    found = found or Compared(results)
    alive = [n for n, arm in enumerate(results.arms) if arm.failed is None and n in found.turns]
    best = found.best(alive) if found.whole else set()
    made = []
    for number, arm in enumerate(results.arms):
        row = _row(results, number, arm, found)
        if best and number in alive:
            row.can_be_best = number in best
        made.append(row)
    return made


def limited(results: Results, number: int, found: Compared) -> Row:
    """The row's memory, speeds and quality, which limits are about: without any interval.

    Speeds are those of turns, as the ratios are; of whole samples where there are no turns."""
    arm = results.arms[number]
    row = Row(arm.name, arm.failed, len(arm.samples))
    row.dropped, row.processes, row.argv = arm.dropped, arm.processes, arm.argv
    _add_quality(row, arm)
    if arm.quality is None and results.settings.tokens and arm.failed is None and not arm.dropped:
        row.why_no_quality = "--max_minutes left no time to measure it"
    if not arm.facts:
        return row
    row.peak_memory_bytes = dict(arm.facts.peak_memory_bytes)
    if (run := arm.run) is None:
        return row
    row.weight_bytes, row.kv_cache_bytes = run.weight_bytes, run.kv_cache_bytes
    if arm.samples:
        summary = Summary.of(arm.samples, run.config.batch_size, run.weight_bytes)
        for name, value in vars(summary).items():
            setattr(row, name, value)
        first = arm.samples[0].process
        peaks = [sample.peak_memory_bytes for sample in arm.samples if sample.process == first]
        row.peak_memory_bytes["generate"] = {k: max(p[k] for p in peaks) for k in peaks[0]}
        if number in found.turns:
            row.tok_s = float(1 / found.turns[number].seconds.mean())
            row.tok_s_all_rows = row.tok_s * run.config.batch_size
            row.weight_bytes_per_s = row.tok_s * run.weight_bytes
            row.tok_s_interval = _ends_of_tok_s(found, number)
        row.decode_tok_s = tok_s(results, number, "decode") or row.decode_tok_s
        if prompts := results.turns(number, "prompt"):
            row.prefill_tok_s = tok_s(results, number, "prompt")
            row.time_to_first_token_s = statistics.fmean(turn.seconds for turn in prompts)
    return row


def _ends_of_tok_s(found: Compared, number: int) -> list[float] | None:
    """Of the arm's whole runs, next to no other arm: what slows them all is in it. None before
    there is an interval."""
    own = found.turns[number]
    second = stats.Turns(own.cycle, np.zeros_like(own.process), np.ones_like(own.seconds))
    each = stats.intervals(second, {1: own}, found.floor, 1 - CONFIDENCE, found.spent)[1]
    return [1 / each.high, 1 / each.low] if np.isfinite(each.half_width) else None


def _row(results: Results, number: int, arm: ArmResult, found: Compared) -> Row:
    row = limited(results, number, found)
    if arm.facts:
        row.warm_up_steady = arm.facts.ready.warm_up_steady
        if run := arm.run:
            row.scheme, row.kernel, row.decoder = run.scheme, run.kernel, run.decoder
            row.attention_kernel, row.command = run.attention_kernel, run.repro
            row.prompt_tokens = run.prompt_tokens
            if arm.samples:
                _add_samples(row, arm)
                _add_energy(row, arm.facts.energy, run)
                if readings := results.bandwidth.get(arm.facts.device):
                    row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
                    if run.config.speculate == RunConfig.speculate:  # a step gives one token
                        row.limit_share = limit_share(results, number, run.mean_step_bytes)
    _add_verdict(row, results, number, found)
    if arm.facts and arm.samples:
        row.why = reasons(row, arm.facts)
    return row


def tok_s(results: Results, number: int, kind: Kind) -> float | None:
    """Tokens of a row per second, over all turns of this kind."""
    turns = results.turns(number, kind)
    seconds = sum(turn.seconds for turn in turns)
    return sum(turn.tokens for turn in turns) / seconds if seconds else None


def _add_quality(row: Row, arm: ArmResult) -> None:
    match arm.quality:
        case Quality() as quality:
            row.perplexity, row.tokens = quality.perplexity, quality.tokens
            row.kl, row.kl_standard_error = quality.kl, quality.kl_standard_error
            row.kl_interval, row.kl_noise = quality.kl_interval, quality.noise
            row.top1_interval = quality.top1_interval
            row.top1, row.top5, row.quality_model = quality.top1, quality.top5, quality.model
            if quality.perplexity_ratio is not None:
                ends = quality.perplexity_ratio_interval or []
                row.perplexity_ratio = Interval(quality.perplexity_ratio, *ends)
            if quality.decoding and quality.decoding.differs:
                row.decoding_differs = quality.decoding.sentence()
        case NoQuality(why_not):
            row.why_no_quality = why_not


def _add_samples(row: Row, arm: ArmResult) -> None:
    """What whole samples alone tell: the latency of single tokens, and who else used the cores."""
    if steps := [seconds for sample in arm.samples for seconds in sample.token_seconds]:
        row.token_p50_s, row.token_p90_s, row.token_p99_s = (
            float(value) for value in np.percentile(steps, (50, 90, 99))
        )
    row.others = others_said([arm])


def others_said(arms: Sequence[ArmResult]) -> str | None:
    """Who else used the cores while whole samples of these arms were taken; None where that was no
    more than what the arms left idle."""
    runs = [arm.run for arm in arms if arm.run]
    threads = max((r.environment.threads for r in runs if r.device.type == "cpu"), default=1)
    uses = [sample.machine for arm in arms for sample in arm.samples if sample.machine]
    use = machine.together(uses)
    return ", ".join(use.others()) if use and machine.crowded(use, threads) else None


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


def _add_verdict(row: Row, results: Results, number: int, found: Compared) -> None:
    if row.failed is not None:
        row.verdict = "failed"
    elif number == 0:
        row.verdict = "baseline"
    elif number not in found.whole:
        row.verdict = "no baseline" if results.baseline.failed else "not measured"
    else:
        whole = found.whole[number]
        one = found.decode.get(number, whole)
        row.cycles, row.noise = one.cycles, one.noise
        row.floor, row.floor_assumed = one.floor, one.assumed
        for name, kind in (("", found.whole), ("decode_", found.decode), ("prompt_", found.prompt)):
            if number in kind:
                setattr(row, f"{name}speed_up", Interval.of(kind[number]).inverse)
        row.verdict = whole.verdict if np.isfinite(whole.half_width) else "too few cycles"


@dataclass(frozen=True)
class Scatter:
    """What the intervals of a session were wide by, on average over arms."""

    noise: float  # of a turn's ratio to the baseline's
    floor: float  # half-width for what processes of one arm differ by
    assumed: float  # share of what is known of that, which was not measured here
    cycles: int  # of the arm that had most

    @staticmethod
    def of(rows: Sequence[Row]) -> "Scatter | None":
        """None where nothing was compared."""
        known = [row for row in rows if row.cycles]
        if not known:
            return None
        noise, floor, assumed = (
            statistics.fmean(getattr(row, name) or 0.0 for row in known)
            for name in ("noise", "floor", "floor_assumed")
        )
        return Scatter(noise, floor, assumed, max(row.cycles for row in known))


def covered(rows: Sequence[Row], results: Results | None = None) -> str:
    """What the intervals cover, and at which speed of memory; a sentence without a full stop.

    results: of the session, which tell how long it was, and what memory read."""
    scatter = Scatter.of(rows)
    if scatter is None:
        return ""
    assumed = scatter.assumed
    origin = f"assumed, not measured here: {stats.ASSUMED_FROM}" if assumed else "measured here"
    if 0 < assumed < ALL_ASSUMED:
        origin += f"; {1 - assumed:.0%} of what is known is from here"
    states, speed = "", ""
    if results and results.end:
        seconds = (results.end.seconds - (results.end.loading or 0.0)) / STATES
        states = f" of up to about {duration(seconds)}"
        speeds = [span(readings) for readings in results.bandwidth.values() if is_limit(readings)]
        speed = f", with memory at {' and '.join(speeds)}" if speeds else ""
    return (
        f"intervals cover the noise of turns (±{scatter.noise:.1%} a cycle, {scatter.cycles} "
        f"cycles), ±{scatter.floor:.1%} for what processes of one arm differ by ({origin}), and "
        f"states of the machine{states}{speed}; not longer ones, nor what all processes of a "
        "session share"
    )


def reasons(row: Row, arm: ArmFacts) -> list[str]:
    """Why an arm is no faster than the baseline; sentences without a full stop."""
    run, share = arm.run, row.limit_share
    if row.verdict == "faster" or run is None:
        return []
    sentences = held_back(run, arm.kernels or {})
    if share is None or row.bandwidth is None:
        return sentences
    sentence = of_limit(share.value, run.mean_step_bytes, row.bandwidth)
    if row.others:
        sentence += f", while {row.others}"
    elif share.value >= MEMORY_BOUND:
        left = f", or a kernel {1 / share.value:.1f} × as fast at most" * (share.value < ALL_OF_IT)
        sentence = f"memory-bound: {sentence}; fewer bytes{left} would make it faster"
    elif share.value < NOT_MEMORY_BOUND:
        sentence += ": arithmetic or the cost of each call sets its speed"
    return [*sentences, sentence]
