"""What every kernel of decode attention has to do: attention in float64 over what the codes mean.

    for kernel in KERNELS:
        check(kernel, query, key, value, first, count)
        check(kernel, *draw(kernel, format))

A row of KERNELS says how large the problems are that a kernel is given, and how far it may be off.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from quantbench.kv_cache import CACHES
from quantbench.ops.attention import decode_attention
from quantbench.ops.cpu import build
from quantbench.ops.kv import Scoring, StoredCache, dequantize
from tests import seeds
from tests.ops.exact import DTYPES, UNIT, Exact, attention
from tests.ops.instructions import MARKS, use

# B, H, K, T, D: groups of 1 to 33 query heads; head_dims of one line, of no whole line, of many.
SHAPES = [
    (1, 8, 2, 600, 64),
    (5, 6, 6, 67, 80),
    (1, 33, 1, 70, 256),
    (2, 12, 4, 40, 72),
    (1, 1, 1, 1, 8),
]
EDGES = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 511, 512, 513)


@dataclass(frozen=True)
class Kernel:
    name: str  # of ops.attention.decode_attention
    label: str
    begin: Callable[[], None] = lambda: None  # may skip the test
    allowed: Callable[..., dict] = field(default=lambda *_: {})  # arguments of Exact.check
    device: str = "cpu"
    most_slots: int = 600
    draws: int = 10
    slow: bool = False  # Triton's interpreter: fewer and smaller problems

    def __call__(self, query, key, value, first, count, *how) -> Tensor:
        places = (torch.as_tensor(x, device=query.device) for x in (first, count))
        return decode_attention(self.name, query, key, value, *places, Scoring(*how))


def check(
    kernel: Kernel, query: Tensor, key: StoredCache, value: StoredCache, first, count, *how
) -> Tensor:
    """how: as Scoring takes it."""
    with seeds.naming((query.shape, query.dtype, key.codes.shape, key.format, first, count, how)):
        y = kernel(query, key, value, first, count, *how)
        first, count = (torch.as_tensor(x, device=query.device) for x in (first, count))
        exact = expected(query, key, value, first, count, *how)
        allowed = kernel.allowed(query, key, value, first, count, exact, *how[:1])
        exact.check(y[:, :, None], dtype=query.dtype, **allowed)
    return y


def problem(B, H, K, T, D, dtype, format, spare_rows=0, device="cpu"):
    query = torch.randn(B, H, D).to(device, dtype)
    sides = (torch.randn(B, K, T, D).to(device, dtype) for _ in range(2))
    return query, *(stored(side, format, spare_rows) for side in sides)


def shapes(kernel: Kernel, format: str) -> list[tuple[int, ...]]:
    fit = [shape for shape in SHAPES if format != "int4" or shape[-1] % 32 == 0]
    if kernel.slow:
        fit = seeds.sample(fit, 2)
    return [(B, H, K, min(T, kernel.most_slots), D) for B, H, K, T, D in fit]


def draw(kernel: Kernel, format: str, shape: tuple[int, ...] | None = None):
    """A problem: of that shape, or of any; rows are rings, each filled to its own depth."""
    if shape is None:
        K, unit = random.choice((1, 2, 3)), 32 if format == "int4" else 8
        D = random.choice((unit * random.randint(1, 256 // unit), 32, 64, 96, 128, 256))
        T = random.choice((random.randint(1, kernel.most_slots), kernel.most_slots))
        heads = random.randint(1, 4 if kernel.slow else 18)  # kernels take four at a time
        shape = (random.choice((1, 2) if kernel.slow else (1, 2, 5)), K * heads, K, T, D)
    B, H, K, T, D = shape
    dtype = random.choice(DTYPES)
    query, key, value = problem(*shape, dtype, format, random.choice((0, 2)), kernel.device)
    count = [random.choice((T, random.randint(1, T), 1)) for _ in range(B)]
    return query, key, value, [random.choice((0, random.randrange(T))) for _ in range(B)], count


# ----------------------------------------------------------------------------------- the reference


# Instruction sets in which the kernel multiplies codes as integers, and what divides head_dim then.
IN_INTEGERS = {"avx2": 32, "avxvnni": 32, "avx512": 32, "avx512vnni": 1, "avx512bf16": 1, "amx": 1}


def stored(x: Tensor, format: str, spare_rows: int = 0) -> StoredCache:
    """Keys or values (B, K, T, D) as a cache keeps them, in the first rows of a larger one."""
    B, K, T, D = x.shape
    cache = CACHES[format](B + spare_rows, K, T, D, x.dtype, x.device)
    cache.update(torch.arange(T, device=x.device), x, x)
    return cache.stored("key", B)


def visible(first: Tensor, count: Tensor, T: int) -> Tensor:
    """(B, T): the slots (first[b] + i) % T for i < count[b]."""
    slots = torch.arange(T, device=first.device)
    return (slots - first[:, None]) % T < count[:, None]


def expected(
    query: Tensor,
    key: StoredCache,
    value: StoredCache,
    first: Tensor,
    count: Tensor,
    *how: float | Tensor | None,
) -> Exact:
    """Attention of one position, query (B, H, D), over what the codes mean: y is (B, H, 1, D)."""
    seen = visible(first, count, key.codes.shape[2])
    sides = (dequantize(side, torch.float64) for side in (key, value))
    return attention(query[:, :, None], *sides, seen[:, None, None], *how)


def integer_products(
    format: str,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    exact: Exact,
    scale: float | None = None,
) -> Tensor | float:
    """What the CPU's kernel may be off by where it multiplies integers: as the arguments of
    exact.attention, keys and values being what the codes mean.

    Queries and weights keep 15 bits of a head's largest number in a query, and of a block's largest
    weight: of 64 slots' errors, half of whom cancel the other half.
    """
    unit = IN_INTEGERS.get(build.isa())
    fits = query.dtype == torch.bfloat16 and unit and query.shape[-1] % unit == 0
    if format not in ("int8", "int4") or not fits:
        return 0.0
    B, H, _, _ = query.shape
    flat = query.abs().amax(-1, keepdim=True).expand_as(query)
    score = attention(flat, keys, values, visible, scale).score
    K, T = values.shape[1], values.shape[2]
    seen = visible.expand(B, H, -1, T).any(2).view(B, K, H // K, T).any(2)
    largest = values.abs().masked_fill(~seen[..., None], 0).amax((-2, -1))
    largest = largest.repeat_interleave(H // K, 1).view(B, H, 1, 1)
    return 2.0**-15 * (exact.mass * score + 8 * largest)


# ------------------------------------------------------------------------------------- the kernels


def cpu_allowed(query, key, value, first, count, exact: Exact, scale=None) -> dict:
    """What products of integers may be off by."""
    sides = (dequantize(side, torch.float64) for side in (key, value))
    seen = visible(first, count, key.codes.shape[2])[:, None, None]
    return {"beside": integer_products(key.format, query[:, :, None], *sides, seen, exact, scale)}


def triton_allowed(query, key, value, first, count, exact: Exact, scale=None) -> dict:
    """How often attention weights are rounded before the product, in units of query's dtype."""
    dtype = query.dtype
    if dtype == torch.float32:
        return {}
    # The interpreter cuts bfloat16 off where a GPU rounds it: as good as two, and the result's.
    cut = dtype == torch.bfloat16 and not query.is_cuda
    if key.format == "dense":
        return {"roundings": 3 if cut else 1}
    return {"roundings": UNIT[torch.float16] / UNIT[dtype] + cut}


def cpu_kernel(isa: str) -> Kernel:
    return Kernel("cpu", f"cpu-{isa}", lambda: use(isa), cpu_allowed)


CPU = [cpu_kernel(isa) for isa in build.ISAS]
TORCH = Kernel("torch", "torch")
TRITON = Kernel(
    "triton", "triton", lambda: pytest.importorskip("triton"), triton_allowed, "cpu", 90, 2, True
)
ON_GPU = Kernel("triton", "triton-gpu", allowed=triton_allowed, device="cuda", draws=40)
KERNELS = [
    pytest.param(kernel, id=kernel.label, marks=MARKS.get(kernel.label, ()))
    for kernel in (*CPU, TORCH, TRITON, ON_GPU)
]
