"""Whole models decoding, each beside the limit of its bytes: for roofline and growth.

results = measure([config, other], settings)
rows(results)[0]["limit_share"]         # [0.86, 0.85, 0.87]: with its interval
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchlog.config import RunConfig, argv
from cli import say
from compare.figures.limits import over, share, step_bytes
from compare.figures.readings import figures, is_limit
from compare.figures.rows import seconds
from compare.figures.statistics import Estimate
from compare.sampling.comparison import Comparison
from compare.sampling.results import ArmResult, Results, Settings

Row = dict[str, Any]


def measure(configs: Sequence[RunConfig], settings: Settings, **more: Any) -> Results:
    """Sample the configs in turns, the bandwidth of their device before each round.

    `more`: as Comparison takes it. Raises KeyboardInterrupt where that left nothing to tell.
    """
    arms = [ArmResult(_name(config), "", argv(config)) for config in configs]
    results = Results(settings, arms, "none")
    Comparison(results, None, say, probe_rounds=True, **more).run()
    if results.ended == "interrupted" and results.rounds == 0:
        raise KeyboardInterrupt
    return results


def rows(results: Results) -> list[Row]:
    """A row for each arm: what it decodes, what its bytes would allow, and how it compares with
    the first arm."""
    return [_row(results, arm) for arm in results.arms]


def _row(results: Results, arm: ArmResult) -> Row:
    row: Row = {"arm": arm.name, "failed": arm.failed, "rounds": results.rounds}
    if not arm.facts or not arm.samples:
        return row
    config = arm.facts["config"]
    speeds = [1 / one for many in seconds(arm, "token_latency").values() for one in many]
    row |= {
        "scheme": arm.facts["scheme"],
        "kernel": arm.facts["kernel"],
        "attention_kernel": arm.facts["attention_kernel"],
        "batch_size": config["batch_size"],
        "weight_bytes": arm.facts["weight_bytes"],
        "step_bytes": step_bytes(arm.facts),
        "steps_per_s": statistics.median(speeds),
        "decode_tok_s": statistics.median(speeds) * config["batch_size"],
    }
    if readings := results.bandwidth.get(config["device"]):
        row |= figures(readings)
        if is_limit(readings):
            row["limit_tok_s"] = row["bandwidth"] / row["step_bytes"] * config["batch_size"]
            part = share(arm, row["step_bytes"], readings)
            row |= {"limit_share": interval(part)} if part.rounds else {}
    if arm is not results.baseline and results.baseline.samples:
        row["speed_up"] = interval(over(arm, results.baseline, "token_latency"))
    return row


def interval(found: Estimate) -> list[float]:
    """Ready for JSON; where there were too few rounds to tell, the value alone."""
    return [found.ratio, found.low, found.high] if found.low else [found.ratio]


def shown(name: str, percent: bool = False) -> Callable[[Row], str]:
    """A column of `rows`: 0.86 (0.85 to 0.87), or - where there is none."""

    def text(row: Row) -> str:
        if row.get(name) is None:
            return "-"
        value, *ends = (f"{one:.1%}" if percent else f"{one:.3f}" for one in row[name])
        return f"{value} ({ends[0]} to {ends[1]})" if ends else value

    return text


def _name(config: RunConfig) -> str:
    return config.quantization + (f", {config.kernel}" if config.kernel != "auto" else "")
