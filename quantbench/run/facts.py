"""What a run is (`Facts`), what was measured (`Measured`), and the log line.

Importing this module needs no torch. `Measured.to_json` is what --output_json_path writes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantbench.environment import Environment
from quantbench.log.config import RunConfig, repro
from quantbench.log.record import NO_COUNTER, Record
from quantbench.models.config import ModelConfig
from quantbench.run import machine
from quantbench.run.energy import Energy, NotCounted
from quantbench.run.expert_traffic import PhaseFigures, Phases, TwoTiers, total
from quantbench.run.machine import MachineUse, Trust, judge
from quantbench.typed_json import omitted, to_json

if TYPE_CHECKING:
    from torch import Tensor


ENOUGH_TOKENS = 256  # to say what share of drafted ones is accepted

Peak = dict[str, int]  # bytes by kind, as devices.peak_memory gives them; the first is logged
Peaks = dict[str, Peak]  # by phase: load, warm_up, generate


@dataclass(frozen=True)
class Speculation:
    """What drafted tokens (speculate.py) came to."""

    passes: int = 0  # of the model, but for prompts
    drafted: int = 0  # tokens
    accepted: int = 0  # of them

    @property
    def tokens_per_pass(self) -> float:
        return 1 + self.accepted / self.passes if self.passes else 1.0

    def since(self, earlier: Speculation) -> Speculation:
        parts = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
        return Speculation(*(now - then for now, then in parts))

    def sentence(self) -> str:
        """Tokens of a pass, and the share of the drafted ones that were accepted."""
        share = f"{self.accepted / self.drafted:.0%} of " if self.drafted else ""
        tokens = self.passes + self.accepted
        too_few = tokens < ENOUGH_TOKENS
        return (
            f"{self.tokens_per_pass:.2f} tokens per pass over {tokens} tokens; "
            f"{share}{self.drafted} drafted tokens were accepted"
            + f"; {ENOUGH_TOKENS} tokens or more say how often that is"
            * too_few
        )


@dataclass(frozen=True)
class Generation:
    """What one call of Generator.generate gave, and how long it took."""

    tokens: Tensor  # the new ones, (B, N) int64
    prefill_seconds: float  # for the prompt and the first new token
    decode_seconds: float  # for the other N - 1 tokens
    speculation: Speculation | None = None  # None: every token took a step


@dataclass(frozen=True)
class Device:
    type: str  # cpu, cuda, …
    name: str  # the processor's
    threads: int | None = omitted()  # torch's; None on an accelerator
    driver: str | None = omitted()  # its version, if the device has one


@dataclass(frozen=True)
class Parallel:
    """The ranks of a run, each of which has a part of the model."""

    ranks: int
    backend: str  # what they exchange numbers through: shared memory, gloo or nccl


@dataclass(frozen=True)
class Facts:
    """What is known of a run before its first sample."""

    config: RunConfig
    model: str  # its name in the log
    architecture: ModelConfig
    scheme: str
    kernel: str  # of the linear layers; with the number of layers for each, if they differ
    decoder: str  # how a decoding step is carried out: a name of run/decoding.py
    decoder_reason: str | None  # why that is not cpu-step
    attention_kernel: str  # of decode attention: a name of ops/attention.py
    attention_reason: str | None  # why it is not the device's own
    prompt_tokens: int  # of each row
    cache_size: int  # positions
    weight_bytes: int  # of all weights but the embedding's, of all ranks
    kv_cache: str  # dense, int8, …
    kv_cache_bytes: int  # of all layers, of all ranks
    device: Device
    environment: Environment
    versions: dict[str, str | None]  # None: not installed
    git_commit: str | None
    parallel: Parallel | None = omitted()  # None: one process has the whole model
    # Bytes of weights that a decoding step reads, of all ranks; of the experts of a mixture those
    # that are chosen. JSON of earlier versions lacks it, or has 0: then it is weight_bytes.
    step_weight_bytes: int = 0
    state_bytes: int = 0  # of kv_cache_bytes, those of layers whose memory does not grow
    # What torch.compile compiled, which --compile only asks for. JSON of earlier versions lacks it.
    compiled_step: bool = False
    compiled_prefill: bool = False
    experts: TwoTiers | None = omitted()  # None: all in one memory, or the model has no experts
    calibration_digest: str | None = omitted()  # of the text that the scheme was calibrated on
    given_up: str | None = omitted()  # the file's own quantization, where weights do not keep it

    def __post_init__(self) -> None:
        if not self.step_weight_bytes:
            object.__setattr__(self, "step_weight_bytes", self.weight_bytes)

    @property
    def mean_step_bytes(self) -> float:
        """Bytes that the mean decoding step has to read.

        The weights once, whatever the batch (of experts those that are chosen), states, and every
        row's keys and values so far. The first of N - 1 steps reads positions 0 to depth + prompt,
        the last N - 2 more: depth + prompt + N / 2 in the mean. The one row of the embedding's
        table that a token reads is left out.
        """
        positions = self.config.context_depth + self.prompt_tokens + self.config.max_new_tokens / 2
        each = (self.kv_cache_bytes - self.state_bytes) / self.cache_size
        return self.step_weight_bytes + self.state_bytes + each * positions

    @property
    def repro(self) -> str:
        """The command that repeats the run."""
        # --save takes a new folder.
        config = self.config.without(("save", "format"))
        return repro(config, said=self.given_up is not None)


@dataclass(frozen=True)
class WarmUp:
    """How long compilation and warm-up took."""

    compile_seconds: float | None  # of the first, compiling sample; None if nothing is compiled
    warm_ups: list[float]  # seconds of each warm-up sample
    warm_up_steady: bool  # whether the last two agree
    # Seconds from the start of the process to the first token and to the last of FIRST_TOKENS. None
    # in a process that does more than this run.
    first_token_s: float | None = omitted()
    first_steps_s: float | None = omitted()


@dataclass(frozen=True)
class Sample:
    """The speed of one sample. Rates count the tokens of one row."""

    prefill_seconds: float
    decode_seconds: float
    tok_s: float  # new tokens ÷ total seconds, prefill included
    prefill_tok_s: float  # prompt tokens ÷ prefill_seconds
    decode_tok_s: float | None  # new tokens but the first ÷ decode_seconds; None if there is one
    # Left out of the JSON of a sample that has no such figures.
    _: dataclasses.KW_ONLY
    machine: MachineUse | None = omitted()  # what used the cores meanwhile
    experts: Phases | None = omitted()  # what two tiers of experts did; None: there is one
    speculation: Speculation | None = omitted()  # None: every token took a step

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @staticmethod
    def of(
        prefill: float, decode: float, prompt_tokens: int, new_tokens: int, **also: Any
    ) -> Sample:
        """prefill, decode: seconds. Tokens are those of one row. also: the other fields."""
        return Sample(
            prefill,
            decode,
            tok_s=new_tokens / (prefill + decode),
            prefill_tok_s=prompt_tokens / prefill,
            decode_tok_s=(new_tokens - 1) / decode if new_tokens > 1 else None,
            **also,
        )


@dataclass(frozen=True)
class Summary:
    """The samples in a few figures."""

    tok_s: float  # mean; tokens of one row
    tok_s_all_rows: float  # mean; tokens of all rows
    prefill_tok_s: float  # median
    decode_tok_s: float | None  # median; None where a sample has one new token
    time_to_first_token_s: float  # median of prefill_seconds
    weight_bytes_per_s: float  # tok_s · weight_bytes, as in the log
    tokens_per_pass: float | None = omitted()  # with speculation, mean

    @staticmethod
    def of(samples: Sequence[Sample], batch_size: int, weight_bytes: int) -> Summary:
        tok_s = statistics.fmean(sample.tok_s for sample in samples)
        steps = [sample.decode_tok_s for sample in samples if sample.decode_tok_s is not None]
        drafts = speculation_of(samples)
        return Summary(
            tok_s=tok_s,
            tok_s_all_rows=tok_s * batch_size,
            prefill_tok_s=statistics.median(sample.prefill_tok_s for sample in samples),
            decode_tok_s=statistics.median(steps) if steps else None,
            time_to_first_token_s=statistics.median(sample.prefill_seconds for sample in samples),
            weight_bytes_per_s=tok_s * weight_bytes,
            tokens_per_pass=drafts.tokens_per_pass if drafts else None,
        )


def speculation_of(samples: Sequence[Sample]) -> Speculation | None:
    """What all samples' drafts came to; None without speculation."""
    parts = [dataclasses.astuple(s.speculation) for s in samples if s.speculation]
    return Speculation(*map(sum, zip(*parts, strict=True))) if parts else None


