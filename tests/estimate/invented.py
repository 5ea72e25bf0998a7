"""A calibration of a machine whose speed follows a law that can be computed by hand.

Memory gives 50 GB/s and arithmetic 400 Gflop/s: a product of up to 16 rows takes its weight's bytes
÷ memory, one of more rows its operations ÷ arithmetic. Attention of a step takes the cache's bytes
÷ memory, that of a prompt its operations ÷ arithmetic. Norms and gates take 1 ns a number. In a
model, products take 1.1 times as long, each layer 20 µs more, and each step 100 µs. What two ranks
exchange takes 5 µs, and what one of them sends ÷ 10 GB/s.
"""

import itertools

from quantbench.estimate.calibration import (
    AttentionPoint,
    BandwidthPoint,
    Calibration,
    DrawPoint,
    ExchangePoint,
    ProductPoint,
    RestPoint,
    Speed,
    WholePoint,
)
from quantbench.estimate.calibration_models import MODELS

MEMORY, ARITHMETIC = 50e9, 400e9
SPEED = Speed(MEMORY, ARITHMETIC)
BITS = {"none": 16, "int8wo": 8, "int4wo-128": 4.25}
IN_PLACE, LAYER, STEP = 1.1, 20e-6, 100e-6
ROWS = (1, 4, 16, 128, 512, 2048)
CALL, LINK = 5e-6, 10e9  # of what two ranks exchange: seconds of a call, bytes per second


def product(scheme, rows, inner, outer):
    if rows <= 16:
        return BITS[scheme] / 8 * inner * outer / MEMORY
    return 2 * rows * inner * outer / ARITHMETIC


def attention(rows, queries, depth, heads, kv_heads, head_dim):
    if queries == 1:
        return 4 * rows * kv_heads * head_dim * depth / MEMORY
    return 4 * rows * heads * head_dim * queries * (queries + depth) / ARITHMETIC


def rest(rows, dim, heads, ffn):
    return rows * (dim + heads + ffn) * 1e-9


def draw(rows, vocabulary):
    return rows * vocabulary * 1e-10


def whole(config, scheme, rows, tokens, depth):
    """Seconds of a step (tokens 1) or of a prompt of one pass."""
    L, heads = config.num_layers, (config.num_heads, config.num_kv_heads, config.head_dim)
    shapes = [s for name, s in config.linear_shapes().items() if name != "output"]
    products = sum(product(scheme, rows * tokens, k, n) for n, k in shapes)
    products += product(scheme, rows, config.dim, config.vocab_size)
    between = 0.0
    if tokens > 1:
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        between = L * rest(rows * tokens, config.dim, width, config.ffn_dim)
    seen = depth + 1 if tokens == 1 else depth
    seconds = IN_PLACE * products + L * attention(rows, tokens, seen, *heads) + between
    return seconds + draw(rows, config.vocab_size) + L * LAYER + STEP


def exchanges():
    """A sum of two ranks sends its size once, in two halves; a gather as well."""
    return [
        ExchangePoint(kind, "shared memory", 2, size, CALL + size / LINK)
        for kind in ("all_reduce", "all_gather")
        for size in (2048, 16384, 131072)
    ]


def calibration(name="Invented CPU", slow=1.0, **changes):
    """slow: how many times as long everything takes."""
    speed = Speed(MEMORY / slow, ARITHMETIC / slow)
    products, wholes, attentions, rests = [], [], [], []
    for scheme, (model, config) in itertools.product(BITS, MODELS.items()):
        shapes = dict.fromkeys(config.linear_shapes().values())
        for (outer, inner), rows in itertools.product(shapes, ROWS):
            size = int(BITS[scheme] / 8 * inner * outer)
            seconds = slow * product(scheme, rows, inner, outer)
            products.append(ProductPoint(scheme, "cpu", rows, inner, outer, size, seconds, speed))
        for rows in (1, 4, 16):
            seconds = slow * whole(config, scheme, rows, 1, 5)
            wholes.append(
                WholePoint(scheme, model, "dense", "cpu-step", rows, 1, 5, seconds, speed)
            )
        for rows, tokens in ((1, 32), (1, 128), (1, 512), (4, 128), (16, 32)):
            seconds = slow * whole(config, scheme, rows, tokens, 0)
            wholes.append(
                WholePoint(scheme, model, "dense", "cpu-step", rows, tokens, 0, seconds, speed)
            )
    for heads, rows, depth in itertools.product([(16, 8, 128), (24, 6, 64)], (1, 4), (256, 4096)):
        size = 4 * rows * heads[1] * heads[2] * depth
        seconds = slow * attention(rows, 1, depth, *heads)
        attentions.append(AttentionPoint("dense", rows, 1, depth, *heads, size, seconds, speed))
        for queries, before in ((128, 0), (512, 0), (512, 512)):
            seconds = slow * attention(rows, queries, before, *heads)
            attentions.append(
                AttentionPoint("dense", rows, queries, before, *heads, 0, seconds, speed)
            )
    for config, rows in itertools.product(MODELS.values(), (32, 128, 512, 2048)):
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        for ffn in (config.ffn_dim, 2 * config.ffn_dim):
            seconds = slow * rest(rows, config.dim, width, ffn)
            rests.append(RestPoint(rows, config.dim, width, ffn, 0, seconds, speed))
    return Calibration(**{
        "date": "2026-01-02T03:04:05Z",
        "device": {"type": "cpu", "name": name, "threads": 2},
        "precision": "bfloat16",
        "versions": {"torch": "2.12.0", "torchao": "0.18.0"},
        "bandwidth": [BandwidthPoint(2**30, MEMORY / slow, MEMORY / slow)],
        "products": products,
        "attention": attentions,
        "rest": rests,
        "draws": [
            DrawPoint(greedy, rows, v, slow * draw(rows, v))
            for greedy in (True, False) for rows in (1, 4, 16) for v in (32768, 131072)
        ],
        "wholes": wholes,
        "base_bytes": 400_000_000,
        "exchanges": exchanges(),
    } | changes)  # fmt: skip
