"""What a run is (`Facts`), what was measured (`Measured`), how it is measured, and the log line.

Importing this module needs no torch. `Measured.details` is what --output_json_path writes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchlog.config import RunConfig, repro
from benchlog.origin import git_commit, versions
from benchlog.record import Record
from cli import progress, say
from experts.traffic import PhaseFigures, Phases, TwoTiers, total
from models.config import ModelConfig, from_fields
from run import energy, environment, machine
from run.energy import NO_COUNTER, Energy
from run.environment import Environment
from run.generation import Generates, Generation, OneSample, Timed
from run.machine import MachineUse
from run.trust import Trust, judge
from typed_json import OMITTED, to_json

if TYPE_CHECKING:
    import torch

    from run.plan import Plan

AGREEMENT = 0.05  # largest relative difference in seconds of two warm-up samples that agree
MAX_WARM_UPS = 5  # samples; more, up to MAX_SHORT_WARM_UPS, until they took WARM_UP_SECONDS
MAX_SHORT_WARM_UPS, WARM_UP_SECONDS = 30, 0.5
WARM_UP_TOKENS = 24  # new tokens of a warm-up sample, at most
FIRST_TOKENS = 3  # new tokens of the sample that compiles: a prompt and two decoding steps
QUIET_SECONDS = 2  # least time between two lines of progress, for more than ten samples

Peak = dict[str, int]  # bytes by kind, as devices.peak_memory gives them; the first is logged


@dataclass(frozen=True)
class Device:
    """The device of a run."""

    type: str  # cpu, cuda, …
    name: str  # the processor's
    threads: int | None = None  # torch's; None on an accelerator
    driver: str | None = None  # its version; None where there is none


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
    parallel: Parallel | None = None  # None: one process has the whole model
    # Bytes of weights that a decoding step reads, of all ranks; of the experts of a mixture those
    # that are chosen. JSON of earlier versions lacks it, or has 0: then it is weight_bytes.
    step_weight_bytes: int = 0
    experts: TwoTiers | None = None  # None: they lie in one memory, or there are none

    def __post_init__(self) -> None:
        if not self.step_weight_bytes:
            object.__setattr__(self, "step_weight_bytes", self.weight_bytes)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Facts:
        """The facts that `as_json` wrote. Further keys are ignored; a missing one is a KeyError."""
        names = {field.name for field in dataclasses.fields(Facts)}
        optional = {"parallel", "step_weight_bytes", "experts"}
        fields = {name: value[name] for name in names - optional}
        parallel, experts = value.get("parallel"), value.get("experts")
        architecture = fields["architecture"]
        return Facts(
            **fields
            | {
                "config": RunConfig(**fields["config"]),
                "architecture": from_fields(architecture, architecture["name"]),
                "device": Device(**fields["device"]),
                "environment": Environment(**fields["environment"]),
                "parallel": Parallel(**parallel) if parallel else None,
                "step_weight_bytes": value.get("step_weight_bytes", 0),
                "experts": TwoTiers(**experts) if experts else None,
            }
        )


@dataclass(frozen=True)
class Ready:
    """How long compilation and warm-up took."""

    compile_seconds: float | None  # of the first, compiling sample; None if nothing is compiled
    warm_ups: list[float]  # seconds of each warm-up sample
    warm_up_steady: bool  # whether the last two agree
    # Seconds from the start of the process to the first token and to the last of FIRST_TOKENS. None
    # in a process that does more than this run.
    first_token_s: float | None = None
    first_steps_s: float | None = None


@dataclass(frozen=True)
class Sample:
    """The speed of one sample. Rates count the tokens of one row."""

    prefill_seconds: float
    decode_seconds: float
    tok_s: float  # new tokens ÷ total seconds, prefill included
    prefill_tok_s: float  # prompt tokens ÷ prefill_seconds
    decode_tok_s: float | None  # new tokens but the first ÷ decode_seconds; None if there is one
    # What used the cores meanwhile. Left out of the JSON of a sample that has no such figures.
    machine: MachineUse | None = dataclasses.field(
        default=None, kw_only=True, metadata={OMITTED: True}
    )
    experts: Phases | None = dataclasses.field(default=None, kw_only=True, metadata={OMITTED: True})

    @staticmethod
    def of(
        timed: Timed,
        prompt_tokens: int,
        new_tokens: int,
        machine: MachineUse | None = None,
        experts: Phases | None = None,
    ) -> Sample:
        prefill, decode = timed.prefill_seconds, timed.decode_seconds
        return Sample(
            prefill_seconds=prefill,
            decode_seconds=decode,
            tok_s=new_tokens / (prefill + decode),
            prefill_tok_s=prompt_tokens / prefill,
            decode_tok_s=(new_tokens - 1) / decode if new_tokens > 1 else None,
            machine=machine,
            experts=experts,
        )


@dataclass(frozen=True)
class Summary:
    """The samples in a few figures. Medians are None if no sample has the figure."""

    tok_s: float  # mean; tokens of one row
    tok_s_all_rows: float  # mean; tokens of all rows
    prefill_tok_s: float | None  # median
    decode_tok_s: float | None  # median
    time_to_first_token_s: float | None  # median of prefill_seconds
    weight_bytes_per_s: float  # tok_s · bytes of weights that a step reads

    @staticmethod
    def of(samples: Sequence[Sample], batch_size: int, step_weight_bytes: int) -> Summary:
        tok_s = statistics.fmean(sample.tok_s for sample in samples)
        return Summary(
            tok_s=tok_s,
            tok_s_all_rows=tok_s * batch_size,
            prefill_tok_s=_median([sample.prefill_tok_s for sample in samples]),
            decode_tok_s=_median([sample.decode_tok_s for sample in samples]),
            time_to_first_token_s=_median([sample.prefill_seconds for sample in samples]),
            weight_bytes_per_s=tok_s * step_weight_bytes,
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
    """The result of a run."""

    facts: Facts
    ready: Ready
    text: str | None  # of the last sample's first row; None if it is random
    peaks: Peaks
    samples: list[Sample]
    load_average: float | None = None  # over the minute before the last sample's end
    # Why each of the scheme's kernels cannot run, where one cannot.
    kernels: dict[str, str | None] = dataclasses.field(default_factory=dict)
    energy: Energy | str = NO_COUNTER  # of one sample, all rows; or why it is not known

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
        return Summary.of(self.samples, facts.config.batch_size, facts.step_weight_bytes)

    @property
    def expert_phases(self) -> dict[str, PhaseFigures]:
        """What two tiers of experts did for all samples: "prompts" and "steps"; or nothing."""
        facts, known = self.facts, [(s, s.experts) for s in self.samples if s.experts]
        if facts.experts is None or not known:
            return {}
        layers, steps = len(facts.experts.by_layer), facts.config.max_new_tokens - 1
        prompts = total([phases.prompt for _, phases in known])
        decode = total([phases.decode for _, phases in known])
        return {
            "prompts": PhaseFigures.of(
                prompts, sum(s.prefill_seconds for s, _ in known), len(known), layers
            ),
            "steps": PhaseFigures.of(
                decode, sum(s.decode_seconds for s, _ in known), len(known) * steps, layers
            ),
        }

    def details(self) -> dict[str, object]:
        """The JSON object that --output_json_path writes."""
        phases = {f"expert_{name}": to_json(p) for name, p in self.expert_phases.items()}
        return {
            **as_json(self.facts),
            **as_json(self.ready),
            "text": self.text,
            "peak_memory_bytes": dataclasses.asdict(self.peaks),
            **dataclasses.asdict(self.summary),
            **dataclasses.asdict(self.trust),
            **self.joules(),
            **phases,
            "samples": to_json(self.samples),
        }

    def joules(self) -> dict[str, object]:
        """Joules for each new token, without the idle machine's; None where nothing counts them."""
        if isinstance(self.energy, str):
            return {"joules_per_token": None, "energy": {"why_not": self.energy}}
        config = self.facts.config
        tokens = config.batch_size * config.max_new_tokens
        return {"joules_per_token": self.energy.joules / tokens, "energy": vars(self.energy)}


