"""The names that options accept for kernels, decoders and experts. No torch: the log reads it.

Tests compare these lists with the registries (quantize/registry.py, run/decoding.py,
experts/tiers.py).
"""

# Mechanisms by which a weight multiplies.
KERNELS = ("torchao", "cpu", "triton", "bitsandbytes", "reference", "torch")
# How a decoding step is carried out, fastest first (run/decoding.py).
DECODERS = ("cpu-step", "modules")
# What happens to an expert that is chosen and is not in fast memory.
EXPERT_POLICIES = ("auto", "fetch", "compute_there", "cache")
# Values of --expert_prefetch in old logs; a run accepts auto alone.
EXPERT_PREFETCH = ("auto", "router", "off")
