"""The table that peers prints, and the lines below it."""

from collections.abc import Sequence

from quantbench.bench.store import Results
from quantbench.compare.json_rows import PeerRow
from quantbench.compare.limit import caveats, span
from quantbench.report.block import block_of
from quantbench.report.columns import Columns, interval, number
from quantbench.text import counted

PEERS: Columns[PeerRow] = [
    ("scheme", lambda row: row.scheme),
    ("peer", lambda row: row.beside),
    ("decode, tok/s: ours", number(lambda row: row.decode_ours_tok_s, ".2f")),
    ("theirs", number(lambda row: row.decode_theirs_tok_s, ".2f")),
    ("ours ÷ theirs", interval(lambda row: row.decode_ratio)),
    (
        "of the limit: ours / theirs",
        lambda row: " / ".join(
            f"{share:.0%}" if share is not None else "-"
            for share in (row.ours_limit_share, row.theirs_limit_share)
        ),
    ),
    ("prompt, tok/s: ours", number(lambda row: row.prompt_ours_tok_s, ".2f")),
    ("theirs", number(lambda row: row.prompt_theirs_tok_s, ".2f")),
    ("ours ÷ theirs", interval(lambda row: row.prompt_ratio)),
]


def peer_remarks(
    rows: Sequence[PeerRow], comparisons: Sequence[Results], threads: int
) -> list[str]:
    """How peers were measured, and what the table has no room for."""
    lines = [
        f"{counted(threads, 'thread')} each, in cycles of short turns; ratios compare turns of a "
        "cycle, with 95 % intervals"
    ]
    for arm in [arm for results in comparisons for arm in results.arms]:
        if arm.facts and arm.facts.about:
            lines.append(f"{arm.name}: {arm.facts.about}")
        if arm.facts and (run := arm.facts.run):
            ran = f"activations and cache in {run.config.precision}"
            lines.append(f"{arm.name}: {ran}; kernel {run.kernel}, decoder {run.decoder}")
        if arm.facts and not arm.facts.ready.warm_up_steady:
            lines.append(f"{arm.name}: its warm-up did not become steady")
    each = [readings for results in comparisons for readings in results.bandwidth.values()]
    readings = [reading for readings in each for reading in readings]
    if readings:
        lines += [f"memory was read at {span(readings)}", *caveats(readings)]
    lines += [f"{row.beside}: failed: {row.failed}" for row in rows if row.failed]
    return list(dict.fromkeys(lines))


block = block_of(PeerRow, PEERS, may_be_missing=True)  # of `peers --json`
