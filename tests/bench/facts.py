"""Facts of an arm that was never loaded, for tests of what is computed from them."""

import dataclasses

from quantbench.bench.answers import ArmFacts
from quantbench.environment import Environment
from quantbench.log.config import RunConfig
from quantbench.models.config import ModelConfig
from quantbench.run.facts import Device, Facts, WarmUp

FACTS = Facts(
    config=RunConfig(device="cpu"),
    model="fake",
    architecture=ModelConfig("fake", 64, 2, 4, 4, 16, 128, 256, 512),
    scheme="int8wo",
    kernel="cpu",
    decoder="cpu-step",
    decoder_reason=None,
    attention_kernel="cpu",
    attention_reason=None,
    prompt_tokens=7,
    cache_size=100,
    weight_bytes=10_000_000,
    kv_cache="dense",
    kv_cache_bytes=1000,
    device=Device("cpu", "fake"),
    environment=Environment(1, 1, 1, 700, None, None, {}),
    versions={"torch": "0", "triton": None},
    git_commit=None,
)
PEAKS = {"load": {"resident": 1}, "warm_up": {"resident": 2}}


def arm_facts(kernels=None, **changes):
    """Facts as above but for `changes`; kernels: why each cannot run."""
    run = dataclasses.replace(FACTS, **{"step_weight_bytes": 0, **changes})
    return ArmFacts(
        device=run.config.device,
        weight_bytes=run.weight_bytes,
        peak_memory_bytes=PEAKS,
        ready=WarmUp(None, [1.0, 1.0], True),
        run=run,
        kernels=kernels or {"cpu": None},
    )


def peer_facts(weight_bytes):
    return ArmFacts(
        device="cpu", weight_bytes=weight_bytes, ready=WarmUp(None, [1.0, 1.0], True),
        peak_memory_bytes={"warm_up": {"resident": 1}}, about="a fake",
    )  # fmt: skip
