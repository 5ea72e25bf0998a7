"""Estimates: of an invented machine, and of cards by their data sheets."""

import dataclasses
import json

import pytest
import torch

from quantbench.compare.figures import estimating
from quantbench.errors import MemoryShortage, UsageError
from quantbench.estimate import efficiency, machines
from quantbench.estimate.counting import count_model
from quantbench.estimate.datasheets import find
from quantbench.estimate.efficiency import Efficiency
from quantbench.estimate.exchanges import ring_seconds
from quantbench.estimate.fits import _longest, what_fits_into
from quantbench.estimate.machines import Speed
from quantbench.estimate.predict import LEFT_BEHIND, PROCESS, Request, predict
from quantbench.models.mixture import Mixture
from quantbench.models.presets import preset
from quantbench.quantize.spec import SHOWN
from quantbench.text import size
from tests.estimate import fit_efficiency

CONFIG = preset("TinyLlama-1.1B-Chat-v1.0")
CPU = torch.device("cpu")
SPEED = Speed(50e9, 400e9)
WHOLE = Efficiency(1.0, 1.0, 0.1, "a machine that reaches its peaks")


def whole(card):
    """A card that reaches its data sheet."""
    return dataclasses.replace(machines.card(card), efficiency=lambda scheme: WHOLE)


@pytest.fixture(scope="module")
def machine():
    """A processor that reads 50 GB/s and multiplies 400 Gflop/s, whatever the scheme."""
    here = machines.here(CPU, speed=SPEED)
    return dataclasses.replace(here, efficiency=lambda scheme: WHOLE, power=None)


def test_a_processor_reads_and_multiplies_one_after_the_other(machine):
    """4 sequences, a prompt of 512 in passes of 128, 11 new tokens: the middle step is at 517."""
    found = predict(Request(CONFIG, "int8wo", batch=4, prompt=512, new_tokens=11), machine)
    for phase, count in (
        ("prompt", count_model(CONFIG, "int8wo", batch=4, tokens=512, chunk=128)),
        ("token", count_model(CONFIG, "int8wo", batch=4, tokens=1, depth=517)),
    ):
        expected = count.bytes / SPEED.read + count.flops / SPEED.multiply
        assert sum(found.parts[phase].values()) == pytest.approx(expected)
    prompt, token = found.prompt_seconds.value, found.token_seconds.value
    assert found.tokens_per_second.value == pytest.approx(44 / (prompt + 10 * token))
    low, high = found.token_seconds.low, found.token_seconds.high
    assert high / token == pytest.approx(token / low) == pytest.approx(1.1788, rel=1e-3)
    assert found.prompt_seconds.bound == "arithmetic"
    assert "measured now: memory 50.0 GB/s" in found.token_seconds.source
    assert "assumed: 100% of the bandwidth" in found.token_seconds.source
    assert found.joules_per_token.value is None


def test_memory_is_weights_cache_activations_and_the_process(machine):
    found = predict(Request(CONFIG, batch=2, prompt=100, new_tokens=28), machine)
    memory = found.memory["prompt"]
    # 1.1 billion parameters of 2 bytes; 22 layers · 2 · 2 rows · 4 heads · 128 positions · 64 · 2 B
    assert memory.weights == 2 * CONFIG.parameters()
    assert memory.kv_cache == 22 * 2 * 2 * 4 * 128 * 64 * 2
    assert memory.workspace == PROCESS
    # Of 512 rows a pass, so that 2 · 257 positions take two: these leave twice as much behind.
    for prompt, left in ((256, 1), (257, 2)):
        of_prompt = predict(Request(CONFIG, batch=2, prompt=prompt), machine).memory["prompt"]
        alive = count_model(CONFIG, batch=2, tokens=prompt, chunk=256).peak_activation_bytes
        assert of_prompt.activations == (1 + left) * alive
    assert found.peak_memory_bytes.value == max(m.total for m in found.memory.values())


def test_a_card_at_its_bandwidth():
    """A step of one row reads every weight once: at least bytes ÷ 768 GB/s, and little more."""
    card = whole("A6000")
    found = predict(Request(CONFIG, prompt=16, new_tokens=8, precision="float16"), card)
    weights = 2 * (CONFIG.parameters() - CONFIG.vocab_size * CONFIG.dim)
    assert 1.0 <= found.token_seconds.value / (weights / 768e9) < 1.05
    assert found.token_seconds.bound == "memory's bandwidth"
    assert "not measured" in found.token_seconds.source


