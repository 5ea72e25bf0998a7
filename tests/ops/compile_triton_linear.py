"""Compile the Triton kernels, every format in each, for a GPU that need not be here.

    python -m tests.ops.compile_triton_linear 90       compute capability 9.0

Raises what Triton or ptxas raises, or AssertionError for more shared memory than a block may have.
"""

import sys

import torch

from tests.ops.gpu_compiler import compile_instead
from tests.ops.packed_weights import packed

FORMS = [
    *(("int", bits, 64) for bits in (1, 3, 4, 7)),
    *[("int", 8, None), ("fp8", 8, None), ("fp6", 6, None), ("fp4", 4, 16), ("nf4", 4, 64)],
    ("2:4", 4, 64),
]


def main(capability: int) -> None:
    compiled = compile_instead(capability)
    from quantbench.ops.triton.linear import linear

    for form in FORMS:
        scale_dtype = torch.float8_e8m0fnu if form[0] == "fp4" else torch.bfloat16
        weight = packed(form, 64, 1024, scale_dtype, zero=form[0] == "int" and form[2] == 64)
        for rows in (1, 16, 64):
            linear(torch.zeros(rows, 1024, dtype=torch.bfloat16), weight)
    others = packed(("int", 8, None), 64, 1028, torch.float16, tensor_scale=2.0)
    for dtype in (torch.float16, torch.float32):
        for rows in (2, 64):
            linear(torch.zeros(rows, 1028, dtype=dtype), others)
    assert len(compiled) == 3 * len(FORMS) + 4


if __name__ == "__main__":
    main(int(sys.argv[1]))