def as_json(value: Facts | Ready) -> dict[str, object]:
    """`asdict`, without those fields of the device and of the start-up time that are None."""
    fields = dataclasses.asdict(value)
    if "device" in fields:
        fields["device"] = {k: v for k, v in fields["device"].items() if v is not None}
    optional = ("first_token_s", "first_steps_s", "parallel", "experts")
    return {k: v for k, v in fields.items() if k not in optional or v is not None}


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
        compile=config.compile,
        compile_prefill=config.compile_prefill,
        dtype=f"torch.{config.precision}",
        device=config.device,
        repro=repro(dataclasses.replace(config, save=None)),  # --save takes a new folder
    )


# ---------------------------------------------------------------------------------- how


def facts_of(plan: Plan, generator: Generates, kernels: str) -> Facts:
    """The facts of a planned run with its Generator. kernels: as in run.loading.Loaded."""
    import devices
    from experts.watch import two_tiers

    held = (
        generator.model.weight_bytes(),
        generator.model.step_bytes(plan.config.batch_size),
        sum(cache.nbytes for cache in generator.caches),
    )
    weight_bytes, step_weight_bytes, kv_cache_bytes = map(int, plan.ranks.total(held, plan.device))
    parallel = None
    if plan.split:
        from run.parallel import backend

        parallel = Parallel(plan.ranks.size, backend(plan.ranks))
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
        weight_bytes=weight_bytes,
        kv_cache=caches[0].format,
        kv_cache_bytes=kv_cache_bytes,
        device=Device(plan.device.type, **devices.describe(plan.device)),  # type: ignore[arg-type]
        environment=environment.in_force(),
        versions=versions(),
        git_commit=git_commit(),
        parallel=parallel,
        step_weight_bytes=step_weight_bytes,
        experts=two_tiers(generator.model, plan.config.expert_policy, plan.config.expert_placement),
    )


