"""What share of a machine's bandwidth and peak a scheme's kernels reach: assumed, with an interval.

of_cpu("int4wo-128")            # Efficiency(arithmetic=0.88, memory=1.02, …)
of_card(find("H100 SXM"))
"""

from dataclasses import dataclass, replace

from quantbench.estimate.datasheets import Datasheet, find


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak of products and of the bandwidth that passes reach."""

    arithmetic: float
    memory: float
    deviation: float  # of log(estimated ÷ measured)
    source: str

    @property
    def sentence(self) -> str:
        return (
            f"assumed: {self.memory:.0%} of the bandwidth and {self.arithmetic:.0%} of the peak, "
            f"{self.source}"
        )


# Root mean square of log(estimated ÷ measured) on one of two machines, with shares fitted to the
# other one alone: 0.24 to 0.33 for prompts and steps.
ANOTHER_MACHINE = 0.28
# Shares of the bandwidth and of the speed of a bfloat16 product, by the beginning of a scheme's
# name, the longest counts. FITTED: a prompt's or a step's bytes ÷ (share · bandwidth) + operations
# ÷ (share · product), to the 244 cases of docs/data/estimate_accuracy.json and …_amx.json, each at
# the speeds that were read beside it; a scheme's own cases.
FITTED = {
    "none": (0.92, 0.88),
    "int8wo": (0.93, 0.93),
    "int4wo": (1.02, 0.88),
    "fp6": (1.03, 0.54),
    "sparse-marlin": (0.93, 0.85),
    "uintx-2": (0.92, 0.85),
}
# Those of int8wo (8 and 7 bits) or int4wo-128 (fewer), times the ratio of the shares of bandwidth
# in docs/data/llama32_4layers.json (for uintx-6 the mean of uintx-5 and uintx-7), and times the
# ratio of the prompts' speeds there.
BY_RATIO = {
    "int8dq": (0.93, 0.94),
    "embed-int8": (0.91, 0.93),
    "float8wo": (0.79, 0.43),
    "float8dq": (0.76, 0.39),
    "bnb-int8": (0.73, 0.58),
    "uintx-7": (0.85, 0.77),
    "int8dq-int4wo": (0.95, 0.61),
    "mxfp4": (1.05, 0.76),
    "nvfp4": (0.71, 0.58),
    "bnb-nf4": (0.79, 0.32),
    "bnb-fp4": (0.76, 0.34),
    "uintx-6": (0.83, 0.70),
    "uintx-5": (0.81, 0.63),
    "uintx-4": (1.03, 0.86),
    "uintx-3": (1.06, 0.81),
    "uintx-2-8": (0.43, 0.38),
}
# An NVIDIA RTX A5000: 74.2 of 111.1 Tflop/s, and 548 of 768 GB/s, fitted to six forward passes of
# 16 × 1024 tokens in float16 that were published: 693.77 ms (facebook/opt-1.3b), 3275.30
# (opt-6.7b), 121.46 (AICrossSim/clm-60m), 241.97 (clm-200m), 380.49 (clm-400m), 747.17 (clm-1.1b).
# Their residuals are 1.4 %; another card by them was 8 % off (docs/LOG.md), and no quantized run
# and no other generation was ever measured: the interval is that of another CPU.
A5000 = Efficiency(0.6682, 0.7135, ANOTHER_MACHINE, "as six published passes on an RTX A5000")
ALIKE = 0.15  # cards whose peaks per watt differ by less are limited by power alike


def of_cpu(scheme: str) -> Efficiency:
    table = FITTED | BY_RATIO
    name = max((key for key in table if scheme.startswith(key)), key=len, default="none")
    memory, arithmetic = table[name]
    how = "as fitted" if name in FITTED else "by the ratio to a relative"
    return Efficiency(arithmetic, memory, ANOTHER_MACHINE, f"{how} on two other CPUs")


def of_card(sheet: Datasheet) -> Efficiency:
    """As an A5000; but where a card's power limit exceeds that one's by less than its peak does,
    and both have about the same peak per watt, products go by the power limit: cards that are made
    alike then clock down alike."""
    own = find("NVIDIA RTX A5000")
    peaks, watts = sheet.peak("float16") / own.peak("float16"), sheet.power / own.power
    if watts >= peaks or abs(peaks / watts - 1) >= ALIKE:
        return A5000
    source = f"{A5000.source}, products by the ratio of the power limits"
    return replace(A5000, arithmetic=A5000.arithmetic * watts / peaks, source=source)
