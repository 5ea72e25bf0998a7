"""What quality is measured on, unless a command says otherwise, and how its figures are to be read:
the same in every command."""

TOKENS = 4096  # of the embedded held-out text, or of --text
CONTEXT = 1024  # positions of a window; windows advance by half of them
EMBEDDED_MODEL = "tiny"  # takes the place of random weights, which predict nothing
# How to read the figures: what is good, and what is bad.
LEGEND = {
    "perplexity_ratio": "Perplexity ÷ the baseline's: up to 1.01 nobody notices; above 1.05 it is "
    "another model",
    "kl": "KL divergence, how far the probabilities moved: below 0.01 nobody notices; above 0.1 "
    "answers change",
    "top1": "Same likeliest token, as greedy decoding takes it: 0.99 is good; below 0.9 texts soon "
    "part",
    "top5": "Of the five likeliest, the share that stayed: sampling draws from these; 0.98 is good",
}


def described(text: str | None, tokens: int, context: int, model: str | None = None) -> str:
    """What it was measured on, in words. tokens: that were predicted. model: if not the arm's."""
    words = f"{tokens} tokens of {text or 'the embedded text'} in windows of {context}"
    return f"the model {model} on {words}" if model else words
