"""Rows of the JSON that commands write with --json; the documents' tables read them back."""

from dataclasses import dataclass

from quantbench.report.interval import Interval
from quantbench.typed_json import omitted


@dataclass
class PeerRow:
    """peers: one of our schemes and one peer. Speeds are tokens per second over all turns."""

    scheme: str
    beside: str  # the peer's name
    failed: str | None
    cycles: int = 0  # of turns that both have
    decode_ours_tok_s: float | None = omitted()
    decode_theirs_tok_s: float | None = omitted()
    decode_ratio: Interval | None = omitted()  # ours ÷ theirs
    prompt_ours_tok_s: float | None = omitted()
    prompt_theirs_tok_s: float | None = omitted()
    prompt_ratio: Interval | None = omitted()
    bandwidth: float | None = omitted()  # bytes per second
    bandwidth_probe: str | None = omitted()  # the op that read them
    ours_limit_share: float | None = omitted()  # of what the bytes of a step allow
    theirs_limit_share: float | None = omitted()


@dataclass
class SchemeRow:
    """schemes: a scheme, and what it costs."""

    scheme: str
    numerics: str
    plain: str
    gguf: str  # the type of llama.cpp's that it compares with
    bits_per_weight: float | None = omitted()  # None for what autoquant chooses by measuring
    kernel: str | None = omitted()
    why_not: str | None = omitted()  # why no kernel can run it here
    perplexity: float | None = omitted()
    ratio: float | None = omitted()  # of perplexities: this scheme ÷ full precision
    ratio_standard_error: float | None = omitted()
    kl: float | None = omitted()  # nats a token, to full precision
    kl_standard_error: float | None = omitted()
    tokens: int | None = omitted()  # that were predicted
