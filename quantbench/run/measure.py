"""How a run is measured: compiled, warmed up, sampled. run/facts.py has the types of what results.

one_sample = Sampler(plan, generator)
ready = get_ready(one_sample)                   # compiles, and warms up
measured = measure(one_sample, loaded, ready)   # takes the samples
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from quantbench import devices, environment
from quantbench.errors import QuantbenchError
from quantbench.log.origin import git_commit, versions
from quantbench.models.llama import Transformer, step_bytes, weight_bytes
from quantbench.progress import progress, say
from quantbench.quantize.registry import available
from quantbench.run import energy, machine
from quantbench.run.bandwidth import BYTES, BandwidthProbe
from quantbench.run.expert_traffic import Phases, Traffic
from quantbench.run.facts import Device, Facts, Measured, Parallel, Peak, Sample, WarmUp

if TYPE_CHECKING:
    from quantbench.experts.layer import TieredLayer
    from quantbench.experts.tiers import Tiers
    from quantbench.generate import Generator
    from quantbench.run.loading import Loaded
    from quantbench.run.plan import Plan

AGREEMENT = 0.05  # largest relative difference in seconds of two warm-up samples that agree
MAX_WARM_UPS = 5  # samples; more, up to MAX_SHORT_WARM_UPS, until they took WARM_UP_SECONDS
MAX_SHORT_WARM_UPS, WARM_UP_SECONDS = 30, 0.5
WARM_UP_TOKENS = 24  # new tokens of a warm-up sample, at most
FIRST_TOKENS = 3  # new tokens of the sample that compiles: a prompt and two decoding steps
QUIET_SECONDS = 2  # least time between two lines of progress, for more than ten samples


def measure(one_sample: Sampler, loaded: Loaded, ready: WarmUp) -> Measured:
    """Take samples, their energy and peak memory; write the traces that the options name."""
    plan, generator = one_sample.plan, one_sample.generator
    device, scheme = plan.device, plan.spec.scheme
    warm_up_peak = devices.peak_memory(device)
    check_logits(plan, generator)
    devices.reset_peak_memory(device)
    counter = energy.meter(device, plan.ranks)
    samples, tokens = take(one_sample)
    joules = counter.energy(plan.config.num_samples, lambda: one_sample(0))
    load_average = machine.load_average()
    phases = {"load": loaded.peak_memory, "warm_up": warm_up_peak}
    phases["generate"] = devices.peak_memory(device)
    peaks = {phase: of_all_ranks(plan, peak) for phase, peak in phases.items()}
    if plan.config.profile or plan.config.memory_profile:
        from quantbench.run.tracing import trace

        trace(plan, lambda: one_sample(0))
    facts = facts_of(plan, generator, loaded.kernels)
    return Measured(
        facts,
        ready,
        readable(plan, tokens),
        peaks,
        samples,
        load_average,
        available(scheme, device, plan.precision) if scheme else {},
        joules,
        read_bandwidth(facts),
    )


def read_bandwidth(facts: Facts) -> float | None:
    """Bytes per second of the memory that a step reads, in 0.2 s; None where it is not what limits
    a step, or too little is free to read it."""
    config, device = facts.config, torch.device(facts.device.type)
    if facts.parallel or facts.experts or config.speculate != type(config).speculate:
        return None
    if facts.step_weight_bytes < (devices.last_level_cache(device) or 0):
        return None
    free = devices.free_memory(device)
    if free is not None and free < 2 * BYTES:
        return None
    probe = BandwidthProbe(device)
    return None if probe.caveat else probe.measure()


def check_logits(plan: Plan, generator: Generator) -> None:
    """Raise QuantbenchError where the prompt, which a sample has read, is not followed by finite
    logits: the speed of such a model would be taken for that of one that works."""
    config = plan.config
    last = torch.tensor([plan.prompt[-1:]] * config.batch_size, device=plan.device)
    position = torch.tensor([config.context_depth + len(plan.prompt) - 1], device=plan.device)
    with torch.no_grad():
        logits = generator.decoder.step(last, position)
    if not logits.isfinite().all():
        raise QuantbenchError(
            f"{plan.name} as {plan.spec} in {config.precision} gives logits that are not finite: "
            "try another --precision or --quantization; if none helps, the checkpoint is damaged"
        )


def readable(plan: Plan, tokens: list[int]) -> str | None:
    """The prompt and its continuation, up to the end token; None if either is random."""
    config = plan.config
    if config.prefill_size or config.context_depth or config.checkpoint_path.startswith("dummy:"):
        return None
    eos = plan.tokenizer.eos_ids
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    if not end and plan.ranks.rank == 0:
        say(
            f"{plan.name} ended its text at once. Models made for chat often do so without their "
            "chat template: --interactive uses it"
        )
    return plan.tokenizer.decode([*plan.prompt, *tokens[:end]])


def facts_of(plan: Plan, generator: Generator, kernels: str) -> Facts:
    """The facts of a planned run with its Generator. kernels: as in run.loading.Loaded."""
    tiers = tiers_of(generator.model)
    held = (
        weight_bytes(generator.model),
        step_bytes(generator.model, plan.config.batch_size),
        sum(memory.nbytes for memory in generator.caches),
        sum(memory.nbytes for memory in generator.states),
    )
    weights, step_weights, kept, states = map(int, plan.ranks.total(held, plan.device))
    parallel = None
    if plan.split:
        through = "shared memory" if plan.ranks.memory else torch.distributed.get_backend()
        parallel = Parallel(plan.ranks.size, through)
    decoder, attention = generator.decoder, generator.attention
    return Facts(
        config=plan.config,
        model=plan.name,
        architecture=plan.architecture,
        scheme=plan.spec.name,
        calibration_digest=_calibration_digest(plan),
        given_up=plan.checkpoint.given_up,
        kernel=kernels,
        decoder=decoder.name,
        decoder_reason=decoder.reason,
        attention_kernel=attention.name,
        attention_reason=attention.reason,
        prompt_tokens=len(plan.prompt),
        cache_size=plan.cache_size,
        weight_bytes=weights,
        kv_cache=plan.kv_cache,
        kv_cache_bytes=kept,
        state_bytes=states,
        device=Device(plan.device.type, **devices.describe(plan.device)),  # type: ignore[arg-type]
        environment=environment.in_force(),
        versions=versions(),
        git_commit=git_commit(),
        parallel=parallel,
        step_weight_bytes=step_weights,
        compiled_step=generator.compiled_step,
        compiled_prefill=generator.compiled_prefill,
        experts=tiers.record(plan.config) if tiers else None,
    )


def tiers_of(model: Transformer) -> Tiers | None:
    """The tiers of a model's experts; None if all are in one memory."""
    if model.config.mixture is None:
        return None
    from quantbench.models.mixtral import elsewhere_of

    layer = elsewhere_of(model)
    return None if layer is None else cast("TieredLayer", layer).store


