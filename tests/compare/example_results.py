"""Results of a comparison that never ran: arms of many kinds, drawn from a seeded generator.

The speeds, sizes and perplexities are invented, of a shape that real ones have.
"""

import dataclasses

import numpy as np

from quantbench.bench.answers import Reading
from quantbench.bench.store import (
    ArmResult,
    ArmSample,
    Bandwidth,
    Ended,
    Left,
    Results,
    Scored,
    Settings,
    Started,
    Store,
    Turn,
)
from quantbench.environment import Environment
from quantbench.log.options import parse
from quantbench.log.origin import Origin
from quantbench.models.config import ModelConfig
from quantbench.quality.types import LayerSqnr, NoQuality, Quality
from quantbench.run.facts import Device
from tests.bench.facts import arm_facts

HOSTILE = "</script><img src=x onerror=alert(1)>"
ARMS = (  # name, megabytes, speed-up, perplexity
    ("none", 2200, 1.0, 7.03),
    ("int8wo", 1240, 1.79, 7.03),
    ("int8dq", 1240, 1.83, 7.05),
    ("float8wo", 1240, 1.58, 7.06),
    ("fp6", 960, 2.21, 7.09),
    ("int4wo-32", 760, 2.62, 7.21),
    ("int4wo-128", 690, 2.91, 7.31),
    ("nf4", 700, 2.74, 7.24),
    ("uintx-4-64", 730, 2.66, 7.27),
    ("uintx-2-64", 430, 3.92, 39.1),
    ("sparse-marlin", 520, 3.31, 11.7),
    ("int4wo-128, kernel=reference", 690, 0.71, 7.31),
)
CYCLES, PROCESSES, STEPS = 24, 2, 33
BASELINE_STEP = 0.067  # seconds
CHECKPOINT = "checkpoints/TinyLlama/TinyLlama-1.1B-Chat-v1.0"
ARCHITECTURE = ModelConfig("example", 2048, 22, 32, 4, 64, 5632, 32000, 2048)
ENVIRONMENT = Environment(2, 1, 2, 700, "madvise", 10**9, {"OMP_NUM_THREADS": "2"})


def example_results(hostile=False, seed=3, folder=None, arms=ARMS) -> Results:
    """hostile: one arm that is named like an attack, and one that failed. folder: that keeps them,
    as a session's does."""
    generator = np.random.default_rng(seed)
    named = [*arms, (HOSTILE, 1250, 1.7, 7.04)] if hostile else arms
    planned = [ArmResult(name, " ".join(_argv(name)), _argv(name)) for name, *_ in named]
    planned += [ArmResult("mxfp4", "--quantization mxfp4", [])] * hostile
    about = Origin("quantbench ab --arms all", "2026-01-01", "0123abc", "Example CPU", {})
    store = Store(Results(Settings(), planned, "none", about), folder)
    for number, arm in enumerate(named):
        for event in _events(generator, number, *arm):
            store.add(event)
    if hostile:
        store.add(Left(len(named), "no kernel runs <here>", failed=True))
    for number, rate in enumerate((33.1, 34.0, 33.6)):
        store.add(Bandwidth("cpu", Reading(rate * 1e9, number, "a probe")))
    store.add(Ended("answered", 1.0))
    return store.results


def _argv(name):
    scheme, _, other = name.replace(HOSTILE, "int8wo").partition(", ")
    return ["--quantization", scheme] + ["--kernel", "reference"] * bool(other)


def _events(generator, number, name, megabytes, speed_up, perplexity):
    given = ["--checkpoint_path", CHECKPOINT, "--device", "cpu", "--compile"]
    config = parse([*_argv(name), *given, "--max_new_tokens", str(STEPS + 1)])
    fused = config.kernel == "auto"
    facts = arm_facts(
        config=config,
        model="TinyLlama-1.1B-Chat-v1.0",
        architecture=ARCHITECTURE,
        scheme=config.quantization,
        kernel="cpu" if fused else "reference",
        decoder="cpu-step" if fused else "modules",
        decoder_reason=None if fused else "kernel reference is not fused",
        weight_bytes=int(megabytes * 1e6),
        kv_cache_bytes=23_000_000,
        device=Device("cpu", "Example CPU @ 2.60GHz", threads=2),
        environment=ENVIRONMENT,
        versions={"torch": "2.13.0", "torchao": "0.18.0"},
        git_commit="0123abc",
    )
    for process in range(PROCESSES):
        yield Started(number, process, facts)
    yield Scored(number, _quality(name, perplexity))
    step = BASELINE_STEP / speed_up
    for cycle in range(CYCLES):
        process = cycle * PROCESSES // CYCLES
        seconds = 2 * step * generator.lognormal(0, 0.01)
        yield Turn(number, process, cycle, "decode", 2, seconds)
        if cycle % 2 == 0:
            seconds = 8 * step * generator.lognormal(0, 0.01)
            yield Turn(number, process, cycle, "prompt", 7, seconds)
    for process in range(PROCESSES):
        steps = step * generator.normal(1, 0.01, STEPS) * (1 + generator.pareto(9, STEPS) / 9)
        yield _sample(steps, 8 * step, number, process)


def _quality(name: str, perplexity: float) -> Quality | NoQuality:
    if name == HOSTILE:
        return NoQuality("the arm was named like an attack")
    full = Quality(tokens=2048, perplexity=perplexity, perplexity_standard_error=0.2)
    if name == "none":
        return full
    ratio, parts = perplexity / 7.03, ("wqkv", "w2") * 4
    layers = [
        LayerSqnr(f"layers.{place // 2}.{part}", None, 40 - place - np.log(perplexity))
        for place, part in enumerate(parts)
    ]
    return dataclasses.replace(
        full,
        perplexity_ratio=ratio,
        perplexity_ratio_interval=[ratio * 0.999, ratio * 1.001],
        kl=max(0.0, np.log(ratio)) + 0.0004,
        kl_standard_error=0.0002,
        kl_interval=[max(0.0, np.log(ratio)), max(0.0, np.log(ratio)) + 0.0008],
        top1=1 / (1 + np.log(perplexity / 7.0)),
        top5=0.99,
        layers=layers,
    )


def _sample(steps: np.ndarray, prefill: float, number: int, process: int) -> ArmSample:
    decode = float(steps.sum())
    return ArmSample(
        prefill_seconds=prefill,
        decode_seconds=decode,
        tok_s=(STEPS + 1) / (prefill + decode),
        prefill_tok_s=7 / prefill,
        decode_tok_s=STEPS / decode,
        token_seconds=[float(seconds) for seconds in steps],
        peak_memory_bytes={"resident": 3_000_000_000},
        arm=number,
        process=process,
    )
