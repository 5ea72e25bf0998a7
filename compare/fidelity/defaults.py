"""What quality is measured on, unless a command says otherwise: the same in every command."""

TOKENS = 4096  # of the embedded held-out text, or of --text
CONTEXT = 1024  # positions of a window; windows advance by half of them
EMBEDDED_MODEL = "tiny"  # takes the place of random weights, which predict nothing


def described(text: str | None, tokens: int, context: int, model: str | None = None) -> str:
    """What it was measured on, in words. tokens: that were predicted. model: if not the arm's."""
    words = f"{tokens} tokens of {text or 'the embedded text'} in windows of {context}"
    return f"the model {model} on {words}" if model else words
