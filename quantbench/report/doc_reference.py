"""Tables of the documentation that the program itself answers: options, schemes, cache sizes."""

from collections.abc import Callable, Mapping, Sequence

from quantbench.log.config import RunConfig, option_table
from quantbench.quality.thresholds import CLASSES
from quantbench.quantize import spec
from quantbench.report.columns import size
from quantbench.report.documents import Block, table

# The model that the last column of `cache_bytes` is about.
LLAMA_3_1 = {"heads": 8, "head_dim": 128, "layers": 32, "positions": 131072}
# For each cache the layout of keys and values, and the bytes of one head's key by head_dim.
CACHE_BYTES: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "dense": ("as `--precision` has them", lambda width: 2 * width),
    "int8": ("a scale for each token and head", lambda width: width + 2),
    "fp8": ("a scale for each token and head", lambda width: width + 2),
    "int4": ("a scale for every 32 of head_dim", lambda width: width / 2 + width / 16),
}


def options(words: Sequence[str]) -> str:
    """options: those of generate.py."""
    rows = []
    for name, option in option_table().items():
        takes = option.kind.metavar or ""
        default = getattr(RunConfig(), name)
        given = f"`--{name}{' ' * bool(takes)}{takes}`"
        shown = "off" if default is False else "" if default is None else str(default)
        rows.append((given, shown, option.help.replace("|", "\\|")))
    return table(("option", "default", "meaning"), rows)


def schemes(words: Sequence[str]) -> str:
    """schemes: the forms of --quantization."""
    rows = [(f"`{form}`", said) for form, said in spec.numerics().items()]
    return table(("name", "what it does to the linear layers"), rows)


def cache_bytes(words: Sequence[str]) -> str:
    """cache_bytes: what each KV cache takes, from shapes."""
    layers, positions = LLAMA_3_1["layers"], LLAMA_3_1["positions"]
    rows = []
    for name, (how, of_head) in CACHE_BYTES.items():
        each = 2 * LLAMA_3_1["heads"] * of_head(LLAMA_3_1["head_dim"])  # keys and values
        rows.append((f"`{name}`", how, f"{each:.0f}", size(each * layers * positions)))
    headings = (
        *("`--kv_cache`", "keys and values"),
        *("bytes per position and layer", f"all {layers} layers, {positions} positions"),
    )
    return table(headings, rows)


def kl_classes(words: Sequence[str]) -> str:
    """kl_classes: what a KL divergence means, and what published models have."""
    rows = [(f"{most:g}", word, source) for most, word, source in CLASSES]
    return table(("KL, nats a token, up to", "class", "a published model"), rows)


TABLES: Mapping[str, Block] = {
    "options": options,
    "schemes": schemes,
    "cache_bytes": cache_bytes,
    "kl_classes": kl_classes,
}