def _calibration_digest(plan: Plan) -> str | None:
    """The beginning of the calibration text's SHA-256; None if the run calibrated nothing."""
    if not plan.spec.calibrated or plan.checkpoint.saved:
        return None
    from quantbench.run.calibration import TEXT  # few schemes are calibrated

    text = Path(plan.config.calibration_text or TEXT).read_bytes()
    return hashlib.sha256(text).hexdigest()[:12]


def of_all_ranks(plan: Plan, peak: Peak) -> Peak:
    """The sum of all ranks' peaks, by kind. They need not have been at one moment."""
    totals = plan.ranks.total(list(peak.values()), plan.device)
    return dict(zip(peak, map(int, totals), strict=True))


class Sampler:
    """Takes samples of a planned run: the prompt of every row, and the new tokens behind it."""

    def __init__(self, plan: Plan, generator: Generator) -> None:
        self.plan, self.generator = plan, generator
        self.prompt = torch.tensor([plan.prompt] * plan.config.batch_size, device=plan.device)
        self.tiers = tiers_of(generator.model)

    def __call__(
        self,
        index: int,
        tokens: int | None = None,
        after_token: Callable[[], object] = lambda: None,
    ) -> tuple[torch.Tensor, Sample]:
        """Sample number `index`, drawn with the seed --seed + index: its new tokens (B, N), and its
        speed. tokens: N; --max_new_tokens if not given."""
        plan, config, tiers = self.plan, self.plan.config, self.tiers
        torch.manual_seed(config.seed + index)  # a sample does not depend on the warm-up's length
        new_tokens = config.max_new_tokens if tokens is None else tokens
        counts = [tiers.counted()] if tiers else []  # at the start, after the prompt, at the end

        def count_and_call() -> None:
            if tiers and len(counts) == 1:
                counts.append(tiers.counted())
            after_token()

        before = machine.Counters.read()
        generation = self.generator.generate(
            self.prompt, new_tokens, config.context_depth, count_and_call
        )
        use = machine.Counters.read().since(before)
        counts += [tiers.counted()] if tiers else []
        # All ranks take rank 0's seconds, so that they agree when they are warm.
        seconds = generation.prefill_seconds, generation.decode_seconds
        prefill, decode = plan.ranks.first(seconds, plan.device)
        (cores,) = plan.ranks.total([use.own_cores], plan.device)
        return generation.tokens, Sample.of(
            prefill,
            decode,
            len(plan.prompt),
            new_tokens,
            machine=use.of_processes(cores),
            experts=Phases(*map(Traffic.since, counts[1:], counts)) if counts else None,
            speculation=generation.speculation,
        )


