"""The models that a machine is calibrated with. Their widths are those of no published model."""

from quantbench.models.config import ModelConfig

MODELS = {
    "narrow": ModelConfig("narrow", 1280, 4, 24, 6, 64, 3584, 50432, 16384),
    "wide": ModelConfig("wide", 1792, 2, 16, 8, 128, 5120, 40192, 16384, qk_norm=True),
    # Nearly all of its weights are in layers, and nearly all of the next one's in the output.
    "large": ModelConfig("large", 2304, 3, 24, 8, 96, 7168, 8192, 16384),
    "words": ModelConfig("words", 768, 1, 12, 4, 64, 2048, 98304, 16384),
    "broad": ModelConfig("broad", 3072, 1, 24, 3, 128, 9216, 65536, 16384),
}
ALONE = ("wide",)  # of which each product is measured alone, too
DEEP = ("narrow", "wide")  # measured behind deep caches and over caches of every kind