@dataclass(frozen=True)
class Measured:
    facts: Facts
    ready: WarmUp
    text: str | None  # of the last sample's first row; None if it is random
    peaks: Peaks
    samples: list[Sample]
    load_average: float | None = None  # over the minute before the last sample's end
    # Why each of the scheme's kernels cannot run, where one cannot.
    kernels: dict[str, str | None] = dataclasses.field(default_factory=dict)
    energy: Energy | NotCounted = NotCounted(NO_COUNTER)  # of one sample, all rows
    bandwidth: float | None = None  # bytes per second of memory, where it can limit a step

    @property
    def limit_share(self) -> float | None:
        """Seconds that memory needs for a step's bytes ÷ measured."""
        step = self.summary.decode_tok_s
        if self.bandwidth is None or step is None:
            return None
        return self.facts.mean_step_bytes / self.bandwidth * step

    @property
    def trust(self) -> Trust:
        """Whether the samples' mean can be trusted."""
        uses = [sample.machine for sample in self.samples if sample.machine]
        on_cpu = self.facts.device.type == "cpu"
        return judge(
            [sample.tok_s for sample in self.samples],
            machine.together(uses),
            self.facts.environment.threads if on_cpu else 1,
            self.load_average,
        )

    @property
    def summary(self) -> Summary:
        facts = self.facts
        return Summary.of(self.samples, facts.config.batch_size, facts.weight_bytes)

    @property
    def expert_phases(self) -> dict[str, PhaseFigures]:
        """What two tiers of experts did for all samples: "prompts" and "steps"; or nothing."""
        facts, known = self.facts, [(s, s.experts) for s in self.samples if s.experts]
        if facts.experts is None or not known:
            return {}
        layers, steps = len(facts.experts.by_layer), facts.config.max_new_tokens - 1
        prompts = total([phases.prompt for _, phases in known])
        decode = total([phases.decode for _, phases in known])
        prefill = sum(s.prefill_seconds for s, _ in known)
        steps_seconds = sum(s.decode_seconds for s, _ in known)
        return {
            "prompts": PhaseFigures.of(prompts, prefill, len(known), layers),
            "steps": PhaseFigures.of(decode, steps_seconds, len(known) * steps, layers),
        }

    def to_json(self) -> dict[str, object]:
        """What --output_json_path writes, but for the log line and the reasons."""
        phases = {f"expert_{name}": to_json(p) for name, p in self.expert_phases.items()}
        return {
            **to_json(self.facts),
            **to_json(self.ready),
            "text": self.text,
            "peak_memory_bytes": self.peaks,
            **to_json(self.summary),
            **to_json(self.trust),
            "joules_per_token": self.joules_per_token,
            "energy": to_json(self.energy),
            "limit_share": self.limit_share,
            **phases,
            "samples": to_json(self.samples),
        }

    @property
    def joules_per_token(self) -> float | None:
        """For each new token, without the idle machine's; None where nothing counts them."""
        if isinstance(self.energy, NotCounted):
            return None
        config = self.facts.config
        return self.energy.joules / (config.batch_size * config.max_new_tokens)


def make_record(facts: Facts, tok_s: float, peak: Peak) -> Record:
    """The log line. tok_s: mean over the samples. peak: peak memory while they were taken."""
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
        compile=facts.compiled_step,
        compile_prefill=facts.compiled_prefill,
        dtype=f"torch.{config.precision}",
        device=config.device,
        repro=facts.repro,
    )
