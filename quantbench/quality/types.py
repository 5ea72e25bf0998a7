"""A quality as data. Nothing here needs torch, so that commands which only ask workers start at
once."""

import dataclasses
import math
from dataclasses import dataclass

from quantbench.quality import thresholds
from quantbench.quality.block_errors import Estimate, ratio
from quantbench.typed_json import omitted


@dataclass(frozen=True)
class DecodeCheck:
    """How far predictions by decoding steps are from those of reading the same text as a prompt."""

    decoder: str  # that carried out the steps
    tokens: int  # that were predicted both ways
    # Nats, mean: KL(prompt ‖ decoding); where activations or the cache are rounded, by how much
    # decoding is further from the reference than the prompt. None where logits are no numbers.
    kl: float | None
    kl_of_rounding: float  # the most that rounding explains
    differs: bool  # by more than that

    def sentence(self) -> str:
        """What the check found, as a sentence for people without its full stop."""
        more = "not a number of" if self.kl is None else f"{self.kl:.2g}"
        figures = f"KL {more} nats on {self.tokens} tokens"
        if not self.differs:
            return (
                f"decoding by {self.decoder}, token by token, predicts the same but for rounding "
                f"({figures})"
            )
        return (
            f"decoding by {self.decoder} differs from reading the text as a prompt by more than "
            f"rounding ({figures}, at most {self.kl_of_rounding:.2g} expected): the quality shown "
            "is not that of generated text; please report it"
        )


@dataclass(frozen=True)
class LayerSqnr:
    """SQNR in dB, 10 log10 of the signal's energy ÷ the error's; None where nothing changed."""

    name: str
    weights: float | None
    outputs: float | None


@dataclass(frozen=True)
class Part:
    """The tokens of one text, or those at some depths, against the reference's."""

    name: str  # of the text; or the depths, "0-1k"
    tokens: int
    kl: float
    kl_standard_error: float | None  # None: too few blocks
    top1: float
    perplexity_ratio: float
    digest: str | None = omitted()  # of the tokens: what is measured can change between versions


@dataclass(frozen=True)
class Quality:
    """How well an arm predicts texts, and how far its predictions are from a reference's.

    KL is KL(reference ‖ arm) in nats per token; top1 is the share of tokens whose likeliest token
    is the reference's; top5 the share of the reference's five likeliest among the arm's. Every text
    counts alike in kl, each token alike in the others. Standard errors and intervals are from
    blocks of tokens: None where there are too few.
    """

    tokens: int
    perplexity: float
    perplexity_standard_error: float | None
    perplexity_ratio: float | None = omitted()  # arm ÷ reference, from paired tokens
    perplexity_ratio_standard_error: float | None = omitted()
    perplexity_ratio_freedom: float | None = omitted()  # degrees of freedom of that error
    perplexity_ratio_interval: list[float] | None = omitted()  # the two ends of 95 %
    kl: float | None = omitted()
    kl_standard_error: float | None = omitted()
    kl_freedom: float | None = omitted()
    kl_interval: list[float] | None = omitted()
    kl_median: float | None = omitted()
    kl_p99: float | None = omitted()
    kl_max: float | None = omitted()
    noise: float | None = omitted()  # of the reference: KL of its decoding steps to its prompts
    top1: float | None = omitted()
    top1_standard_error: float | None = omitted()
    top1_freedom: float | None = omitted()
    top1_interval: list[float] | None = omitted()
    top5: float | None = omitted()
    lost: float | None = omitted()  # share of tokens: the reference's likeliest is right, ours not
    gained: float | None = omitted()  # ours is right, the reference's not
    bits_per_byte: float | None = omitted()  # of the given texts in UTF-8
    window: int | None = omitted()  # tokens of the longest passage
    # The model that was measured, where it is not the arm's: a scheme's quality is taken on the
    # embedded model where the arm's weights are random.
    model: str | None = omitted()
    texts: list[Part] | None = omitted()
    depths: list[Part] | None = omitted()
    decoding: DecodeCheck | None = omitted()
    layers: list[LayerSqnr] | None = omitted()  # each against full precision, in the model's order

    @property
    def kl_class(self) -> str | None:
        """The word for its KL (quality/thresholds.py); None without a reference."""
        return None if self.kl is None else thresholds.class_of(self.kl)

    def settled(self, max_kl: float) -> bool:
        """Whether the KL is on one side of the limit beyond doubt."""
        if self.kl is None or self.kl_standard_error is None:
            return False
        return thresholds.settled(self.kl, self.kl_standard_error, max_kl)

    def with_interval(self) -> "Quality":
        """The same with the intervals of its perplexity ratio, KL and top1, if there are any."""
        changes: dict[str, list[float]] = {}
        value, error = self.perplexity_ratio, self.perplexity_ratio_standard_error
        if value and error is not None and self.perplexity_ratio_freedom is not None:
            log = Estimate(math.log(value), error / value, self.perplexity_ratio_freedom)
            changes["perplexity_ratio_interval"] = [ratio(end) for end in log.ends()]
        if self.kl is not None and self.kl_standard_error is not None and self.kl_freedom:
            kl = Estimate(self.kl, self.kl_standard_error, self.kl_freedom)
            changes["kl_interval"] = [max(0.0, end) for end in kl.ends()]
        if self.top1 is not None and self.top1_standard_error is not None and self.top1_freedom:
            top1 = Estimate(self.top1, self.top1_standard_error, self.top1_freedom)
            changes["top1_interval"] = [min(max(end, 0.0), 1.0) for end in top1.ends()]
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class NoQuality:
    """Quality that cannot be measured."""

    why_not: str


@dataclass(frozen=True)
class QualityReference:
    """The run that the quality of all arms of --same_model is relative to."""

    argv: list[str]
    path: str  # its checkpoint
    scheme: str | None = omitted()  # of the checkpoint's weights; None: they are not quantized

    def sentence(self) -> str:
        """Without a full stop."""
        how = f", whose weights are quantized themselves ({self.scheme})" if self.scheme else ""
        return f"quality is relative to {self.path}{how or ' in full precision'}"


@dataclass(frozen=True)
class SameModel:
    """Checkpoints of one model."""

    schemes: list[str | None]  # of each checkpoint's weights; None: they are not quantized
    best: int  # the number of the first one in full precision, else of the one with most bytes
    floats: bool  # whether the best checkpoint can be read in full precision


@dataclass(frozen=True)
class Likeliest:
    """What a model predicts behind each of some tokens, in short: by it two processes see whether
    they have the same model."""

    ids: list[int]  # the tokens that are read, from position 0 on
    tokens: list[list[int]]  # the likeliest ones behind each of them
    logs: list[list[float]]  # logarithms of their probabilities


@dataclass(frozen=True)
class Judged:
    """An arm's quality, and what is known of the model that was judged."""

    quality: Quality | NoQuality
    likeliest: Likeliest | None = omitted()  # None where another model stood in for the arm's
    weight_bytes: int | None = omitted()  # without the embedding table's
    kernel: str | None = omitted()
    refused: str | None = omitted()  # why the texts will not do for any arm
