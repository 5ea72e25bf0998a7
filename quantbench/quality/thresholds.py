"""What a KL divergence means, in one table."""

CLASSES = (  # nats a token, up to and including
    (0.01, "not noticeable"),
    (0.03, "good"),
    (0.1, "usable"),
    (0.5, "damaged"),
)
BROKEN = "broken"
DEFAULT_LIMIT = 0.03


def word(kl: float) -> str:
    """The class of a mean KL divergence to the full-precision model."""
    return next((name for most, name in CLASSES if kl <= most), BROKEN)
