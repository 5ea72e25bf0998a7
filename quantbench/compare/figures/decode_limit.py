"""Whole models decoding, and the limit that their bytes set: for roofline and growth.

results = measure([config, other], settings)
rows(results)[0].limit_share            # Interval(0.86, 0.85, 0.87)
"""

import statistics
from collections.abc import Sequence

from quantbench.answer.interval import Interval
from quantbench.answer.readings import is_limit, median
from quantbench.bench import process
from quantbench.compare.figures.json_rows import DecodeRow
from quantbench.compare.figures.limits import over, seconds, share, step_bytes
from quantbench.compare.sampling.comparison import Comparison
from quantbench.compare.sampling.results import ArmResult, Results, Settings
from quantbench.compare.sampling.workers import Command
from quantbench.log.config import RunConfig, argv
from quantbench.progress import say


def measure(
    configs: Sequence[RunConfig], settings: Settings, command: Command = process.COMMAND
) -> Results:
    """Sample the configs in turns, the bandwidth of their device before each round.

    command: as Comparison takes it. Raises KeyboardInterrupt where it came before the first round.
    """
    arms = [ArmResult(_name(config), "", argv(config)) for config in configs]
    results = Results(settings, arms, "none")
    Comparison(results, None, say, command, probe_rounds=True).run()
    if results.ended == "interrupted" and results.rounds == 0:
        raise KeyboardInterrupt
    return results


def rows(results: Results) -> list[DecodeRow]:
    """A row for each arm."""
    return [_row(results, arm) for arm in results.arms]


def _row(results: Results, arm: ArmResult) -> DecodeRow:
    row = DecodeRow(arm.name, arm.failed, results.rounds)
    run = arm.facts.run if arm.facts else None
    if run is None or not arm.samples:
        return row
    batch_size, needed = run.config.batch_size, step_bytes(run)
    steps_per_s = statistics.median(1 / seconds(one, "token_latency") for one in arm.samples)
    row.scheme, row.kernel, row.attention_kernel = run.scheme, run.kernel, run.attention_kernel
    row.decoder = run.decoder
    row.batch_size, row.weight_bytes, row.step_bytes = batch_size, run.weight_bytes, needed
    row.steps_per_s, row.decode_tok_s = steps_per_s, steps_per_s * batch_size
    if readings := results.bandwidth.get(run.config.device):
        row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
        if is_limit(readings):
            row.limit_tok_s = row.bandwidth / needed * batch_size
            part = share(arm, needed, readings)
            row.limit_share = Interval.of(part) if part else None
    if arm is not results.baseline:
        times = over(arm, results.baseline, "token_latency")
        row.speed_up = Interval.of(times) if times else None
    return row


def _name(config: RunConfig) -> str:
    return config.quantization + (f", {config.kernel}" if config.kernel != "auto" else "")
