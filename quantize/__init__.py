"""Quantization schemes: their names (spec), and what carries them out (registry)."""

import logging

# torchao reports, on every import without CUDA, the CUDA extensions that it could not load, and
# one of its enums makes torch's pytree warn. Neither is news to anybody who runs a benchmark.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)
