"""Compile the Triton kernels, every format in each, for a GPU that need not be here.

    python -m tests.ops.gpu_compiler 90                          compute capability 9.0
    python -m tests.ops.gpu_compiler 90 linear=3,7 attention=0   these problems alone
    make gpu-compile                                             for every capability: three minutes

Raises what Triton or ptxas raises, or AssertionError for more shared memory than a block may have,
or more instructions for a weight than tests/ops/gpu_instructions.py allows.
"""

import os
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch

from quantbench.kv_cache import CACHES
from quantbench.ops.formats import Packed
from tests import seeds
from tests.ops.packed_weights import packed
from tests.programs import finished

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FORMS = [
    *(("int", bits, 64) for bits in (1, 2, 3, 4, 7)),
    *[("int", 8, None), ("fp8", 8, None), ("fp6", 6, None), ("fp4", 4, 16), ("fp4", 4, 32)],
    *[("nf4", 4, 64), ("2:4", 4, 64), ("int", 4, 32)],
]
# format, dtype, query heads to a key head, head_dim
ATTENTION = [
    *[("dense", BFLOAT16, 4, 128), ("dense", FLOAT16, 128, 256), ("dense", FLOAT32, 4, 64)],
    *[("int8", BFLOAT16, 8, 128), ("fp8", BFLOAT16, 1, 80), ("fp8", FLOAT32, 1, 64)],
    *[("int4", BFLOAT16, 4, 128), ("int4", FLOAT16, 8, 64)],
]
# Bytes; "Shared Memory Capacity" per block in the CUDA C++ Programming Guide's table 21.
SHARED_MEMORY = {
    75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10,
    90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip


def driver_of(capability: int) -> None:
    """Give Triton the part of a device's driver that compiling needs; 90 for 9.0."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_device_interface=lambda: torch.cuda,
    )
    triton.runtime.driver.set_active(driver)


def compile_instead(capability: int) -> list:
    """From now on this process compiles kernels for compute capability 9.0, given 90, instead of
    launching them: the list to which they are added."""
    driver_of(capability)
    import triton

    from quantbench.ops.triton import linear

    linear._has_pairs = lambda device: capability >= 80
    launch, compiled = triton.JITFunction.run, []

    def compile_only(kernel, *arguments, grid, warmup, **settings):
        made = launch(kernel, *arguments, grid=grid, warmup=True, **settings)
        assert made.metadata.shared <= SHARED_MEMORY[capability]
        compiled.append(made)

    triton.JITFunction.run = compile_only
    return compiled


def weight_of(form: tuple, columns: int) -> Packed:
    """As schemes have it: zero points, and the dtype of scales."""
    scale_dtype = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}.get(form[2], BFLOAT16)
    scale_dtype = scale_dtype if form[0] == "fp4" else BFLOAT16
    return packed(form, 64, columns, scale_dtype, zero=form[0] == "int" and form[2] == 64)


def linear(compiled: list, capability: int, forms: Collection[Any] = FORMS) -> None:
    from quantbench.ops.triton.linear import linear
    from tests.ops import gpu_instructions

    for form in forms:
        weight = weight_of(form, 1024)
        for rows in (1, 63, 64):
            linear(torch.zeros(rows, 1024, dtype=BFLOAT16), weight)
        gpu_instructions.check(compiled[-3], form, capability)
    others = packed(("int", 8, None), 64, 1028, FLOAT16, tensor_scale=2.0)
    for dtype in (FLOAT16, FLOAT32):
        for rows in (2, 64):
            linear(torch.zeros(rows, 1028, dtype=dtype), others)
    assert len(compiled) == 3 * len(forms) + 4


def attention(compiled: list, capability: int, problems: Collection[Any] = ATTENTION) -> None:
    from quantbench.ops.triton import attention

    attention._has_fp8 = lambda device: capability >= 89
    where = torch.zeros(2, dtype=torch.long)
    for format, dtype, group, D in problems:
        cache = CACHES[format](2, 2, 100, D, dtype, "cpu").stored("key", 2)
        query = torch.zeros(2, 2 * group, D, dtype=dtype)
        attention.decode_attention(query, cache, cache, where, where)
    assert len(compiled) == 2 * len(problems)


KERNELS = {"linear": (linear, FORMS), "attention": (attention, ATTENTION)}


def compile_for_a_gpu(capability: int, drawn: dict[str, Collection[int]]) -> None:
    """In a separate process, where Triton is not interpreting. drawn: numbers of problems."""
    words = [f"{kernel}={','.join(map(str, some))}" for kernel, some in drawn.items()]
    with seeds.naming((capability, words)):
        finished("-m", "tests.ops.gpu_compiler", capability, *words)


if __name__ == "__main__":
    capability, drawn = int(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
    compiled = compile_instead(capability)
    for kernel, (compile_kernel, problems) in KERNELS.items():
        if drawn:
            problems = [problems[int(i)] for i in drawn[kernel].split(",")]
        compiled.clear()
        compile_kernel(compiled, capability, problems)
