"""Estimates: of an invented machine (tests/estimate/invented.py), and of cards by their sheets."""

import dataclasses

import pytest
import torch
from quantbench.estimate.calibration import Power

from quantbench.compare.figures import estimating
from quantbench.errors import MemoryShortage, UsageError
from quantbench.estimate.counting import count_model
from quantbench.estimate.datasheets import find
from quantbench.estimate.exchanges import ring_seconds
from quantbench.estimate.fits import _longest, what_fits_into
from quantbench.estimate.predict import (
    Calibrated,
    Efficiency,
    FromDatasheet,
    Request,
    efficiency_of,
    memory_of,
    predict,
)
from quantbench.models.mixture import Mixture
from quantbench.models.presets import preset
from quantbench.text import size
from tests.estimate import invented

CONFIG = preset("TinyLlama-1.1B-Chat-v1.0")
WHOLE = Efficiency(1.0, 1.0, 0.0, "a card that reaches its datasheet")


@pytest.fixture(scope="module")
def machine():
    return Calibrated(invented.calibration())


def test_the_phases_of_a_calibrated_machine(machine):
    """4 sequences, a prompt of 512 in one pass, 11 new tokens: the law gives 10 steps, the middle
    one at position 517."""
    found = predict(Request(CONFIG, "int8wo", batch=4, prompt=512, new_tokens=11), machine)
    prompt = invented.whole(CONFIG, "int8wo", 4, 512, 0)
    token = invented.whole(CONFIG, "int8wo", 4, 1, 517)
    assert found.prompt_seconds.value == pytest.approx(prompt, rel=0.02)
    assert found.token_seconds.value == pytest.approx(token, rel=0.02)
    assert found.tokens_per_second.value == pytest.approx(44 / (prompt + 10 * token), rel=0.02)
    assert found.token_seconds.bound == "reading weights from memory"
    assert "calibration of Invented CPU, 2026-01-02" in found.token_seconds.source
    low, high = found.token_seconds.low, found.token_seconds.high
    assert low <= found.token_seconds.value <= high
    assert found.joules_per_token.value is None
    assert found.joules_per_token.source == (
        "no counter, and this device's power limit is not known"
    )


def test_memory_is_weights_cache_activations_and_the_process(machine):
    found = predict(Request(CONFIG, batch=2, prompt=100, new_tokens=28), machine)
    memory = found.memory["prompt"]
    # 1.1 billion parameters of 2 bytes; 22 layers · 2 · 2 rows · 4 heads · 128 positions · 64 · 2 B
    assert memory.weights == 2 * CONFIG.parameters()
    assert memory.kv_cache == 22 * 2 * 2 * 4 * 128 * 64 * 2
    assert memory.workspace == 400_000_000
    # Of 512 rows a pass, so that 2 · 257 positions take two: these leave twice as much behind.
    for prompt, left in ((256, 1), (257, 2)):
        of_prompt = predict(Request(CONFIG, batch=2, prompt=prompt), machine).memory["prompt"]
        alive = count_model(CONFIG, batch=2, tokens=prompt, chunk=256).peak_activation_bytes
        assert of_prompt.activations == (1 + left) * alive
    assert found.peak_memory_bytes.value == max(m.total for m in found.memory.values())


def test_a_card_at_its_bandwidth():
    """A step of one row reads every weight once: at least bytes ÷ 768 GB/s, and little more."""
    card = FromDatasheet(find("A6000"), WHOLE)
    found = predict(Request(CONFIG, prompt=16, new_tokens=8, precision="float16"), card)
    weights = 2 * (CONFIG.parameters() - CONFIG.vocab_size * CONFIG.dim)
    assert 1.0 <= found.token_seconds.value / (weights / 768e9) < 1.05
    assert found.token_seconds.bound == "memory's bandwidth"
    assert "not measured" in found.token_seconds.source


def test_a_card_at_its_peak():
    """A prompt of 16 × 512: 2 operations a weight and position, at 154.8 Tflop/s."""
    card = FromDatasheet(find("A6000"), WHOLE)
    found = predict(Request(CONFIG, batch=16, prompt=512, precision="float16"), card)
    weights = CONFIG.parameters() - 2 * CONFIG.vocab_size * CONFIG.dim  # without both ends
    assert found.parts["prompt"]["linear"] == pytest.approx(
        2 * weights * 16 * 512 / 154.8e12, rel=0.01
    )


