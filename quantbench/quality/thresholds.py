"""How far from full precision is too far: the one table that help, tables and documents quote.

KL is the divergence KL(full precision ‖ quantized) of the next token's distribution, in nats,
averaged over tokens. It decides instead of perplexity, since it needs a tenth (4 bits) to a
thousandth (8 bits) of the tokens to tell two schemes apart. Nothing here needs torch.
"""

from collections.abc import Collection

from quantbench.errors import UsageError
from quantbench.log.kinds import Number

KL = Number(what="nats per token, such as 0.03", most="100")  # what --max_kl takes
MAX_KL = 0.03  # the limit unless --max_kl gives another
# Before the KL is first compared with the limit; each further look doubles the tokens.
FIRST_TOKENS = 640
MOST_TOKENS = 16384
LEAST_TOKENS = 16  # of all texts together
TOKENS = 4096  # at most, where many schemes are compared
# Standard errors off the limit at which no more is read, as there are many looks. On which side of
# the limit a KL is, its interval says.
SURE = 3.5
UNNOTICED = 0.001  # nats that nobody can notice: a tenth of the first class
ROUNDINGS = 3  # times the reference's noise: what rounding alone explains

# The largest KL of each class, what it means, and a published model of that class.
CLASSES = (
    (0.01, "not noticeable", "Llama-3-8B as Q6_K has 0.0055 (llama.cpp #6936)"),
    (0.03, "good", "Llama-3-8B as Q5_K_M has 0.0108 (llama.cpp #6936)"),
    (0.1, "usable", "Llama-3-8B as IQ4_XS has 0.0425 (llama.cpp #12557); answers start to change"),
    (0.5, "damaged", "answers change often: their share follows KL (arXiv 2407.09141)"),
)
BROKEN = "broken"
SCALE = ", ".join(f"{word} up to {most:g}" for most, word, _ in CLASSES) + f", else {BROKEN}"
LEGEND = {  # how to read the figures
    "kl": f"KL divergence: {SCALE}",
    "perplexity_ratio": "Perplexity ÷ the baseline's: moves less than KL, and may fall by chance",
    "top1": "Same likeliest token, as greedy decoding takes it: where it flips, texts part",
    "top5": "The five likeliest tokens: the share that stayed; sampling draws from these",
}


def check_tokens(most: int) -> None:
    """Raise UsageError for too few tokens; 0 are all of a text."""
    if 0 < most < LEAST_TOKENS:
        raise UsageError(f"--tokens {most}: quality takes {LEAST_TOKENS} or more, or 0 for all")


def class_of(kl: float) -> str:
    """The word for a divergence in nats."""
    return next((word for most, word, _ in CLASSES if kl <= most), BROKEN)


def of_rounding(noise: float | None) -> float:
    """The most by which two ways of computing the same thing differ, in nats. noise: between the
    reference's decoding steps and its prompts."""
    return max(UNNOTICED, ROUNDINGS * (noise or 0.0))


def settled(kl: float, standard_error: float, limit: float) -> bool:
    """Whether a divergence is so far off the limit that no more needs to be read."""
    return abs(kl - limit) > SURE * standard_error


def described(
    text: str | None, tokens: Collection[int], window: int, model: str | None = None
) -> str:
    """What quality was measured on, in words. tokens: predicted of each arm. window: tokens of the
    longest passage. model: if not the arm's."""
    span = " to ".join(str(count) for count in sorted({min(tokens), max(tokens)}))
    words = f"{span} tokens of {text or 'the embedded texts'}, at most {window} at once"
    return f"the model {model} on {words}" if model else words
