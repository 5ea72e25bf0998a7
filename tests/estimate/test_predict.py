"""Estimates: of an invented machine, and of cards by their data sheets."""

import dataclasses
import random

import pytest
import torch

from quantbench.devices import prefill_chunk
from quantbench.estimate import cards
from quantbench.estimate.cards import Card, Efficiency, card
from quantbench.estimate.counting_models import count_model
from quantbench.estimate.datasheets import find
from quantbench.estimate.fits import what_fits_into
from quantbench.estimate.predict import LEFT_BEHIND, PROCESS, Machine, Phase, Request, predict
from quantbench.models.presets import preset

CONFIG = preset("TinyLlama-1.1B-Chat-v1.0")


class Whole(Card):
    """A card that reaches its data sheet, and whose calls take no time."""

    def efficiency(self, request):
        return Efficiency(1.0, 1.0, 0.1, "a card that reaches its peaks")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setattr(cards, "CALL_SECONDS", 0.0)


def whole(name):
    return Whole(**vars(card(name)))


class Invented(Machine):
    """A processor on which prompts take 2 s, and steps 0.1 s."""

    def phases(self, request):
        return Phase({"x": 2.0}, "a prompt", "here", 0.1), Phase({"y": 0.1}, "a step", "here", 0.1)


@pytest.fixture(scope="module")
def machine():
    return Invented("Invented", "here", torch.device("cpu"), None, None)


def test_a_run_is_a_prompt_and_its_steps(machine):
    """4 sequences and 11 new tokens, of which the prompt gives the first."""
    found = predict(Request(CONFIG, "int8wo", batch=4, prompt=512, new_tokens=11), machine)
    assert (found.prompt_seconds.value, found.token_seconds.value) == (2.0, 0.1)
    assert found.tokens_per_second.value == pytest.approx(44 / (2.0 + 10 * 0.1))
    low, high = found.token_seconds.low, found.token_seconds.high
    assert high / 0.1 == pytest.approx(0.1 / low) == pytest.approx(1.1788, rel=1e-3)
    assert found.tokens_per_second.bound == "a prompt" and found.token_seconds.source == "here"
    assert found.joules_per_token.value is None


def test_memory_is_weights_cache_activations_and_the_process(machine):
    found = predict(Request(CONFIG, batch=2, prompt=100, new_tokens=28), machine)
    memory = found.memory["prompt"]
    # 1.1 billion parameters of 2 bytes; 22 layers · 2 · 2 rows · 4 heads · 128 positions · 64 · 2 B
    assert memory.weights == 2 * CONFIG.parameters()
    assert memory.kv_cache == 22 * 2 * 2 * 4 * 128 * 64 * 2
    assert memory.workspace == PROCESS
    assert found.peak_memory_bytes.value == max(m.total for m in found.memory.values())


STEP = Request(CONFIG, prompt=16, new_tokens=8, precision="float16")


def test_a_card_at_its_bandwidth_and_at_its_peak():
    """A step of one row reads every weight once: at least bytes ÷ 768 GB/s, and little more. A
    prompt of 16 × 512 takes 2 operations a weight and position, at 154.8 Tflop/s."""
    found = predict(STEP, whole("A6000"))
    weights = 2 * (CONFIG.parameters() - CONFIG.vocab_size * CONFIG.dim)
    assert 1.0 <= found.token_seconds.value / (weights / 768e9) < 1.05
    assert found.token_seconds.bound == "memory's bandwidth"
    assert "not measured" in found.token_seconds.source
    found = predict(dataclasses.replace(STEP, batch=16, prompt=512), whole("A6000"))
    weights = CONFIG.parameters() - 2 * CONFIG.vocab_size * CONFIG.dim  # without both ends
    expected = 2 * weights * 16 * 512 / 154.8e12
    assert found.parts["prompt"]["linear"] == pytest.approx(expected, rel=0.01)


def test_energy_without_a_counter_is_an_upper_bound():
    """A card has 300 W, a processor 65 W, which its ranks share."""
    found = predict(STEP, whole("A6000"))
    seconds = found.prompt_seconds.value + 7 * found.token_seconds.value
    assert found.joules_per_token.value == pytest.approx(300 * seconds / 8)
    held = Invented("Invented", "here", torch.device("cpu"), 65.0, None)
    processor = predict(Request(CONFIG, prompt=128, new_tokens=11, tp=2), held)
    assert processor.joules_per_token.value == pytest.approx(65 * 3.0 / 11)
    for one in (found, processor):
        source = "no counter; power limit × time is an upper bound"
        assert one.joules_per_token.source == source


def test_two_devices_read_half_of_the_weights_each(machine):
    one, two = (predict(dataclasses.replace(STEP, tp=tp), whole("A6000")) for tp in (1, 2))
    assert two.memory["token"].weights == pytest.approx(one.memory["token"].weights / 2, rel=0.05)
    assert two.parts["token"]["links"] > 0
    assert 0.45 < two.token_seconds.value / one.token_seconds.value < 0.75
    # Both cards draw power.
    ratio = two.tokens_per_second.value / one.tokens_per_second.value
    assert two.joules_per_token.value == pytest.approx(2 * one.joules_per_token.value / ratio)
    # Ranks on a processor share its memory.
    one, two = (predict(Request(CONFIG, prompt=512, tp=tp), machine) for tp in (1, 2))
    assert two.memory["token"].weights == pytest.approx(one.memory["token"].weights, rel=0.01)