def test_energy_without_a_counter_is_an_upper_bound():
    card = FromDatasheet(find("A6000"), WHOLE)
    request = Request(CONFIG, prompt=16, new_tokens=8, precision="float16")
    found = predict(request, card)
    seconds = found.prompt_seconds.value + 7 * found.token_seconds.value
    assert found.joules_per_token.value == pytest.approx(300 * seconds / 8)
    assert found.joules_per_token.source == "no counter; power limit × time is an upper bound"


def test_two_devices_read_half_of_the_weights_each():
    card = FromDatasheet(find("A6000"), WHOLE)
    request = Request(CONFIG, prompt=16, new_tokens=8, precision="float16")
    one, two = predict(request, card), predict(dataclasses.replace(request, tp=2), card)
    assert two.memory["token"].weights == pytest.approx(one.memory["token"].weights / 2, rel=0.01)
    assert two.parts["token"]["links"] > 0
    assert 0.45 < two.token_seconds.value / one.token_seconds.value < 0.75
    # Both cards draw power.
    ratio = two.tokens_per_second.value / one.tokens_per_second.value
    assert two.joules_per_token.value == pytest.approx(2 * one.joules_per_token.value / ratio)


def test_another_card_takes_the_efficiency_of_a_calibrated_relative():
    """The relative reads weights at 50 of 768 GB/s and multiplies at 0.4 of 154.8 Tflop/s."""
    relative = efficiency_of(invented.calibration(name="NVIDIA RTX A6000"), find("A6000"))
    assert relative.memory == pytest.approx(50 / 768, rel=0.01)
    assert relative.arithmetic == pytest.approx(0.4 / 154.8, rel=0.01)
    assert "NVIDIA RTX A6000, calibrated 2026-01-02" in relative.source


def test_what_fits_is_filled_to_the_brim(machine):
    """Everything and the positions are at most the memory; one more position is too many."""
    (one,) = what_fits_into(Request(CONFIG), machine, 4e9, ["int8wo"], ["int8"])
    fixed = one.weights + one.activations + machine.workspace
    assert fixed + one.positions * one.position <= 4e9 < fixed + (one.positions + 1) * one.position
    (none,) = what_fits_into(Request(CONFIG), machine, 1e9, ["none"], ["dense"])
    assert none.positions == 0


@pytest.mark.parametrize("gigabytes", [2.25, 2.3, 2.6, 8.0])
@pytest.mark.parametrize("card", ["cpu", "L4"])
def test_a_prompt_of_as_many_positions_fits(machine, card, gigabytes):
    """On a processor their passes have 512 tokens, on a card 2048."""
    device = machine if card == "cpu" else FromDatasheet(find(card), WHOLE)
    memory = gigabytes * 1e9 + device.workspace
    (one,) = what_fits_into(Request(CONFIG), device, memory, ["none"], ["dense"])
    assert one.positions > 1

    def taken(positions):
        run = Request(CONFIG, prompt=positions, new_tokens=0)
        return predict(run, device).peak_memory_bytes.value

    assert taken(one.positions) <= memory < taken(one.positions + 2)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_what_fits_of_each_cache_is_what_that_cache_takes(machine, cache, tp):
    """Counted once, over a dense cache: here 64 sequences, whose passes have 32 tokens each."""
    request = Request(CONFIG, "int8wo", cache, batch=64, new_tokens=0, tp=tp)
    for positions in (9, 50, 300):
        run = dataclasses.replace(request, prompt=positions)
        memory = machine.memory(run, "prompt").total
        (fit,) = what_fits_into(request, machine, memory, ["int8wo"], [cache])
        assert fit.positions == positions


