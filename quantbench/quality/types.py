"""A quality as data. Nothing here needs torch, so that commands which only ask workers start at
once."""

import dataclasses
import math
from dataclasses import dataclass

from quantbench.quality import block_errors
from quantbench.quality.block_errors import Estimate
from quantbench.typed_json import omitted


@dataclass(frozen=True)
class DecodeCheck:
    """How far predictions by decoding steps are from those of reading the same text as a prompt."""

    decoder: str  # that carried out the steps
    tokens: int  # that were predicted both ways
    kl: float | None  # nats, KL(prompt ‖ decoding), mean; None where logits are no numbers
    kl_max: float | None
    perplexity_ratio: float | None  # decoding ÷ prompt
    kl_of_rounding: float  # the largest mean that rounding explains
    differs: bool  # by more than that

    def sentence(self) -> str:
        """What the check found, as a sentence for people without its full stop."""
        kl = "not a number of" if self.kl is None else f"{self.kl:.2g}"
        figures = f"KL {kl} nats on {self.tokens} tokens"
        if self.differs:
            return (
                f"decoding by {self.decoder} differs from reading the text as a prompt by more "
                f"than rounding ({figures}, at most {self.kl_of_rounding:.2g} expected): the "
                "quality shown is not that of generated text; please report it"
            )
        return (
            f"decoding by {self.decoder}, token by token, predicts the same but for rounding "
            f"({figures})"
        )


@dataclass(frozen=True)
class LayerSqnr:
    """SQNR in dB, 10 log10 of the signal's energy ÷ the error's; None where nothing changed."""

    name: str
    weights: float | None
    outputs: float | None


@dataclass(frozen=True)
class Quality:
    """How well an arm predicts a text, and how far its predictions are from a reference's.

    KL is KL(reference ‖ arm) in nats per token; top1 is the share of tokens whose likeliest token
    is the reference's; top5 the share of the reference's five likeliest among the arm's. Standard
    errors and intervals are from windows of the text: None where there are too few.
    """

    tokens: int
    perplexity: float
    perplexity_standard_error: float | None
    perplexity_ratio: float | None = omitted()  # arm ÷ reference, from paired tokens
    perplexity_ratio_standard_error: float | None = omitted()
    perplexity_ratio_freedom: int | None = omitted()  # degrees of freedom of that error
    perplexity_ratio_interval: list[float] | None = omitted()  # the two ends of 95 %
    kl: float | None = omitted()
    kl_standard_error: float | None = omitted()
    kl_median: float | None = omitted()
    kl_p99: float | None = omitted()
    kl_max: float | None = omitted()
    top1: float | None = omitted()
    top5: float | None = omitted()
    bits_per_byte: float | None = omitted()  # of the text in UTF-8
    window: int | None = omitted()  # positions; windows advance by half of them
    # The model that was measured, where it is not the arm's: a scheme's quality is taken on the
    # embedded model where the arm's weights are random.
    model: str | None = omitted()
    decoding: DecodeCheck | None = omitted()
    layers: list[LayerSqnr] | None = omitted()  # each against full precision, in the model's order

    def with_interval(self) -> "Quality":
        """The same with the interval of its ratio of perplexities, where there is one."""
        value, error = self.perplexity_ratio, self.perplexity_ratio_standard_error
        if not value or error is None or self.perplexity_ratio_freedom is None:
            return self
        estimate = Estimate(math.log(value), error / value, self.perplexity_ratio_freedom)
        ends = [block_errors.ratio(end) for end in estimate.ends()]
        return dataclasses.replace(self, perplexity_ratio_interval=ends)


@dataclass(frozen=True)
class NoQuality:
    """Quality that cannot be measured."""

    why_not: str


@dataclass(frozen=True)
class LogitsFile:
    """A file of logits (rows, vocab_size) of a torch dtype, without a header."""

    path: str
    rows: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True)
class QualityAnswer:
    """An arm's quality, and the file of its logits if the request named one."""

    quality: Quality | NoQuality
    logits: LogitsFile | None = None