@pytest.mark.parametrize(("card", "cache", "tp"), [("cpu", "int8", 2), ("L4", "int4", 1)])
def test_what_fits_is_what_that_cache_takes(machine, card, cache, tp):
    """Counted once, over a dense cache: here 64 sequences, in one pass, two and more."""
    device = machine if card == "cpu" else whole(card)
    request = Request(CONFIG, "int8wo", cache, batch=64, new_tokens=0, tp=tp)
    chunk = prefill_chunk(device.device, 64)
    for low, high in ((2, chunk), (chunk + 1, 2 * chunk), (2 * chunk + 1, 12 * chunk)):
        positions = random.randint(low, high)
        memory = device.memory(dataclasses.replace(request, prompt=positions), "prompt").total
        (fit,) = what_fits_into(request, device, memory, ["int8wo"], [cache])
        assert fit.positions == positions


def test_a_window_that_fits_fits_for_ever(machine):
    """The cache keeps 600 positions of a window, whatever comes after."""
    config = dataclasses.replace(CONFIG, sliding_window=600)
    for gigabytes, all_of_it in ((2.9, True), (2.65, False)):
        (fit,) = what_fits_into(
            Request(config), machine, gigabytes * 1e9, ["none"], ["dense"], 2048
        )
        assert (fit.positions == 2048) == all_of_it and fit.positions
        assert fit.position == 22 * 2 * 4 * 64 * 2


@pytest.mark.parametrize(("prompt", "depth"), [(100, 0), (512, 700), (513, 0), (1500, 700)])
def test_the_memory_of_a_prompt_is_that_of_its_last_passes(machine, prompt, depth):
    found = machine.memory(Request(CONFIG, prompt=prompt, depth=depth, new_tokens=0), "prompt")
    count = count_model(Request(CONFIG), machine.device, prompt, depth)
    left = LEFT_BEHIND[prompt > 512]
    assert found.activations == (1 + left) * count.peak_activation_bytes
    assert found.kv_cache == count.kv_cache_bytes


@pytest.mark.parametrize(
    ("scheme", "numbers"),
    [("none", "bfloat16"), ("int8wo", "bfloat16"), ("int8dq", "int8"), ("bnb-int8", "int8"),
     ("float8dq-row", "float8"), ("float8wo", "bfloat16")],
)  # fmt: skip
def test_products_take_the_peak_of_the_numbers_that_are_multiplied(scheme, numbers):
    """A prompt of 2048 tokens: arithmetic bounds each product of a layer, not the one logit."""
    sheet = find("H100 SXM")
    config = dataclasses.replace(CONFIG, vocab_size=256)
    found = predict(Request(config, scheme, prompt=2048, new_tokens=0), whole("H100 SXM"))
    layers = config.parameters() - 2 * 256 * 2048 - 45 * 2048
    expected = 2 * layers * 2048 / sheet.peaks[numbers]
    assert found.parts["prompt"]["linear"] == pytest.approx(expected, rel=0.1)


def test_cards_are_taken_to_be_as_an_a5000():
    """Bytes go by the bandwidth. Products of a card that is made alike go by the power limit, 300 W
    for 230, of another one by the peak: the H100 has three times the peak for a watt."""
    own, alike, other = (
        card(name).efficiency(Request(CONFIG)) for name in ("A5000", "A6000", "H100 SXM")
    )
    assert own == cards.A5000 and alike.memory == other.memory == own.memory
    assert other.arithmetic == own.arithmetic
    assert alike.arithmetic == pytest.approx(own.arithmetic * (300 / 230) / (154.8 / 111.1))
    assert "power limits" in alike.source


def test_products_and_attention_take_the_time_of_a_call(monkeypatch):
    """22 layers of four products and attention each, and the output."""
    request = Request(CONFIG, prompt=16, new_tokens=8)
    before = predict(request, whole("L4")).token_seconds.value
    monkeypatch.setattr(cards, "CALL_SECONDS", 1e-5)
    more = predict(request, whole("L4")).token_seconds.value - before
    assert more == pytest.approx((22 * 5 + 1) * 1e-5)


@pytest.mark.parametrize("name", ["Meta-Llama-3-70B", "Mixtral-8x7B-v0.1"])
def test_eight_cards(name):
    """Two sums a layer, one of the embedding, the logits of an eighth of the vocabulary."""
    config, card = preset(name), whole("H100 SXM")
    found = predict(Request(config, prompt=64, new_tokens=8, tp=8), card)
    link, count = card.sheet.link_among(8), 2 * config.num_layers + 1
    links = count * link.ring_seconds("all_reduce", 2 * config.dim, 8)
    links += link.ring_seconds("all_gather", 2 * config.vocab_size // 8, 8)
    assert found.parts["token"]["links"] == pytest.approx(links)
    weights = found.memory["token"].weights
    assert weights == pytest.approx(2 * config.parameters() / 8, rel=0.02)
    read = 2 * config.parameters() - 2 * config.vocab_size * config.dim
    if config.mixture:  # six of eight experts are not read: w1, w3 and w2, of 2 bytes
        read -= 6 * config.num_layers * 3 * 2 * config.mixture.expert_dim * config.dim
    assert found.token_seconds.value > read / 8 / 3350e9
    assert found.token_seconds.value - links < 1.1 * read / 8 / 3350e9
