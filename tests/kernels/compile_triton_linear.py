"""Compile the Triton kernels, every format in both, for a GPU that need not be here.

    python -m tests.kernels.compile_triton_linear 90       compute capability 9.0

Raises what Triton or ptxas raises, or AssertionError for more shared memory than a block may have.
"""

import os
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.triton.linear import linear
from tests.kernels.packed_weights import packed

# Bytes; "Shared Memory Capacity" per block in the CUDA C++ Programming Guide's table 21.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
FORMS = [
    *(("int", bits, 64) for bits in (1, 3, 4, 7)),
    *[("int", 8, None), ("fp8", 8, None), ("fp6", 6, None), ("fp4", 4, 16), ("nf4", 4, 64)],
    ("2:4", 4, 64),
]


class Driver:
    """As much of a device's driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capability: int) -> None:
    triton.runtime.driver.set_active(Driver(capability))
    launch, shared = triton.JITFunction.run, []

    def compile_only(kernel, *arguments, grid, warmup, **settings):
        compiled = launch(kernel, *arguments, grid=grid, warmup=True, **settings)
        shared.append(compiled.metadata.shared)

    triton.JITFunction.run = compile_only
    for form in FORMS:
        scale_dtype = torch.float8_e8m0fnu if form[0] == "fp4" else torch.bfloat16
        weight = packed(form, 64, 1024, scale_dtype, zero=form[0] == "int" and form[2] == 64)
        for rows in (1, 16):
            linear(torch.zeros(rows, 1024, dtype=torch.bfloat16), weight)
    others = packed(("int", 8, None), 64, 1028, torch.float16, tensor_scale=2.0)
    for dtype in (torch.float16, torch.float32):
        for rows in (2, 64):
            linear(torch.zeros(rows, 1028, dtype=dtype), others)
    assert len(shared) == 2 * len(FORMS) + 4 and max(shared) <= SHARED_MEMORY[capability]


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(int(sys.argv[1]))
