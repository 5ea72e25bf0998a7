"""When a measurement is repeated: the machine changed meanwhile, or other processes used it."""

import itertools

import pytest
import torch

from quantbench.estimate import probe
from quantbench.estimate.calibration import Speed
from quantbench.run.machine import MachineUse


class Readings(probe.Probe):
    """Gives these readings of memory, in turn, instead of measuring."""

    def __init__(self, *reads):
        self.device = torch.device("cpu")
        self.reads = itertools.cycle(reads)
        self.patience = probe.PATIENCE

    def reading(self):
        return Speed(next(self.reads), 1e12)

    recent = reading


@pytest.fixture
def disturbances(monkeypatch):
    """Cores that other processes use during each call, in turn."""
    cores = []

    class Counters:
        read = staticmethod(lambda: Counters())

        def since(self, before):
            return MachineUse(0.2, 2, 1.9, cores.pop(0) if cores else 0.0, 0.0, 0)

    monkeypatch.setattr(probe, "Counters", Counters)
    monkeypatch.setattr(probe, "wait_for_others", lambda patience: min(patience, 25.0))
    return cores


def test_a_quiet_call_is_timed_once(disturbances):
    speed, seconds = Readings(40e9, 44e9).around(iter([0.2, 0.3]).__next__)
    assert seconds == 0.2
    assert speed.read == pytest.approx((40e9 * 44e9) ** 0.5)  # the geometric mean


def test_a_call_that_others_disturbed_is_repeated(disturbances):
    disturbances += [1.0, 0.5, None]  # cores, of which None says nothing
    assert Readings(40e9).around(iter([0.4, 0.3, 0.2, 0.1]).__next__)[1] == 0.2


def test_the_kernels_rounding_is_no_disturbance(disturbances):
    """20 ms of 0.2 s: two ticks of 10 ms."""
    disturbances += [0.1]
    assert Readings(40e9).around(iter([0.2, 0.3]).__next__)[1] == 0.2


def test_a_call_during_which_the_machine_changed_is_repeated(disturbances):
    """40 and 60 GB/s before and after the first call; then 60 and 60."""
    assert Readings(40e9, 60e9, 60e9, 60e9).around(iter([0.2, 0.3, 0.4]).__next__)[1] == 0.3


def test_a_long_call_is_a_mean_over_changes(disturbances):
    assert Readings(40e9, 60e9).around(iter([2.0, 0.3]).__next__)[1] == 2.0


def test_a_machine_that_is_never_quiet_is_measured_all_the_same(disturbances):
    disturbances += [2.0] * 100
    calls = itertools.count(1.0)
    assert Readings(40e9).around(lambda: next(calls))[1] == probe.TRIES


def test_patience_ends(disturbances):
    """Each wait takes 25 s: after the third, 60 s have passed, and what is measured counts."""
    disturbances += [2.0] * 100
    readings, calls = Readings(40e9), itertools.count(1.0)
    assert readings.around(lambda: next(calls))[1] == 4.0
    assert readings.around(lambda: next(calls))[1] == 5.0
