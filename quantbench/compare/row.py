"""One arm's figures: a line of the tables, of results.csv, and of "rows" in results.json."""

from dataclasses import dataclass, field
from typing import Literal

from quantbench.report.interval import Interval
from quantbench.run.facts import Peaks
from quantbench.typed_json import omitted

Verdict = Literal[
    "faster",
    "slower",
    "no difference shown",
    "baseline",
    "failed",
    "not measured",
    "no baseline",
    "too few cycles",
]


@dataclass
class Row:
    """Figures in seconds, bytes and nats; None where they are not known.

    Speeds are those of an arm's turns, as the ratios are; latencies of single tokens and peaks are
    of whole samples, as generate.py takes them.
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
    tok_s: float | None = omitted()  # of one row, prompt included, as in the log
    tok_s_interval: list[float] | None = omitted()  # ends of 95 %, of this session's turns
    tok_s_all_rows: float | None = omitted()
    prefill_tok_s: float | None = omitted()
    decode_tok_s: float | None = omitted()
    time_to_first_token_s: float | None = omitted()
    prompt_tokens: int | None = omitted()  # of each row
    weight_bytes_per_s: float | None = omitted()  # tok_s × bytes of weights, as in the log
    token_p50_s: float | None = omitted()
    token_p90_s: float | None = omitted()
    token_p99_s: float | None = omitted()
    others: str | None = omitted()  # who else used the cores while its samples were taken, if so
    bandwidth: float | None = omitted()  # bytes per second that the device reads
    bandwidth_probe: str | None = omitted()  # the op that read them
    limit_share: Interval | None = omitted()  # seconds that memory needs for a step ÷ measured
    peak_memory_bytes: Peaks | None = omitted()  # of the arm's first process
    joules_per_token: float | None = omitted()  # of a new token, without the idle machine's
    idle_watts: float | None = omitted()  # of the idle machine
    why_no_joules: str | None = omitted()  # why there are none
    perplexity: float | None = None
    perplexity_ratio: Interval | None = omitted()  # arm ÷ baseline, of the same tokens; 95 %
    kl: float | None = None  # of the next token, baseline to arm
    kl_standard_error: float | None = None
    kl_interval: list[float] | None = omitted()  # 95 %
    kl_noise: float | None = omitted()  # of full precision: KL of its decoding to its prompts
    top1: float | None = None
    top1_interval: list[float] | None = omitted()  # 95 %
    top5: float | None = None
    tokens: int | None = None  # that quality was measured on
    quality_model: str | None = omitted()  # where quality was taken on another model than the arm's
    why_no_quality: str | None = None
    # How far decoding predicts otherwise than reading a prompt, where that is more than rounding.
    decoding_differs: str | None = omitted()
    # Against the baseline; above 1 is faster. The verdict is that of `speed_up`.
    speed_up: Interval | None = omitted()  # of a whole run: the prompt, then the new tokens
    decode_speed_up: Interval | None = omitted()  # of a decoding step
    prompt_speed_up: Interval | None = omitted()
    verdict: Verdict = "not measured"
    can_be_best: bool | None = omitted()  # False where another arm is shown to be faster
    dropped: str | None = omitted()  # why it was not measured any further
    processes: int = 0
    cycles: int = 0  # of turns, shared with the baseline
    noise: float | None = omitted()  # of a cycle's ratio: standard deviation of its logarithm
    floor: float | None = omitted()  # what processes add to the interval's half-width, a logarithm
    floor_assumed: float | None = omitted()  # share of it that was not measured here; 1 is all
    why: list[str] = field(default_factory=list)  # reasons for being no faster than the baseline
    argv: list[str] = field(default_factory=list)  # the arm as options of generate.py
    command: str | None = omitted()  # that runs the arm
