"""Decoding, and the limit that memory sets to it: for roofline and peers.

    results = measure(arms_of(configs), Settings(cycles=24, processes=2, tokens=0))
    rows(results)[0].limit_share            # Interval(0.86, 0.85, 0.87)

A step reads all weights and all of the cache. With one row, a product takes two operations for each
weight, which any of today's processors does faster than its memory delivers the weight: the bytes
decide, until rows or positions are many.
"""

from collections.abc import Sequence

from quantbench.answer.compared import Compared, turns_of
from quantbench.answer.interval import Interval
from quantbench.answer.json_rows import DecodeRow, PeerRow
from quantbench.answer.limit import is_limit, limit_share, median, ratio
from quantbench.answer.rows import tok_s
from quantbench.bench import process
from quantbench.bench.pool import Command
from quantbench.bench.session import Rule, Session
from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.log.config import RunConfig, argv


def arms_of(configs: Sequence[RunConfig]) -> list[ArmResult]:
    """An arm for each run, named after its scheme, and its kernel where that is given."""
    return [
        ArmResult(
            config.quantization + (f", {config.kernel}" if config.kernel != "auto" else ""),
            "",
            argv(config, said=True),
        )
        for config in configs
    ]


def measure(
    arms: list[ArmResult], settings: Settings, command: Command = process.COMMAND
) -> Results:
    """Take turns with the arms, settings.cycles of each process, the bandwidth before each cycle.

    command: as bench.pool.Pool takes it. Raises KeyboardInterrupt where it came before any turn.
    """
    results = Results(settings, arms)
    assert settings.cycles
    Session(Store(results, None), Rule(), command).run()
    return results


def decode_ratio(results: Results, number: int, other: int) -> Interval | None:
    """The arm's speed of decoding ÷ another arm's."""
    own, others = (turns_of(results.turns(n, "decode")) for n in (number, other))
    return ratio(own, others) if own and others else None


def rows(results: Results) -> list[DecodeRow]:
    """A row for each arm."""
    found = Compared(results).decode
    made = []
    for number, arm in enumerate(results.arms):
        row = DecodeRow(arm.name, arm.failed, len(results.turns(number, "decode")))
        made.append(row)
        if number in found:
            row.speed_up = Interval.of(found[number]).inverse
        run, speed = arm.run, tok_s(results, number, "decode")
        if run is None or not speed:
            continue
        batch_size, needed = run.config.batch_size, run.mean_step_bytes
        row.scheme, row.kernel, row.decoder = run.scheme, run.kernel, run.decoder
        row.attention_kernel = run.attention_kernel
        row.batch_size, row.weight_bytes, row.step_bytes = batch_size, run.weight_bytes, needed
        row.steps_per_s, row.decode_tok_s = speed, speed * batch_size
        if readings := results.bandwidth.get(run.config.device):
            row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
            if is_limit(readings):
                row.limit_tok_s = row.bandwidth / needed * batch_size
                row.limit_share = limit_share(results, number, needed)
    return made


def with_stock(results: Results) -> list[DecodeRow]:
    """A row for each scheme, that of the stock kernel inside it."""
    configs, every = [arm.config for arm in results.arms], rows(results)
    stock = {one.quantization: n for n, one in enumerate(configs) if one.kernel != "auto"}
    merged = []
    for number, config in enumerate(configs):
        if config.kernel == "auto":
            row, other = every[number], stock.get(config.quantization)
            if other is not None:
                row.stock, row.over_stock = every[other], decode_ratio(results, number, other)
            merged.append(row)
    return merged


def peer_rows(scheme: str, results: Results) -> list[PeerRow]:
    """A row for each peer; our arm is the first."""
    ours, found = results.baseline, Compared(results)
    made = []
    for number, peer in enumerate(results.arms[1:], 1):
        row = PeerRow(scheme, peer.name, ours.failed or peer.failed)
        made.append(row)
        run = ours.run
        if run is None or peer.facts is None or number not in found.decode:
            continue
        row.cycles = found.decode[number].cycles
        row.decode_ratio = Interval.of(found.decode[number])
        row.decode_ours_tok_s = tok_s(results, 0, "decode")
        row.decode_theirs_tok_s = tok_s(results, number, "decode")
        if number in found.prompt:
            row.prompt_ratio = Interval.of(found.prompt[number])
            row.prompt_ours_tok_s = tok_s(results, 0, "prompt")
            row.prompt_theirs_tok_s = tok_s(results, number, "prompt")
        if readings := results.bandwidth.get("cpu"):
            row.bandwidth, row.bandwidth_probe = median(readings), readings[-1].probe
        own = run.mean_step_bytes
        theirs = own - run.step_weight_bytes + peer.facts.weight_bytes  # the caches are the same
        shares = limit_share(results, 0, own), limit_share(results, number, theirs)
        row.ours_limit_share, row.theirs_limit_share = (s.value if s else None for s in shares)
    return made
