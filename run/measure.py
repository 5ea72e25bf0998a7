"""What is known of a run and what was measured of it, and how: facts, samples, the log line.

Everything here is typed, and needs no torch to be read; `Measured.details` is the JSON of it, one
level deep.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from benchlog.config import RunConfig, repro
from benchlog.origin import git_commit, versions
from benchlog.record import Record
from cli import progress, say
from models.config import ModelConfig, from_fields
from run import environment
from run.environment import Environment

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kv_cache.base import KVCache
    from models.llama import Transformer
    from ops.attention import Choice
    from run.decoding import Decoder
    from run.plan import Plan

AGREEMENT = 0.05  # two warm-up samples whose seconds differ by less are steady
MAX_WARM_UPS = 5
FIRST_TOKENS = 3  # of the sample that compiles: a prompt and two decoding steps
QUIET_SECONDS = 2  # between two samples that are told, where there are many

Peak = dict[str, int]  # bytes by kind, as devices.peak_memory gives them; the log has the first


@dataclass(frozen=True)
class Generation:
    """New tokens (B, N), and the seconds that the prompt and the N - 1 later tokens took."""

    tokens: Tensor
    prefill_seconds: float
    decode_seconds: float


class Timed(Protocol):
    """The seconds of a sample."""

    @property
    def prefill_seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...


class OneSample(Protocol):
    """Takes a sample; its number is added to --seed."""

    def __call__(
        self,
        index: int,
        tokens: int | None = None,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation: ...


class Generates(Protocol):
    """What is measured: generate.Generator."""

    model: Transformer
    caches: list[KVCache]
    attention: Choice
    decoder: Decoder

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        start: int = 0,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation: ...


@dataclass(frozen=True)
class Device:
    """type: cpu, cuda, … name: of the processor. What is not known of a device is None."""

    type: str
    name: str
    threads: int | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a run before its first sample."""

    config: RunConfig
    model: str
    architecture: ModelConfig
    scheme: str
    kernel: str  # by which linear layers multiply, with the number of layers where they differ
    decoder: str  # how a decoding step is carried out: a name of run/decoding.py
    decoder_reason: str | None  # why that is not cpu-step
    attention_kernel: str  # that decodes over the KV cache: a name of ops/attention.py
    attention_reason: str | None  # why it is not the device's own
    prompt_tokens: int
    cache_size: int  # positions
    weight_bytes: int  # that a decoding step reads
    kv_cache: str  # dense, int8, …
    kv_cache_bytes: int
    device: Device
    environment: Environment
    versions: dict[str, str | None]  # None: not installed
    git_commit: str | None

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Facts:
        """What `as_json` made of them; further keys are passed over."""
        fields = {field.name: value[field.name] for field in dataclasses.fields(Facts)}
        architecture = fields["architecture"]
        return Facts(
            **fields
            | {
                "config": RunConfig(**fields["config"]),
                "architecture": from_fields(architecture, architecture["name"]),
                "device": Device(**fields["device"]),
                "environment": Environment(**fields["environment"]),
            }
        )


@dataclass(frozen=True)
class Ready:
    """What getting ready took. Seconds since the process started are None where nobody counts."""

    compile_seconds: float | None  # of the first sample; None if nothing is compiled
    warm_ups: list[float]  # seconds of each warm-up sample
    warm_up_steady: bool  # whether the last two agree
    first_token_s: float | None = None  # from the start of the process to the first token
    first_steps_s: float | None = None  # to the first FIRST_TOKENS


@dataclass(frozen=True)
class Sample:
    """Seconds and tokens per second of each row; batches multiply them."""

    prefill_seconds: float
    decode_seconds: float
    tok_s: float  # new tokens over all seconds, prefill included
    prefill_tok_s: float
    decode_tok_s: float | None  # None where only one token was asked for

    @staticmethod
    def of(timed: Timed, prompt_tokens: int, new_tokens: int) -> Sample:
        prefill, decode = timed.prefill_seconds, timed.decode_seconds
        return Sample(
            prefill_seconds=prefill,
            decode_seconds=decode,
            tok_s=new_tokens / (prefill + decode),
            prefill_tok_s=prompt_tokens / prefill,
            decode_tok_s=(new_tokens - 1) / decode if new_tokens > 1 else None,
        )