@pytest.mark.parametrize(("bend", "jump", "at_most"), [(0, 0, 4), (40, 0, 12), (40, 500, 16)])
def test_the_longest_prompt_is_found(bend, jump, at_most):
    """Where what prompts take is a straight line, where it bends, and where it jumps."""
    counted = []

    def total(prompt):
        counted.append(prompt)
        bent = bend * max(0, prompt - 300) // 3
        return 1000 + 7 * prompt + bent + (jump if prompt > 700 else 0)

    for memory in (0, 1006, 1007, 2000, 3105, 3200, 6000, 11233, 11700, 12000, 10**6):
        fitting = [prompt for prompt in range(1, 1025) if total(prompt) <= memory]
        counted.clear()
        assert _longest(total, memory, 1024) == max(fitting, default=0)
        assert len(counted) <= at_most


def test_a_window_that_fits_fits_for_ever(machine):
    """The cache keeps 600 positions of a window, whatever comes after."""
    config = dataclasses.replace(CONFIG, sliding_window=600)
    for gigabytes, all_of_it in ((2.9, True), (2.65, False)):
        (fit,) = what_fits_into(
            Request(config), machine, gigabytes * 1e9, ["none"], ["dense"], 2048
        )
        assert (fit.positions == 2048) == all_of_it and fit.positions
        assert fit.position == 22 * 2 * 4 * 64 * 2


def test_no_more_positions_fit_than_the_model_has(machine):
    (one,) = what_fits_into(Request(CONFIG), machine, 64e9, ["none"], ["dense"], context=2048)
    assert one.positions == 2048


@pytest.mark.parametrize("prompt", [100, 512, 513, 1024, 1500])
@pytest.mark.parametrize("depth", [0, 700])
def test_the_memory_of_a_prompt_is_that_of_its_last_passes(machine, prompt, depth):
    request = Request(CONFIG, prompt=prompt, depth=depth, new_tokens=0)
    count = count_model(
        CONFIG, tokens=prompt, depth=depth, chunk=512, cache_size=depth + prompt
    )  # fmt: skip
    found = memory_of(request, machine, "prompt")
    assert found.activations == count.peak_activation_bytes
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
    found = predict(Request(config, scheme, prompt=2048, new_tokens=0), FromDatasheet(sheet, WHOLE))
    layers = config.parameters() - 2 * 256 * 2048 - 45 * 2048
    expected = 2 * layers * 2048 / sheet.peaks[numbers]
    assert found.parts["prompt"]["linear"] == pytest.approx(expected, rel=0.1)


def test_points_through_which_no_curve_goes_are_one_line():
    whole = invented.calibration()
    foreign = [dataclasses.replace(p, scheme="mxfp4") for p in whole.wholes]
    with pytest.raises(UsageError) as caught:
        Calibrated(dataclasses.replace(whole, wholes=[*whole.wholes, *foreign]))
    assert str(caught.value) == (
        "the calibration of Invented CPU, 2026-01-02: no estimate can be made of its points (max() "
        "arg is an empty sequence); calibrate again"
    )


def test_more_than_the_device_has_says_by_how_much():
    card = FromDatasheet(find("L4"), WHOLE)
    found = predict(Request(preset("Llama-2-13b-hf"), prompt=16, new_tokens=8), card)
    with pytest.raises(MemoryShortage) as caught:
        estimating.check_memory(found, card)
    line = str(caught.value)
    over = size(found.peak_memory_bytes.value - 24 * 2**30)
    assert f"{over} more than the 25.77 GB" in line and "\n" not in line


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(CONFIG, "fp6"), "fp6 was not calibrated; none, int8wo, int4wo-128 were"),
        (Request(CONFIG, kv_cache="int8"), "--kv_cache int8 was not calibrated; dense were"),
        (Request(CONFIG, precision="float32"), "the calibration is of bfloat16"),
        (Request(CONFIG, tp=3), "--tp 3: TinyLlama-1.1B-Chat-v1.0 has 32 query"),
    ],
    ids=["scheme", "cache", "precision", "tp"],
)
def test_what_was_not_calibrated_is_one_line(machine, request_, expected):
    with pytest.raises(UsageError) as caught:
        predict(request_, machine)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_calibration_of_a_processor_says_nothing_of_cards(tmp_path):
    path = str(tmp_path / "c.json")
    invented.calibration().save("--json", path)
    with pytest.raises(UsageError, match="it is of Invented CPU, which has no datasheet here"):
        estimating.machine_of("NVIDIA L4", path)


