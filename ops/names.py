"""The names that options accept for kernels and KV caches. No torch here: benchlog reads it.

A test compares these lists with the registries (quantize/registry.py, kv_cache/__init__.py).
"""

# Mechanisms by which a weight multiplies.
KERNELS = ("torchao", "cpu", "triton", "bitsandbytes", "reference", "torch")
# Formats in which keys and values are stored.
KV_CACHES = ("dense", "int8", "fp8", "int4")
# How a decoding step is carried out, fastest first (run/decoding.py).
DECODERS = ("cpu-step", "cpu-stack", "cpu-layer", "modules")
