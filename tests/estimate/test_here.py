"""Seconds from the first layers: on invented turns, and on a small model that really runs."""

import dataclasses
import random

import pytest
import torch

from quantbench.errors import MemoryShortage
from quantbench.estimate import here as module
from quantbench.estimate.answer import generator_of
from quantbench.estimate.here import Here, cut, depths, here, phase_along, timed
from quantbench.estimate.predict import Request, predict
from quantbench.models import build
from quantbench.models.config import Mixture, ModelConfig
from quantbench.run.facts import Generation
from tests.models.refused import refusal

MIB = 1 << 20
SMALL = ModelConfig("small", 64, 12, 4, 2, 16, 96, 256, 256)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module, "TURN_SECONDS", 0.0)
    monkeypatch.setattr("quantbench.devices.last_level_cache", lambda device: None)


@pytest.mark.parametrize(
    ("layer", "rest", "total", "cache", "expected"),
    [
        (88, 131, 22, 32, (2, 4)),  # TinyLlama in bfloat16, MB
        (7, 57, 30, 0, (6, 12)),  # the layers of SmolLM2-135M outweigh its embedding from 12 on
        (7, 57, 30, 64, (12, 24)),  # 128 MB are exceeded from 12 on
        (4, 28, 30, 64, (30,)),  # 24 layers do not exceed them: all are measured
        (88, 131, 4, 0, (4,)),
        (88, 131, 1, 0, (1,)),
    ],
)
def test_how_many_layers_stand_for_all(layer, rest, total, cache, expected):
    assert depths(layer + rest, 2 * layer + rest, total, cache) == expected


def test_a_line_through_turns_that_the_machine_slows():
    """A pass takes 5 ms and 2 ms a layer. States slow both turns of a cycle by up to 20 %, each
    turn scatters by 1 %, and one in ten is interrupted for twice its time."""
    draw = random  # seeded for each test

    def turn(layers, state):
        interrupted = 2.0 if draw.random() < 0.1 else 1.0
        return 1e-3 * (5 + 2 * layers) * state * draw.uniform(0.99, 1.01) * interrupted

    states = [draw.uniform(1.0, 1.02) for _ in range(60)]
    phase = phase_along((2, 4), [(turn(2, s), turn(4, s)) for s in states], 22)
    assert phase.seconds == pytest.approx(1e-3 * (5 + 2 * 22), rel=0.06)
    assert phase.parts["layers"] == pytest.approx(44e-3, rel=0.1)
    assert 0.03 <= phase.deviation < 0.08
    assert phase.source == "measured now on 2 and 4 of 22 layers, 60 turns each"


def test_noise_makes_no_run_faster_than_a_part_of_it():
    """Two layers were interrupted, four were not; and a model that was measured whole."""
    phase = phase_along((2, 4), ((0.9, 0.4), (0.8, 0.4), (0.9, 0.5)), 22)
    assert phase.seconds == 0.4 and min(phase.parts.values()) >= 0
    phase = phase_along((3,), ((0.3,), (0.1,), (0.2,)), 3)
    assert phase.seconds == 0.2 and phase.bound == "3 of 3 layers, measured"


def test_the_first_layers_are_those_of_the_model():
    """Their output is that of the whole model's second layer; the model is left as it was."""
    torch.manual_seed(0)
    model = build(SMALL)
    few, ids = cut(model, 2), torch.randint(256, (1, 5))
    outputs = []
    model.layers[1].register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    model.hidden(ids)
    assert torch.equal(few.hidden(ids), outputs[0])
    assert (few.config.num_layers, len(few.layers)) == (2, 2)
    assert (model.config.num_layers, len(model.layers)) == (12, 12)


class Recorded:
    """A Generator that takes a millisecond for each layer of its model, and one more."""

    def __init__(self, model, journal):
        self.model, self.journal = model, journal

    def generate(self, prompt, new_tokens, start=0):
        layers = len(self.model.layers)
        self.journal.append((layers, prompt.shape[1], new_tokens, start))
        seconds = 1e-3 * (layers + 1)
        return Generation(prompt, seconds * prompt.shape[1], seconds * (new_tokens - 1))


def test_turns_reverse_and_steps_are_in_the_middle(monkeypatch):
    monkeypatch.setattr(module, "TURN_SECONDS", 0.01)
    model, journal = build(SMALL), []
    request = Request(SMALL, prompt=16, new_tokens=32, depth=8)
    prompt, token = timed((2, 4), request, model, lambda few, _: Recorded(few, journal), 0.0)
    turns = [turn for turn in journal[5:] if turn[1] == 1]
    assert [layers for layers, *_ in turns] == [2, 4, 4, 2, 2, 4]
    # 3 ms a step of two layers: three steps after one that does not count, around position 40.
    assert {turn[2:] for turn in turns} == {(1 + 3, 8 + 16 + (32 - 3) // 2)}
    assert {turn[2:] for turn in journal if turn[1] == 16} == {(1, 8)}
    assert token.seconds == pytest.approx(13e-3)
    assert prompt.seconds == pytest.approx(16 * 13e-3)


@pytest.mark.parametrize("scheme", ["none", "int8wo"])
def test_a_request_is_measured_on_the_cpu(scheme, monkeypatch):
    request = Request(SMALL, scheme, batch=2, prompt=8, new_tokens=4, depth=3, precision="float32")
    machine = here(generator_of, "cpu")
    found = predict(request, machine)
    assert 0 < found.prompt_seconds.value < 60 and 0 < found.token_seconds.value < 60
    assert found.prompt_seconds.source == "measured now on 2 and 4 of 12 layers, 3 turns each"
    monkeypatch.setattr(Here, "_measure", None)
    assert predict(request, machine) == found  # the second time nothing is measured


def test_the_shortest_runs_and_experts_are_measured():
    mixture = dataclasses.replace(SMALL, mixture=Mixture(4, 2, 32), architecture="mixtral")
    for config, prompt, new in ((SMALL, 1, 0), (SMALL, 1, 1), (SMALL, 1, 2), (mixture, 4, 4)):
        request = Request(config, prompt=prompt, new_tokens=new, precision="float32")
        assert predict(request, here(generator_of, "cpu")).token_seconds.value > 0, request


def test_layers_that_do_not_fit_are_refused_in_a_line(monkeypatch):
    monkeypatch.setattr("quantbench.devices.free_memory", lambda device: MIB // 8)
    line = refusal(MemoryShortage, lambda: here(generator_of, "cpu").phases(Request(SMALL)))
    assert "out of memory: weights of " in line
