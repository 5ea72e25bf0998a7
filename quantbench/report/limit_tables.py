"""The tables that roofline and peers print, and the lines below them; and the picture of growth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantbench.answer import growth
from quantbench.answer.growth import Point
from quantbench.answer.json_rows import DecodeRow, PeerRow
from quantbench.answer.layer_limit import LayerRow
from quantbench.answer.limit import caveats, span
from quantbench.bench.answers import Product, Reading
from quantbench.bench.store import Results
from quantbench.report.columns import Columns, interval, number
from quantbench.report.drawing import COLOURS, drawn, tidy
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


# ------------------------------------------------------------------------------------ growth

# A scheme has its colour in every picture; others take those that are left, in order.
SCHEMES = {"none": "#666666", "int8wo": "#1b6ca8", "int4wo-128": "#d95f0e", "fp6": "#2a9d5c"}
LIMIT = (
    "dashed: the limit, bytes that a step reads ÷ memory bandwidth; "
    "what fits into a cache can be above"
)


AXES = {  # labels of both axes; batch sizes are on a logarithmic one
    "layers": ("number of layers", "tokens per second"),
    "batch": ("batch size", "tokens per second, whole batch"),
    "depth": ("tokens already in the cache", "tokens per second"),
}


def draw(points: Sequence[Point], path: Path, caption: str = "") -> None:
    """Draw SVG: decoding as the work grows. Above, what was measured (solid) and the limit
    (dashed), for each axis; beneath, the share of the limit. caption: machine and date. Raises
    OSError."""
    names = [name for name in AXES if any(point.axis == name for point in points)]
    colours = _colours(list(dict.fromkeys(point.scheme or "" for point in points)))
    with drawn(path, size=(max(4 * len(names), 6), 5.2)) as figure:
        panels = figure.subplots(2, len(names), sharex="col", squeeze=False, height_ratios=(2.2, 1))
        for (above, beneath), name in zip(panels.T, names, strict=True):
            on_axis = [point for point in points if point.axis == name]
            for scheme, colour in colours.items():
                _lines(above, beneath, [p for p in on_axis if p.scheme == scheme], colour)
            _dress(above, beneath, name, on_axis)
        figure.suptitle("\n".join(part for part in (caption, LIMIT) if part), fontsize=9, x=0.5)
        handles, labels = panels[0][0].get_legend_handles_labels()
        columns = max(1, len(labels))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _colours(schemes: Sequence[str]) -> dict[str, str]:
    """A colour for each scheme, in the order of SCHEMES and then as given."""
    left = iter([colour for colour in COLOURS if colour not in SCHEMES.values()] * len(schemes))
    others = {scheme: next(left) for scheme in schemes if scheme not in SCHEMES}
    return {name: colour for name, colour in SCHEMES.items() if name in schemes} | others


def _lines(above: Any, beneath: Any, points: Sequence[Point], colour: str) -> None:
    line = sorted(points, key=lambda point: point.value)
    if not line:
        return
    values = [point.value for point in line]
    speeds = [point.decode_tok_s for point in line]
    above.plot(values, speeds, "o-", color=colour, markersize=4, label=line[0].scheme)
    if all(point.limit_tok_s for point in line):
        above.plot(values, [p.limit_tok_s for p in line], "--", color=colour, alpha=0.7)
        shares = [100 * (p.decode_tok_s or 0) / (p.limit_tok_s or 1) for p in line]
        beneath.plot(values, shares, "o-", color=colour, markersize=4)


def _dress(above: Any, beneath: Any, axis: str, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    above.set_title(points[0].model or growth.AXES[axis].model, fontsize=9, fontweight="bold")
    label, rate = AXES[axis]
    tidy(above, y=rate)
    tidy(beneath, label, "% of the limit")
    above.set_yscale("log")
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    above.yaxis.set_minor_locator(NullLocator())
    above.yaxis.set_major_formatter("{x:g}")
    beneath.set_ylim(0, max(110, beneath.get_ylim()[1]))
    beneath.axhline(100, color="#444", linestyle="--", linewidth=0.9)
    if axis == "batch":
        beneath.set_xscale("log", base=2)
        beneath.xaxis.set_minor_locator(NullLocator())
    values = sorted({point.value for point in points})
    short = [f"{n // 1024}k" if n and n % 1024 == 0 else str(n) for n in values]  # 65536: 64k
    beneath.set_xticks(values, short)