def get_ready(one_sample: Sampler, since: float | None = None) -> WarmUp:
    """Reset the peak memory, compile and warm up.

    since: time.perf_counter() when the process started; if given, the time to the first token is
    printed and returned.
    """
    config, compiles = one_sample.plan.config, one_sample.generator.compiles
    devices.reset_peak_memory(one_sample.plan.device)
    arrivals: list[float] = []  # time.perf_counter() after each token
    with progress("Compiling" if compiles else "First steps"):
        started = time.perf_counter()
        tokens = min(FIRST_TOKENS, config.max_new_tokens)
        one_sample(0, tokens, lambda: arrivals.append(time.perf_counter()))
        first_seconds = time.perf_counter() - started
    if since is not None:
        line = f"From the start to the first token: {arrivals[0] - since:.1f} s"
        if compiles and tokens > 1:
            line += f"; to token {tokens}, compilation included: {arrivals[-1] - since:.1f} s"
        say(line)
    tokens = min(WARM_UP_TOKENS, config.max_new_tokens)
    seconds, steady = warm_up(lambda index: one_sample(index, tokens)[1].seconds)
    return WarmUp(
        compile_seconds=first_seconds if compiles else None,
        warm_ups=seconds,
        warm_up_steady=steady,
        first_token_s=None if since is None else arrivals[0] - since,
        first_steps_s=None if since is None else arrivals[-1] - since,
    )


def warm_up(one_sample: Callable[[int], float]) -> tuple[list[float], bool]:
    """Take samples until two in a row agree, or MAX_WARM_UPS of them that took WARM_UP_SECONDS.

    one_sample: takes sample number `index`, and returns its seconds.
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
            seconds.append(one_sample(len(seconds)))
            steady = len(seconds) > 1 and abs(seconds[-1] / seconds[-2] - 1) <= AGREEMENT
    count = len(seconds)
    if steady:
        say(f"Warm: samples {count - 1} and {count} of the warm-up agree within {AGREEMENT:.0%}")
    else:
        say(f"Not warm: of {count} warm-up samples no two in a row agree within {AGREEMENT:.0%}")
    return seconds, steady


def take(one_sample: Sampler) -> tuple[list[Sample], list[int]]:
    """Take --num_samples samples and print each one's speed.

    Returns them, and the new tokens of the last sample's first row.
    """
    config, samples, last_line = one_sample.plan.config, [], -math.inf
    tokens: list[int] = []
    for number in range(1, config.num_samples + 1):
        new, sample = one_sample(number - 1)
        tokens = new[0].tolist()
        samples.append(sample)
        if config.num_samples <= 10 or time.monotonic() > last_line + QUIET_SECONDS:
            last_line = time.monotonic()
            say(f"Sample {number} of {config.num_samples}: {sample.tok_s:.2f} tok/s")
    return samples, tokens
