"""What a device draws while it reads prompts and while it decodes: part of `calibrate`.

    measured(settings, make_generator)          # Power: its limit, and watts where a counter is

Joules of a run are then these watts × its seconds. Without a counter, power limit × time is an
upper bound of them.
"""

import time
from collections.abc import Callable

import torch

from quantbench.estimate.calibration import Power
from quantbench.estimate.calibration_models import MODELS
from quantbench.estimate.machine import MakeGenerator, random_model
from quantbench.estimate.probe import Settings
from quantbench.ops.ranks import ALONE
from quantbench.run import energy
from quantbench.run.energy import Meter, NotCounted

AT_LEAST = 1.0  # seconds of each phase
PROMPT, STEPS = 512, 32  # positions of a prompt, and steps that are run at once


@torch.no_grad()
def measured(settings: Settings, make_generator: MakeGenerator) -> Power | None:
    """The limit, and the power of prompts and steps; None where neither is known."""
    device = settings.device
    limit = energy.power_limit(device.type, energy.cards(device, ranks=1))
    meter = Meter.find(device, ALONE)
    if isinstance(meter, NotCounted):
        return None if limit is None else Power(limit, None, None, None)
    model, _ = random_model(MODELS["wide"], settings.schemes[0], settings)
    generator = make_generator(model, 1, PROMPT + STEPS, "dense")
    prompt = torch.zeros(1, PROMPT, dtype=torch.long, device=device)

    def watts(run: Callable[[], object]) -> float | None:
        run()
        used = meter.energy(_for_a_second(run))
        return None if isinstance(used, NotCounted) else used.joules / used.seconds

    return Power(
        limit,
        meter.counter.name,
        watts(lambda: generator.generate(prompt, 1)),
        watts(lambda: generator.generate(prompt[:, :1], STEPS)),
    )


def _for_a_second(run: Callable[[], object]) -> Callable[[], int]:
    """A function that runs it for AT_LEAST seconds, and returns how often."""

    def runs() -> int:
        ends, count = time.perf_counter() + AT_LEAST, 0
        while not count or time.perf_counter() < ends:
            run()
            count += 1
        return count

    return runs
