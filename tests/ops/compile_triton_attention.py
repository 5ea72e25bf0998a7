"""Compile decode attention in Triton for a GPU that need not be here.

    python -m tests.ops.compile_triton_attention 90       compute capability 9.0

Raises what Triton or ptxas raises, or AssertionError for more shared memory than a block may have.
"""

import sys

import torch

from quantbench.kv_cache import CACHES
from tests.ops.gpu_compiler import compile_instead

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# format, dtype, query heads to a key head, head_dim
FORMS = [
    *[("dense", BFLOAT16, 4, 128), ("dense", FLOAT16, 128, 256), ("dense", FLOAT32, 4, 64)],
    *[("int8", BFLOAT16, 8, 128), ("fp8", BFLOAT16, 1, 80), ("fp8", FLOAT32, 1, 64)],
    *[("int4", BFLOAT16, 4, 128), ("int4", FLOAT16, 8, 64)],
]


def main(capability: int) -> None:
    compiled = compile_instead(capability)
    from quantbench.ops.triton import attention

    attention._has_fp8 = lambda device: capability >= 89
    where = torch.zeros(2, dtype=torch.long)
    for format, dtype, group, D in FORMS:
        cache = CACHES[format](2, 2, 100, D, dtype, "cpu").stored("key", 2)
        query = torch.zeros(2, 2 * group, D, dtype=dtype)
        attention.decode_attention(query, cache, cache, where, where)
    assert len(compiled) == 2 * len(FORMS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