def of_all_ranks(plan: Plan, peak: Peak) -> Peak:
    """The sum of all ranks' peaks, by kind. They need not have been at one moment."""
    totals = plan.ranks.total(list(peak.values()), plan.device)
    return dict(zip(peak, map(int, totals), strict=True))


def sampler(plan: Plan, generator: Generates) -> OneSample:
    """A function that takes one sample, of --max_new_tokens tokens if not given another number."""
    import torch

    from experts.tiers import tiers_of
    from experts.watch import Watch

    config = plan.config
    prompt = torch.tensor([plan.prompt] * config.batch_size, device=plan.device)
    tiers = tiers_of(generator.model)

    def one_sample(
        index: int,
        tokens: int | None = None,
        after_token: Callable[[], object] = lambda: None,
    ) -> Generation:
        torch.manual_seed(config.seed + index)  # a sample does not depend on the warm-up's length
        count = config.max_new_tokens if tokens is None else tokens
        watch, before = Watch(tiers), machine.Counters.read()
        generation = generator.generate(
            prompt, count, config.context_depth, watch.first(after_token)
        )
        use = machine.Counters.read().since(before)
        # All ranks take rank 0's seconds, so that they agree when they are warm.
        own_seconds = generation.prefill_seconds, generation.decode_seconds
        prefill_seconds, decode_seconds = plan.ranks.first(own_seconds, plan.device)
        (own,) = plan.ranks.total([use.own_cores], plan.device)
        use = use.of_processes(own)
        seconds = prefill_seconds, decode_seconds
        return Generation(generation.tokens, *seconds, use, watch.phases())

    return one_sample