def test_a_card_at_its_peak():
    """A prompt of 16 × 512: 2 operations a weight and position, at 154.8 Tflop/s."""
    card = whole("A6000")
    found = predict(Request(CONFIG, batch=16, prompt=512, precision="float16"), card)
    weights = CONFIG.parameters() - 2 * CONFIG.vocab_size * CONFIG.dim  # without both ends
    assert found.parts["prompt"]["linear"] == pytest.approx(
        2 * weights * 16 * 512 / 154.8e12, rel=0.01
    )


def test_energy_without_a_counter_is_an_upper_bound():
    card = whole("A6000")
    request = Request(CONFIG, prompt=16, new_tokens=8, precision="float16")
    found = predict(request, card)
    seconds = found.prompt_seconds.value + 7 * found.token_seconds.value
    assert found.joules_per_token.value == pytest.approx(300 * seconds / 8)
    assert found.joules_per_token.source == "no counter; power limit × time is an upper bound"


def test_two_devices_read_half_of_the_weights_each():
    card = whole("A6000")
    request = Request(CONFIG, prompt=16, new_tokens=8, precision="float16")
    one, two = predict(request, card), predict(dataclasses.replace(request, tp=2), card)
    assert two.memory["token"].weights == pytest.approx(one.memory["token"].weights / 2, rel=0.05)
    assert two.parts["token"]["links"] > 0
    assert 0.45 < two.token_seconds.value / one.token_seconds.value < 0.75
    # Both cards draw power.
    ratio = two.tokens_per_second.value / one.tokens_per_second.value
    assert two.joules_per_token.value == pytest.approx(2 * one.joules_per_token.value / ratio)


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
    device = machine if card == "cpu" else whole(card)
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
    found = machine.memory(request, "prompt")
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


def test_more_than_the_device_has_says_by_how_much():
    card = whole("L4")
    found = predict(Request(preset("Llama-2-13b-hf"), prompt=16, new_tokens=8), card)
    with pytest.raises(MemoryShortage) as caught:
        estimating.check_memory(found, card)
    line = str(caught.value)
    over = size(found.peak_memory_bytes.value - 24 * 2**30)
    assert f"{over} more than the 25.77 GB" in line and "\n" not in line


def test_what_cannot_be_split_is_one_line(machine):
    with pytest.raises(UsageError) as caught:
        predict(Request(CONFIG, tp=3), machine)
    assert "--tp 3: TinyLlama-1.1B-Chat-v1.0 has 32 query" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cards_are_taken_to_be_as_an_a5000():
    """Bytes go by the bandwidth. Products of a card that is made alike go by the power limit, 300 W
    for 230, of another one by the peak: the H100 has three times the peak for a watt."""

    def share(name):
        return machines.card(name).efficiency("none")

    own = share("A5000")
    assert (own.arithmetic, own.memory) == (0.6682, 0.7135)
    alike, other = share("A6000"), share("H100 SXM")
    assert alike.memory == other.memory == own.memory
    assert alike.arithmetic == pytest.approx(0.6682 * (300 / 230) / (154.8 / 111.1))
    assert other.arithmetic == own.arithmetic
    assert "power limits" in alike.source and "power limits" not in other.source


# ------------------------------------------------------------------------- shares of the peaks


def recorded():
    return [json.loads(path.read_text())["cases"] for path in fit_efficiency.FILES]


def test_the_shares_of_a_processor_are_those_that_its_cases_fit():
    shares = fit_efficiency.by_scheme(sum(recorded(), []))
    for name, (memory, arithmetic) in efficiency.FITTED.items():
        (own,) = (pair for scheme, pair in shares.items() if scheme.startswith(name))
        assert tuple(own) == pytest.approx((memory, arithmetic), abs=0.006)


