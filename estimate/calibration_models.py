"""The models that a machine is calibrated with. Their widths are those of no published model."""

from models.config import ModelConfig

LARGE = ("narrow", "wide")  # their products are measured, and each is left out of a fit in turn
MODELS = {
    "narrow": ModelConfig("narrow", 1280, 4, 24, 6, 64, 3584, 50432, 16384),
    "wide": ModelConfig("wide", 1792, 2, 16, 8, 128, 5120, 40192, 16384, qk_norm=True),
    # It has next to no weights: its time is what a layer and a step cost whatever their size.
    "small": ModelConfig("small", 384, 1, 3, 3, 128, 768, 1024, 16384),
}