@dataclass(frozen=True)
class Summary:
    """The samples in a few figures: tok_s is their mean, the others are medians."""

    tok_s: float
    tok_s_all_rows: float
    prefill_tok_s: float | None
    decode_tok_s: float | None
    time_to_first_token_s: float | None
    weight_bytes_per_s: float

    @staticmethod
    def of(samples: Sequence[Sample], batch_size: int, weight_bytes: int) -> Summary:
        tok_s = statistics.fmean(sample.tok_s for sample in samples)
        return Summary(
            tok_s=tok_s,
            tok_s_all_rows=tok_s * batch_size,
            prefill_tok_s=_median([sample.prefill_tok_s for sample in samples]),
            decode_tok_s=_median([sample.decode_tok_s for sample in samples]),
            time_to_first_token_s=_median([sample.prefill_seconds for sample in samples]),
            weight_bytes_per_s=tok_s * weight_bytes,
        )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Peaks:
    """Peak memory of each phase."""

    load: Peak
    warm_up: Peak
    generate: Peak


@dataclass(frozen=True)
class Measured:
    """A run that is over. text: of the last sample's first row; None where it is random."""

    facts: Facts
    ready: Ready
    text: str | None
    peaks: Peaks
    samples: list[Sample]

    @property
    def summary(self) -> Summary:
        facts = self.facts
        return Summary.of(self.samples, facts.config.batch_size, facts.weight_bytes)

    def details(self) -> dict[str, object]:
        """For JSON."""
        return {
            **as_json(self.facts),
            **as_json(self.ready),
            "text": self.text,
            "peak_memory_bytes": dataclasses.asdict(self.peaks),
            **dataclasses.asdict(self.summary),
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }


def as_json(value: Facts | Ready) -> dict[str, object]:
    """`asdict`, without what is unknown of the device and of the time since the start."""
    fields = dataclasses.asdict(value)
    if "device" in fields:
        fields["device"] = {k: v for k, v in fields["device"].items() if v is not None}
    optional = ("first_token_s", "first_steps_s")
    return {k: v for k, v in fields.items() if k not in optional or v is not None}


def make_record(facts: Facts, tok_s: float, peak: Peak) -> Record:
    """The log line. tok_s: the mean over the samples. peak: while they were taken."""
    config = facts.config
    return Record(
        timestamp=time.strftime("%Y%m%d%H%M%S"),
        tok_s=tok_s,
        mem_s=tok_s * facts.weight_bytes / 1e9,
        peak_mem=next(iter(peak.values())) / 1e9,
        model_size=facts.weight_bytes / 1e9,
        quant="None" if facts.scheme == "none" else facts.scheme,
        mod=facts.model,
        kv_quant=facts.kv_cache != "dense",
        compile=config.compile,
        compile_prefill=config.compile_prefill,
        dtype=f"torch.{config.precision}",
        device=config.device,
        repro=repro(dataclasses.replace(config, save=None)),  # --save takes a new folder
    )


# ---------------------------------------------------------------------------------- how


def facts_of(plan: Plan, generator: Generates, kernels: str) -> Facts:
    """kernels: what the layers got, as run.loading.Loaded has it."""
    import devices

    caches, decoder, attention = generator.caches, generator.decoder, generator.attention
    return Facts(
        config=plan.config,
        model=plan.name,
        architecture=plan.architecture,
        scheme=str(plan.spec),
        kernel=kernels,
        decoder=decoder.name,
        decoder_reason=decoder.reason,
        attention_kernel=attention.name,
        attention_reason=attention.reason,
        prompt_tokens=len(plan.prompt),
        cache_size=plan.cache_size,
        weight_bytes=generator.model.weight_bytes(),
        kv_cache=caches[0].format,
        kv_cache_bytes=sum(cache.nbytes for cache in caches),
        device=Device(plan.device.type, **devices.describe(plan.device)),  # type: ignore[arg-type]
        environment=environment.in_force(),
        versions=versions(),
        git_commit=git_commit(),
    )