def get_ready(
    config: RunConfig, device: torch.device, one_sample: OneSample, since: float | None = None
) -> Ready:
    """Reset the peak memory, compile and warm up.

    since: time.perf_counter() when the process started; if given, the time to the first token is
    printed and returned.
    """
    import devices

    devices.reset_peak_memory(device)
    compiling = config.compile or config.compile_prefill
    arrivals: list[float] = []  # time.perf_counter() after each token
    with progress("Compiling" if compiling else "First steps"):
        started = time.perf_counter()
        tokens = min(FIRST_TOKENS, config.max_new_tokens)
        one_sample(0, tokens, lambda: arrivals.append(time.perf_counter()))
        first_seconds = time.perf_counter() - started
    if since is not None:
        line = f"From the start to the first token: {arrivals[0] - since:.1f} s"
        if config.compile and tokens > 1:
            line += f"; to token {tokens}, compilation included: {arrivals[-1] - since:.1f} s"
        say(line)
    tokens = min(WARM_UP_TOKENS, config.max_new_tokens)
    seconds, steady = warm_up(lambda index: one_sample(index, tokens))
    return Ready(
        compile_seconds=first_seconds if compiling else None,
        warm_ups=seconds,
        warm_up_steady=steady,
        first_token_s=None if since is None else arrivals[0] - since,
        first_steps_s=None if since is None else arrivals[-1] - since,
    )


def warm_up(one_sample: Callable[[int], Timed]) -> tuple[list[float], bool]:
    """Take samples until two in a row agree, or MAX_WARM_UPS of them that took WARM_UP_SECONDS.

    Returns the seconds of each sample, and whether the last two agree. One warm-up sample is not
    enough: CUDA graphs are captured on the second call, and the processor's clock, the caches and
    the page tables need time to settle.
    """
    seconds: list[float] = []
    steady = False
    with progress("Warming up"):
        while not steady and len(seconds) < MAX_SHORT_WARM_UPS:
            if len(seconds) >= MAX_WARM_UPS and sum(seconds) >= WARM_UP_SECONDS:
                break
            sample = one_sample(len(seconds))
            seconds.append(sample.prefill_seconds + sample.decode_seconds)
            steady = len(seconds) > 1 and abs(seconds[-1] / seconds[-2] - 1) <= AGREEMENT
    count = len(seconds)
    if steady:
        say(f"Warm: samples {count - 1} and {count} of the warm-up agree within {AGREEMENT:.0%}")
    else:
        say(f"Not warm: of {count} warm-up samples no two in a row agree within {AGREEMENT:.0%}")
    return seconds, steady


def metered(plan: Plan, one_sample: OneSample) -> tuple[list[Sample], list[int], Energy | str]:
    """`take`, and the energy of a sample; or why it is not known. Samples that a coarse counter
    needs further are not among those returned."""
    taken: list[tuple[list[Sample], list[int]]] = []

    def runs() -> int:
        if taken:
            one_sample(0)
            return 1
        taken.append(take(plan, one_sample))
        return plan.config.num_samples

    try:
        counter = energy.find(plan.device.type, range(plan.ranks.size))
    except energy.NoCounter as error:
        return (*take(plan, one_sample), f"{NO_COUNTER} ({error})")
    alone = plan.ranks.size == 1  # or ranks would not agree how often to repeat
    found = energy.measure(counter, runs, most=energy.MOST_SECONDS if alone else 0)
    return (*taken[0], found)


def take(plan: Plan, one_sample: OneSample) -> tuple[list[Sample], list[int]]:
    """Take --num_samples samples and print each one's speed.

    Returns them, and the new tokens of the last sample's first row.
    """
    config, samples, last_line = plan.config, [], -math.inf
    tokens: list[int] = []
    for number in range(1, config.num_samples + 1):
        generation = one_sample(number - 1)
        tokens = generation.tokens[0].tolist()
        took = generation.machine, generation.experts
        samples.append(Sample.of(generation, len(plan.prompt), len(tokens), *took))
        if config.num_samples <= 10 or time.monotonic() > last_line + QUIET_SECONDS:
            last_line = time.monotonic()
            say(f"Sample {number} of {config.num_samples}: {samples[-1].tok_s:.2f} tok/s")
    return samples, tokens
