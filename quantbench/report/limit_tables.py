"""The tables that roofline, growth and peers print, and the lines below them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from quantbench.answer.json_rows import DecodeRow, PeerRow
from quantbench.answer.layer_limit import LayerRow
from quantbench.answer.readings import caveats, span
from quantbench.bench.answers import Product, Reading
from quantbench.bench.store import Results
from quantbench.report.columns import Columns, interval, number

R = TypeVar("R")
S = TypeVar("S")
TOK_S = " tok/s"


def _time(product: Product) -> str:
    seconds = (product.seconds, product.seconds_low, product.seconds_high)
    middle, low, high = (1e6 * (value or 0) for value in seconds)
    return f"{middle:.1f} µs ({low:.1f} to {high:.1f})" if product.seconds else "-"


def _stock(read: Callable[[R], S | None], show: Callable[[S], str]) -> Callable[[R], str]:
    """A cell of the stock kernel's row inside a row."""

    def shown(row: R) -> str:
        stock = read(row)
        return "-" if stock is None else show(stock)

    return shown


LAYERS: Columns[LayerRow] = [
    ("layer", lambda row: row.layer),
    ("scheme", lambda row: row.scheme),
    ("kernel", lambda row: row.kernel),
    ("time", _time),
    ("read", number(lambda row: row.bytes_per_s, ".1f", 1e-9, " GB/s")),
    ("of the limit", number(lambda row: row.limit_share, ".0%")),
    ("× full precision", number(lambda row: row.speed_up, ".2f")),
    ("stock kernel", _stock(lambda row: row.stock, lambda product: product.kernel)),
    ("time", _stock(lambda row: row.stock, _time)),
    ("ours × stock", number(lambda row: row.over_stock, ".2f")),
]
DECODE: Callable[[DecodeRow], str] = number(lambda row: row.decode_tok_s, ".2f", suffix=TOK_S)
MODELS: Columns[DecodeRow] = [
    ("scheme", lambda row: row.arm),
    ("kernel", lambda row: row.kernel or "-"),
    ("decode", DECODE),
    ("limit", number(lambda row: row.limit_tok_s, ".2f", suffix=TOK_S)),
    ("of the limit", interval(lambda row: row.limit_share, ".1%")),
    ("× full precision", interval(lambda row: row.speed_up)),
    ("stock kernel", _stock(lambda row: row.stock, lambda stock: stock.kernel or "-")),
    ("decode", _stock(lambda row: row.stock, DECODE)),
    ("ours × stock", interval(lambda row: row.over_stock)),
]
PEERS: Columns[PeerRow] = [
    ("scheme", lambda row: row.scheme),
    ("beside", lambda row: row.beside),
    ("decode: ours", number(lambda row: row.decode_ours_tok_s, ".2f", suffix=TOK_S)),
    ("theirs", number(lambda row: row.decode_theirs_tok_s, ".2f", suffix=TOK_S)),
    ("ours ÷ theirs", interval(lambda row: row.decode_ratio)),
    ("of the limit: ours", number(lambda row: row.ours_limit_share, ".0%")),
    ("theirs", number(lambda row: row.theirs_limit_share, ".0%")),
    ("prompt: ours", number(lambda row: row.prompt_ours_tok_s, ".2f", suffix=TOK_S)),
    ("theirs", number(lambda row: row.prompt_theirs_tok_s, ".2f", suffix=TOK_S)),
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
        f"{threads} threads each, in cycles of short turns; ratios compare turns of a cycle, with "
        "95 % intervals"
    ]
    for arm in [arm for results in comparisons for arm in results.arms]:
        if arm.facts and arm.facts.about:
            lines.append(f"{arm.name}: {arm.facts.about}")
        if arm.facts and not arm.facts.ready.warm_up_steady:
            lines.append(f"{arm.name}: its warm-up did not become steady")
    readings = [reading for results in comparisons for reading in results.bandwidth.get("cpu", [])]
    if readings:
        lines += [f"memory was read at {span(readings)}", *caveats(readings)]
    lines += [f"{row.beside}: failed: {row.failed}" for row in rows if row.failed]
    return list(dict.fromkeys(lines))
