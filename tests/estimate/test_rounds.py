"""How whole steps are timed while a machine is calibrated."""

from types import SimpleNamespace

import pytest
import torch

from quantbench.estimate.calibration import Speed
from quantbench.estimate.machine import SETTLING_STEPS, Rounds

WARM, COLD = 1e-3, 4e-3  # seconds of a step of the invented model


class Machine:
    """A generator, and the probe beside it, of a processor whose caches take SETTLING_STEPS steps
    to hold the model again after a reading of memory."""

    device = torch.device("cpu")
    caches = ()
    decoder = SimpleNamespace(name="cpu-step")
    cold = 0  # steps until the caches have settled

    def around(self, call):
        self.cold = SETTLING_STEPS
        return Speed(1.0, 1.0), call()

    def generate(self, token, new_tokens, start):
        seconds = 0.0
        for _ in range(new_tokens - 1):
            seconds += COLD if self.cold else WARM
            self.cold = max(0, self.cold - 1)
        return SimpleNamespace(decode_seconds=seconds, prefill_seconds=WARM)


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("depth", [0, 8192])
def test_steps_are_timed_when_caches_have_settled(batch, depth):
    machine = Machine()
    rounds = Rounds({"model": None}, "none", lambda *_: machine, machine)
    for _ in range(2):
        point = rounds.step("model", batch, depth)
        assert point.seconds == pytest.approx(WARM)
