"""One arm's figures: a line of the tables, of results.csv, and of "rows" in results.json."""

from dataclasses import dataclass, field

from compare.figures.interval import Interval
from compare.sampling.answers import Peaks
from typed_json import fields_to_json, omitted

RATIOS = ("ratio_latency", "ratio_throughput")


@dataclass
class Row:
    """Figures in seconds, bytes and nats; None where they are not known.

    Latencies of tokens are over the decoding steps of all samples. Ratios leave out the slowest and
    the fastest tenth of each sample's steps, and are below 1 where the arm is better.
    """

    arm: str
    failed: str | None = None  # why it was not measured to the end
    samples: int = 0
    scheme: str | None = omitted()
    kernel: str | None = omitted()
    decoder: str | None = omitted()
    attention_kernel: str | None = omitted()
    weight_bytes: int | None = omitted()
    kv_cache_bytes: int | None = omitted()
    warm_up_steady: bool | None = omitted()
    tok_s: float | None = omitted()  # of a row; the mean over the samples, as in the log
    tok_s_all_rows: float | None = omitted()
    prefill_tok_s: float | None = omitted()
    decode_tok_s: float | None = omitted()
    time_to_first_token_s: float | None = omitted()
    weight_bytes_per_s: float | None = omitted()
    token_p50_s: float | None = omitted()
    token_p90_s: float | None = omitted()
    token_p99_s: float | None = omitted()
    bandwidth: float | None = omitted()  # bytes per second that the device reads
    bandwidth_probe: str | None = omitted()  # the op that read them
    bandwidth_share: float | None = omitted()  # weight_bytes_per_s ÷ bandwidth
    peak_memory_bytes: Peaks | None = omitted()  # of the arm's first process
    perplexity: float | None = None
    kl: float | None = None  # of the next token, baseline to arm
    kl_standard_error: float | None = None
    top1: float | None = None
    top5: float | None = None
    tokens: int | None = None  # that quality was measured on
    why_no_quality: str | None = None
    ratio_latency: Interval | None = omitted()  # seconds per decoded token: arm ÷ baseline
    ratio_throughput: Interval | None = omitted()  # tok/s with prefill: baseline ÷ arm
    speed_up: float | None = omitted()  # 1 ÷ ratio_throughput
    verdict: str = "not measured"
    in_words: str | None = omitted()
    why: list[str] = field(default_factory=list)  # reasons for being no faster than the baseline

    def to_json(self) -> dict[str, object]:
        """Ratios as [ratio, low, high]; high is None, and low 0, where there is no interval."""
        value = fields_to_json(self)
        for name in RATIOS:
            ratio = getattr(self, name)
            if ratio is not None:
                value[name] = [ratio.value, ratio.low or 0.0, ratio.high]
        return value