def test_another_machine_is_said_on_every_line(tmp_path):
    from quantbench.compare.output import estimate_tables

    path = str(tmp_path / "c.json")
    invented.calibration().save("--json", path)
    machine = estimating.machine_of("here", path)
    lines = estimate_tables.lines(predict(Request(CONFIG), machine))
    shown = [line for line in "\n".join(lines).splitlines() if line]
    fits = what_fits_into(Request(CONFIG), machine, 8e9, ["none"], ["dense", "int8"])
    fitting = estimate_tables.fitting(fits, 8e9, 1, CONFIG.max_position, machine.warnings)
    shown += fitting.splitlines()
    assert len(shown) > 12
    assert all("! calibrated with name Invented CPU, here" in line for line in shown)
    assert torch.get_num_threads()


@pytest.mark.parametrize("device", ["NVIDIA RTX A6000", "NVIDIA L4"])
def test_a_card_by_a_calibration_of_another_version_is_said_on_every_line(
    tmp_path, monkeypatch, device
):
    """The card that was calibrated, and another one that takes its efficiency."""
    from quantbench.compare.output import estimate_tables

    path, calibration = str(tmp_path / "c.json"), invented.calibration(name="NVIDIA RTX A6000")
    calibration.save("--json", path)
    monkeypatch.setattr(estimating, "versions", lambda: calibration.versions)
    assert estimating.machine_of(device, path).warnings == []
    monkeypatch.setattr(estimating, "versions", lambda: calibration.versions | {"torch": "9.9"})
    machine = estimating.machine_of(device, path)
    lines = estimate_tables.lines(predict(Request(CONFIG), machine))
    shown = [line for line in "\n".join(lines).splitlines() if line]
    assert len(shown) > 8
    assert all(line.endswith("! calibrated with torch 2.12.0, here 9.9") for line in shown)


def test_cards_are_taken_to_be_as_an_a5000():
    """Bytes go by the bandwidth. Products of a card that is made alike go by the power limit, 300 W
    for 230, of another one by the peak: the H100 has three times the peak for a watt."""

    def share(name):
        return estimating.machine_of(name, None).efficiency

    own = share("A5000")
    assert (own.arithmetic, own.memory) == (0.6682, 0.7135)
    alike, other = share("A6000"), share("H100 SXM")
    assert alike.memory == other.memory == own.memory
    assert alike.arithmetic == pytest.approx(0.6682 * (300 / 230) / (154.8 / 111.1))
    assert other.arithmetic == own.arithmetic
    assert "power limits" in alike.source and "power limits" not in other.source


# ----------------------------------------------------------------------- ranks, experts, energy


def test_two_ranks_on_a_processor_take_turns(machine):
    """Each has half of the matrices at half of the threads, so that products and attention take
    as long as one rank's; and in a step they exchange 2 sums a layer, one of the embedding, and
    the logits: 45 sums of 2048 numbers, a gather of 16000, 2 bytes each."""
    one = predict(Request(CONFIG, prompt=512, new_tokens=11), machine)
    two = predict(Request(CONFIG, prompt=512, new_tokens=11, tp=2), machine)
    sums = 45 * (invented.CALL + 4096 / invented.LINK)
    gather = invented.CALL + 32000 / invented.LINK
    assert two.parts["token"]["exchange"] == pytest.approx(sums + gather)
    expected = one.token_seconds.value + sums + gather
    assert two.token_seconds.value == pytest.approx(expected, rel=0.01)
    # A prompt's sums are of 512 positions: 2 MB each.
    sums = 45 * (invented.CALL + 512 * 4096 / invented.LINK)
    assert two.parts["prompt"]["exchange"] == pytest.approx(sums + gather)
    assert two.memory["token"].weights == pytest.approx(one.memory["token"].weights, rel=0.01)


MIXTURE = dataclasses.replace(
    CONFIG, name="eight", num_layers=4, mixture=Mixture(8, 2, 1024), architecture="mixtral"
)


def expert_bytes(config):
    return 2 * 3 * config.mixture.expert_dim * config.dim  # w1, w3 and w2, of 2 bytes


