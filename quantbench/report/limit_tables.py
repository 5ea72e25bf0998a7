"""The tables that roofline and peers print, and the lines below them."""

from collections.abc import Mapping, Sequence

from quantbench.answer.json_rows import DecodeRow, PeerRow
from quantbench.answer.layer_limit import LayerRow
from quantbench.answer.limit import caveats, span
from quantbench.bench.answers import Product, Reading
from quantbench.bench.store import Results
from quantbench.report.columns import Columns, interval, number
from quantbench.text import counted


def _time(product: Product) -> str:
    seconds = (product.seconds, product.seconds_low, product.seconds_high)
    middle, low, high = (1e6 * (value or 0) for value in seconds)
    return f"{middle:.1f} µs ({low:.1f} to {high:.1f})" if product.seconds else "-"


def _read(row: LayerRow) -> str:
    """48.2 GB/s (81%): of the memory's speed."""
    if row.bytes_per_s is None:
        return "-"
    share = "" if row.limit_share is None else f" ({row.limit_share:.0%})"
    return f"{row.bytes_per_s / 1e9:.1f} GB/s{share}"


LAYERS: Columns[LayerRow] = [
    ("layer", lambda row: row.layer),
    ("scheme", lambda row: row.scheme),
    ("kernel", lambda row: row.kernel),
    ("time", _time),
    ("read (of the limit)", _read),
    ("× full precision", number(lambda row: row.speed_up, ".2f")),
    ("stock kernel", lambda row: row.stock.kernel if row.stock else "-"),
    ("time", lambda row: _time(row.stock) if row.stock else "-"),
    ("ours × stock", number(lambda row: row.over_stock, ".2f")),
]
MODELS: Columns[DecodeRow] = [
    ("scheme", lambda row: row.arm),
    ("kernel", lambda row: row.kernel or "-"),
    ("decode, tok/s", number(lambda row: row.decode_tok_s, ".2f")),
    ("limit, tok/s", number(lambda row: row.limit_tok_s, ".2f")),
    ("of the limit", interval(lambda row: row.limit_share, ".1%")),
    ("× full precision", interval(lambda row: row.speed_up)),
    ("stock kernel", lambda row: (row.stock.kernel if row.stock else None) or "-"),
    ("its tok/s", number(lambda row: row.stock.decode_tok_s if row.stock else None, ".2f")),
    ("ours × stock", interval(lambda row: row.over_stock)),
]
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


def layer_remarks(rows: Sequence[LayerRow]) -> list[str]:
    """How single layers were measured, and what failed."""
    readings = sorted({row.bandwidth for row in rows})
    low, high = readings[0] / 1e9, readings[-1] / 1e9
    remarks = [f"memory was read at {low:.1f} to {high:.1f} GB/s; medians, quartiles in brackets"]
    remarks += dict.fromkeys(row.bandwidth_caveat for row in rows if row.bandwidth_caveat)
    if any(row.rotated < row.cache for row in rows):
        remarks.append("some weights may have come from the cache: too little memory for copies")
    for row in rows:
        remarks += [
            f"{row.layer}, {row.scheme}, kernel {product.kernel}: {product.why_not}"
            for product in (row, row.stock)
            if product and product.why_not
        ]
    return remarks


def model_remarks(
    rows: Sequence[DecodeRow], bandwidth: Mapping[str, Sequence[Reading]]
) -> list[str]:
    """How whole models were measured, and what failed. bandwidth: readings by device."""
    remarks = []
    for device, readings in bandwidth.items():
        remarks += [f"{device} read memory at {span(readings)}, before each cycle of turns"]
        remarks += caveats(readings)
    remarks += dict.fromkeys(
        f"ours × stock compares decoders, too: {row.decoder} with {row.stock.decoder}"
        for row in rows
        if row.stock and row.decoder and row.stock.decoder not in (None, row.decoder)
    )
    for row in rows:
        remarks += [
            f"{arm.arm}: failed: {arm.failed}" for arm in (row, row.stock) if arm and arm.failed
        ]
    return remarks


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