def sampler(plan: Plan, generator: Generates) -> OneSample:
    """A function that takes the sample of a number, of --max_new_tokens if not told otherwise."""
    import torch

    config = plan.config
    prompt = torch.tensor([plan.prompt] * config.batch_size, device=plan.device)

    def one_sample(
        index: int,
        tokens: int | None = None,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation:
        torch.manual_seed(config.seed + index)  # a seed reproduces a sample, however long we warm
        count = config.max_new_tokens if tokens is None else tokens
        return generator.generate(prompt, count, config.context_depth, after_token)

    return one_sample


def get_ready(
    config: RunConfig, device: torch.device, one_sample: OneSample, since: float | None = None
) -> Ready:
    """Compile and warm up. The peak memory counts from here on.

    since: time.perf_counter() when the process started, where that is to be told.
    """
    import devices

    devices.reset_peak_memory(device)
    compiling = config.compile or config.compile_prefill
    came: list[float] = []  # when each token did
    with progress("Compiling" if compiling else "First steps"):
        started = time.perf_counter()
        tokens = min(FIRST_TOKENS, config.max_new_tokens)
        one_sample(0, tokens, lambda: came.append(time.perf_counter()))
        first_seconds = time.perf_counter() - started
    if since is not None:
        line = f"From the start to the first token: {came[0] - since:.1f} s"
        if config.compile and tokens > 1:
            line += f"; to the first {tokens}, compilation included: {came[-1] - since:.1f} s"
        say(line)
    seconds, steady = warm_up(one_sample)
    return Ready(
        compile_seconds=first_seconds if compiling else None,
        warm_ups=seconds,
        warm_up_steady=steady,
        first_token_s=None if since is None else came[0] - since,
        first_steps_s=None if since is None else came[-1] - since,
    )


def warm_up(one_sample: Callable[[int], Timed]) -> tuple[list[float], bool]:
    """Sample until two in a row agree; their seconds, and whether two did.

    One warm-up is not enough: CUDA graphs are captured on the second call, and clocks, caches and
    page tables take their time.
    """
    seconds: list[float] = []
    steady = False
    with progress("Warming up"):
        while len(seconds) < MAX_WARM_UPS and not steady:
            sample = one_sample(len(seconds))
            seconds.append(sample.prefill_seconds + sample.decode_seconds)
            steady = len(seconds) > 1 and abs(seconds[-1] / seconds[-2] - 1) <= AGREEMENT
    count = len(seconds)
    if steady:
        say(f"Steady: warm-up samples {count - 1} and {count} agree within {AGREEMENT:.0%}")
    else:
        say(f"Not steady: no two in a row of {count} warm-up samples agree within {AGREEMENT:.0%}")
    return seconds, steady


def take(plan: Plan, one_sample: OneSample) -> tuple[list[Sample], list[int]]:
    """--num_samples samples, each told; and the new tokens of the last one's first row."""
    config, samples, told = plan.config, [], -math.inf
    tokens: list[int] = []
    for number in range(1, config.num_samples + 1):
        generation = one_sample(number - 1)
        tokens = generation.tokens[0].tolist()
        samples.append(Sample.of(generation, len(plan.prompt), len(tokens)))
        if config.num_samples <= 10 or time.monotonic() > told + QUIET_SECONDS:
            told = time.monotonic()
            say(f"Sample {number} of {config.num_samples}: {samples[-1].tok_s:.2f} tok/s")
    return samples, tokens