def test_a_step_of_one_sequence_reads_two_of_eight_experts(machine):
    """By the law: bytes ÷ 50 GB/s, 1.1 times that in a model; nothing is paid for calls."""
    parts = machine.machine.step(MIXTURE, "none", "dense", 1, 100)
    D, kv = MIXTURE.dim, 2 * MIXTURE.num_kv_heads * MIXTURE.head_dim
    attention = 2 * (D * (D + kv) + D * D)
    bytes_read = 4 * (attention + 2 * expert_bytes(MIXTURE)) + 2 * D * MIXTURE.vocab_size
    expected = invented.IN_PLACE * bytes_read / invented.MEMORY
    assert parts.products == pytest.approx(expected, rel=0.01)


def test_four_sequences_read_those_that_any_of_them_chooses(machine):
    """8 · (1 − 0.75⁴) = 5.47 experts of each layer on average."""
    assert MIXTURE.mixture.distinct(4) == pytest.approx(5.46875)
    one, four = (machine.machine.step(MIXTURE, "none", "dense", n, 100) for n in (1, 4))
    more = 4 * (5.46875 - 2) * expert_bytes(MIXTURE) * invented.IN_PLACE / invented.MEMORY
    assert four.products - one.products == pytest.approx(more, rel=0.02)


def test_a_prompt_reads_all_experts_each_with_its_tokens(machine):
    """512 tokens, two experts each: 128 rows for each of eight. Arithmetic is that of a dense
    model with two experts' width."""
    dense = dataclasses.replace(CONFIG, num_layers=4, ffn_dim=2048)
    mixed, plain = (
        machine.machine.prompt(config, "none", "dense", 1, 512) for config in (MIXTURE, dense)
    )
    assert mixed.products == pytest.approx(plain.products, rel=0.02)


@pytest.mark.parametrize("name", ["Meta-Llama-3-70B", "Mixtral-8x7B-v0.1"])
def test_eight_cards(name):
    """Two sums a layer, one of the embedding, the logits of an eighth of the vocabulary."""
    config, card = preset(name), FromDatasheet(find("H100 SXM"), WHOLE)
    found = predict(Request(config, prompt=64, new_tokens=8, tp=8), card)
    link, count = card.sheet.link_among(8), 2 * config.num_layers + 1
    links = count * ring_seconds("all_reduce", 2 * config.dim, 8, link)
    links += ring_seconds("all_gather", 2 * config.vocab_size // 8, 8, link)
    assert found.parts["token"]["links"] == pytest.approx(links)
    weights = found.memory["token"].weights
    assert weights == pytest.approx(2 * config.parameters() / 8, rel=0.02)
    read = 2 * config.parameters() - 2 * config.vocab_size * config.dim
    if config.mixture:
        read -= 6 * config.num_layers * expert_bytes(config)  # two of eight experts are read
    assert found.token_seconds.value > read / 8 / 3350e9
    assert found.token_seconds.value - links < 1.1 * read / 8 / 3350e9


def test_a_mixture_over_ranks_and_what_fits(machine):
    (fit,) = what_fits_into(Request(MIXTURE), machine, 4e9, ["int8wo"], ["dense"])
    # A byte for each weight, two for those of the embedding.
    weights = MIXTURE.parameters() + MIXTURE.vocab_size * MIXTURE.dim
    assert fit.weights == pytest.approx(weights, rel=0.01) and fit.positions > 0
    two = predict(Request(MIXTURE, tp=2), machine)
    assert two.parts["token"]["exchange"] > 0


def test_energy_by_what_was_counted_while_calibrating():
    """30 W in prompts and 20 W in steps; or at most the 65 W of the limit."""
    request = Request(CONFIG, prompt=128, new_tokens=11)
    counted = Power(65.0, "RAPL (package-0)", 30.0, 20.0)
    found = predict(request, Calibrated(invented.calibration(power=counted)))
    prompt, steps = found.prompt_seconds.value, 10 * found.token_seconds.value
    assert found.joules_per_token.value == pytest.approx((30 * prompt + 20 * steps) / 11)
    assert "RAPL (package-0) while calibrating" in found.joules_per_token.source
    found = predict(request, Calibrated(invented.calibration(power=Power(65.0, *[None] * 3))))
    assert found.joules_per_token.value == pytest.approx(65 * (prompt + steps) / 11)
    assert found.joules_per_token.source == "no counter; power limit × time is an upper bound"
