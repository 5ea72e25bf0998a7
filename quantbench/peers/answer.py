"""Arms measured against other programs: for peers.

results = measure(arms, Settings(cycles=24, processes=2, tokens=0))
peer_rows("int8wo", results)[0].decode_ratio        # Interval(1.21, 1.01, 1.45)
"""

from quantbench.bench import process
from quantbench.bench.pool import Command
from quantbench.bench.session import Rule, Session
from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.compare.intervals import Compared
from quantbench.compare.json_rows import PeerRow
from quantbench.compare.limit import limit_share, median
from quantbench.compare.rows import tok_s
from quantbench.report.interval import Interval


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