def test_the_interval_is_that_of_a_machine_whose_cases_were_not_fitted():
    """Nine in ten of the 244 cases lie in it, by the shares of the other machine; as many as 1.645
    deviations promise of a normal distribution, to 5 %."""
    cases = sum(recorded(), [])
    assert fit_efficiency.deviation(cases) == pytest.approx(efficiency.ANOTHER_MACHINE, abs=0.01)
    ends = 1.645 * efficiency.ANOTHER_MACHINE
    inside = [
        abs(torch.tensor(case["estimated_seconds"] / case["measured_seconds"]).log()) <= ends
        for case in cases
    ]
    assert sum(inside) / len(cases) > 0.85


@pytest.mark.parametrize("scheme", SHOWN)
def test_every_scheme_has_its_own_shares(scheme):
    found = efficiency.of_cpu(scheme)
    assert 0.3 < found.memory < 1.1 and 0.3 < found.arithmetic < 1.0
    assert (found.sentence == efficiency.of_cpu("none").sentence) == (scheme == "none")
    for name in ("uintx-2-8", "uintx-2-64", "int8dq-int4wo-32"):
        longest = {"uintx-2-8": "uintx-2-8", "uintx-2-64": "uintx-2"}.get(name, "int8dq-int4wo")
        table = efficiency.FITTED | efficiency.BY_RATIO
        assert efficiency.of_cpu(name).memory == table[longest][0]


# ----------------------------------------------------------------------- ranks, experts, energy


def test_two_ranks_on_a_processor_take_turns(machine):
    """Each has half of the matrices, and they share cores and memory: products take as long as one
    rank's. A step exchanges 2 sums a layer, one of the embedding, and the logits."""
    one = predict(Request(CONFIG, prompt=512, new_tokens=11), machine)
    two = predict(Request(CONFIG, prompt=512, new_tokens=11, tp=2), machine)
    link = machines.SHARED_MEMORY
    links = 45 * ring_seconds("all_reduce", 4096, 2, link)
    links += ring_seconds("all_gather", 32000, 2, link)
    assert two.parts["token"]["links"] == pytest.approx(links)
    assert two.parts["token"]["linear"] == pytest.approx(one.parts["token"]["linear"], rel=0.01)
    assert two.memory["token"].weights == pytest.approx(one.memory["token"].weights, rel=0.01)


MIXTURE = dataclasses.replace(
    CONFIG, name="eight", num_layers=4, mixture=Mixture(8, 2, 1024), architecture="mixtral"
)


def expert_bytes(config):
    return 2 * 3 * config.mixture.expert_dim * config.dim  # w1, w3 and w2, of 2 bytes


@pytest.mark.parametrize(("sequences", "experts"), [(1, 2), (4, 5.46875)])
def test_a_step_reads_the_experts_that_its_sequences_choose(machine, sequences, experts):
    """Two of eight for one sequence; 8 · (1 − 0.75⁴) on average for four."""
    count = count_model(MIXTURE, batch=sequences, tokens=1, depth=100)
    read = sum(work.bytes_read for work in count.of_kind("linear"))
    D, kv = MIXTURE.dim, 2 * MIXTURE.num_kv_heads * MIXTURE.head_dim
    attention = 2 * (D * (D + kv) + D * D)
    weights = 4 * (attention + experts * expert_bytes(MIXTURE)) + 2 * D * MIXTURE.vocab_size
    assert read == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("name", ["Meta-Llama-3-70B", "Mixtral-8x7B-v0.1"])
def test_eight_cards(name):
    """Two sums a layer, one of the embedding, the logits of an eighth of the vocabulary."""
    config, card = preset(name), whole("H100 SXM")
    found = predict(Request(config, prompt=64, new_tokens=8, tp=8), card)
    link, count = card.link_among(8), 2 * config.num_layers + 1
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
    assert predict(Request(MIXTURE, tp=2), machine).parts["token"]["links"] > 0


def test_energy_of_a_processor_is_at_most_its_power_limit(machine):
    held = dataclasses.replace(machine, power=65.0)
    found = predict(Request(CONFIG, prompt=128, new_tokens=11, tp=2), held)
    seconds = found.prompt_seconds.value + 10 * found.token_seconds.value
    assert found.joules_per_token.value == pytest.approx(65 * seconds / 11)
    assert found.joules_per_token.source == "no counter; power limit × time is an upper bound"
