"""autoquant: what it decides on given measurements, how it measures, and what it applies."""

import dataclasses
import json
import math
import random
import time
from collections import Counter

import pytest
import torch
from torch import nn

from quantbench import devices
from quantbench.errors import CheckpointError, KernelError
from quantbench.models.loading import load_config, load_model
from quantbench.ops.cpu import build
from quantbench.quantize import autoquant, race
from quantbench.quantize.observe import decibels
from quantbench.quantize.per_layer import MixedQuantizer, by_name
from quantbench.quantize.race import Timing
from quantbench.quantize.registry import SCHEMES, Quantizer
from quantbench.quantize.spec import AutoQuant, parse

CPU = torch.device("cpu")
REAL_CACHE = devices.last_level_cache


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """As few rounds and copies as the rules allow."""
    monkeypatch.setattr(race, "SECONDS", 0)
    monkeypatch.setattr(devices, "last_level_cache", lambda device: 1 << 18)
    build.refusal()  # builds the C++ kernels where the machine keeps them


def sample(N=96, K=64, bias=False, dtype=torch.bfloat16, name="layer", rows=80):
    layer = nn.Linear(K, N, bias=bias).to(dtype).requires_grad_(False)
    return autoquant.LayerSample(name, layer, torch.randn(rows, K).to(dtype))


def measured(name, microseconds, sqnr=45.0, reason=None):
    seconds = microseconds * 1e-6
    timing = None if reason else Timing(seconds, 0.9 * seconds, 1.1 * seconds, 20)
    return autoquant.Candidate(parse(name), "torchao", reason, timing, 1000, sqnr)


def of(choice, name):
    return next(one for one in choice.candidates if str(one) == name)


# --------------------------------------------------------------------------------------- decisions

NAN, INF = math.nan, math.inf
CASES = {
    "the fastest": ([("none", 100), ("int8wo", 60), ("int8dq", 50)], "int8dq"),
    "only full precision": ([("none", 100)], "none"),
    "slower than full precision": ([("none", 100), ("int8wo", 101, 99.0)], "none"),
    "a tie": ([("none", 100), ("int8wo", 100)], "none"),
    "faster within noise": ([("none", 100), ("int8wo", 97.5)], "none"),
    "faster beyond noise": ([("none", 100), ("int8wo", 96.5)], "int8wo"),
    "not enough dB": ([("none", 100), ("int4wo-64", 10, 34.9), ("int8wo", 60)], "int8wo"),
    "just enough dB": ([("none", 100), ("int4wo-64", 10, 35.0), ("int8wo", 60)], "int4wo-64"),
    "no dB at all": ([("none", 100), ("int8wo", 10, NAN), ("int8dq", 10, -INF)], "none"),
    "full precision below min_sqnr": ([("none", 100, 20.0), ("int8wo", 50, 20.0)], "none"),
    "broken in decode's shape": ([("none", 100), ("int8wo", 10, 45.0, "wrong")], "none"),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_what_is_chosen(given, expected):
    field = [measured(*one) for one in given]
    for order in (field, field[::-1]):
        chosen, judged = autoquant.decide(order, 35.0)
        assert str(chosen.spec) == expected
        assert [one.seconds for one in judged] == sorted(one.seconds for one in judged)
        assert [one for one in judged if one.verdict.startswith("chosen")] == [chosen]


def test_every_candidate_gets_its_reason():
    refusal = "has in_features 48, no multiple of 32"
    rows = [
        (measured("none", 100), "1.67 × the chosen's time"),
        (measured("int8wo", 60), "chosen"),
        (measured("int8dq", 90), "1.50 × the chosen's time"),
        (measured("float8wo", 50, sqnr=31.84), "31.8 dB < 35 dB"),
        (measured("float8dq-row", 131), "2.18 × the chosen's time"),
        (measured("int4wo-64", 98), "1.63 × the chosen's time"),
        (measured("int4wo-32", 1, reason=refusal), refusal),
    ]
    chosen, judged = autoquant.decide([candidate for candidate, _ in rows], 35.0)
    verdicts = {str(candidate.spec): verdict for candidate, verdict in rows}
    assert {str(one.spec): one.verdict for one in judged} == verdicts
    text = autoquant.table([autoquant.ShapeChoice((32, 16), ["a", "b"], "batch 1", chosen, judged)])
    assert "32 × 16 (a and 1 more), batch 1 → int8wo (torchao): 1.67 × as fast as full" in text
    assert "60.0 µs (54.0 to 66.0)" in text and "0.0 GB/s" in text and refusal in text


def test_without_full_precision_there_is_no_choice():
    with pytest.raises(KernelError, match="full precision: no compiler"):
        autoquant.decide([measured("none", 1, reason="no compiler"), measured("int8wo", 10)], 35.0)


# ----------------------------------------------------------------------------------------- quality


def test_decibels_worked_by_hand():
    exact = torch.tensor([3.0, 4.0])
    assert decibels(exact, torch.tensor([3.0, 4.5])) == pytest.approx(20)  # 25 / 0.25
    assert decibels(exact, torch.tensor([0.0, 0.0])) == pytest.approx(0)
    assert decibels(exact, exact) == math.inf
    assert decibels(torch.zeros(2), exact) == -math.inf
    assert decibels(exact, torch.tensor([math.inf, 4.0])) == -math.inf
    assert math.isnan(decibels(exact, torch.tensor([math.nan, 4.0])))


def test_the_noise_of_int8_weights_is_what_theory_says():
    """Rounding to steps of s adds noise of variance s² / 12; s is the largest of K normal numbers
    over 127.5. Its mean square is ∫ 2m (1 - P(|w| < m)^K) dm, with P(|w| < m) = erf(m / √2)."""
    K = 1024
    m = torch.linspace(0, 8, 100_001, dtype=torch.float64)
    largest = torch.trapezoid(2 * m * (1 - torch.erf(m / 2**0.5) ** K), m)
    theory = 10 * math.log10(12 * 127.5**2 / largest)
    one = sample(256, K, dtype=torch.float32)
    nn.init.normal_(one.layer.weight)
    (made,) = autoquant.choose([one], AutoQuant(), 1, 35.0)
    assert of(made, "int8wo (torchao)").sqnr == pytest.approx(theory, abs=1)
    # float32 sums of K products: 2^-24 each, growing as √K at most: 120 dB and more.
    assert of(made, "none (torch)").sqnr > 110


def test_the_worst_layer_of_a_shape_counts():
    """A row whose largest weight is 1000 times the others' leaves them few of int8's steps."""
    good, bad = sample(name="good", rows=3), sample(name="bad")
    bad.layer.weight[:, 0] *= 1000
    bad.activations[:, 0] = 0  # so that the output does not depend on that weight
    fired = []
    good.layer.register_forward_pre_hook(lambda layer, x: fired.append(x))
    for both in ([good, bad], [bad, good]):
        (made,) = autoquant.choose(both, AutoQuant(), 7, 35.0)
        assert of(made, "int8wo (torchao)").verdict.endswith("dB < 35 dB")
        assert of(made, "int8wo (torchao)").sqnr < 20
        assert set(made.layers) == {"good", "bad"}
    (made,) = autoquant.choose([good], AutoQuant(), 7, 35.0)
    assert of(made, "int8wo (torchao)").sqnr > 35
    assert not fired  # layers are timed without the hooks that recorded their inputs


# --------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_small_layer_from_end_to_end(monkeypatch, compile):
    monkeypatch.setattr(autoquant, "TOO_SLOW", math.inf)
    monkeypatch.setattr(autoquant, "MAX_WEIGHTS", 64 * 64)
    selection = AutoQuant(int4=True)
    if compile:  # which takes seconds for every candidate
        monkeypatch.setattr(AutoQuant, "candidates", (parse("int8wo"),))
    reports = []
    two = [sample(bias=True), sample(bias=True, name="twin")]
    how = {"report": lambda *progress: reports.append(progress), "compile": compile}
    (made,) = autoquant.choose(two, selection, 2, 35.0, **how)
    assert made.shape == (96, 64) and made.layers == ["layer", "twin"] and reports == [(1, 1)]
    assert "64 of its rows" in made.setting
    schemes = {str(one.spec) for one in made.candidates}
    assert schemes == {"none", *map(str, selection.candidates)}
    assert all(one.timing.rounds >= 20 for one in made.candidates)
    # 16 bits are rounded to 2^-9 at most, 56 dB and some; E4M3 to 2^-4, 30 dB; 4 bits give about a
    # step of 1/15 of the range, 20 dB and some.
    assert of(made, "none (torch)").sqnr > 50 and of(made, "none (torch)").bytes == 2 * 64 * 65
    if not compile:
        assert 20 < of(made, "float8wo (torchao)").sqnr < 40
        assert 15 < of(made, "int4wo-64 (torchao)").sqnr < 30
    assert all(unit in autoquant.table([made]) for unit in ("µs", "MB", "GB/s", "dB", "batch 2"))


class Broken(nn.Linear):
    def forward(self, x):
        raise RuntimeError("no such instruction\nand many more lines")


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


def test_a_race_drops_what_fails_and_what_is_slow(monkeypatch):
    monkeypatch.setattr(devices, "last_level_cache", lambda device: 1000)  # a few copies, for Slow
    layers = [nn.Linear(8, 8), Slow(8, 8), Broken(8, 8), nn.Linear(8, 8)]
    result = race.race(layers, torch.randn(1, 1, 8), False, beside=lambda: 7.0, too_slow=50)
    first, slow, broken, last = result.timings
    assert slow.rounds == race.WARM_UPS and 0.05 <= slow.seconds
    assert min(first.rounds, last.rounds) >= race.ROUNDS
    assert broken == "RuntimeError: no such instruction" and result.outputs[2] is None
    assert result.beside.seconds == 7 and result.rotated >= result.cache


def test_how_many_copies():
    for _ in range(200):
        size, cache, free = (int(10 ** random.uniform(0, 9)) for _ in range(3))
        number = race.copies(size, cache, free)
        assert number == 1 or number * size <= free / 4
        enough = number * size >= 2 * cache
        most = min(free // 4, race.MAX_COPY_BYTES)
        assert enough or number == race.MOST_COPIES or (number + 1) * size > most
        assert number == 1 or (number - 1) * size < 2 * cache  # no more than needed


def test_rounds_are_interleaved_and_warm_ups_left_out():
    """Medians and quartiles of 1 … 20, of which the layer's number is ten times the weight."""
    calls = []

    def run(i):
        def once():
            calls.append(i)
            return 10.0**i * max(1e3 * (len(calls) <= 9), (len(calls) - 1) // 3 - 2)

        return once

    timings = race.interleaved({i: run(i) for i in range(3)})
    for i, timing in timings.items():
        wanted = [10**i * quartile for quartile in (5.75, 10.5, 15.25)]
        assert [timing.low, timing.seconds, timing.high] == pytest.approx(wanted)
    assert calls == [0, 1, 2] * (race.WARM_UPS + race.ROUNDS) and timing.rounds == race.ROUNDS


def test_a_kernel_that_is_wrong_only_when_it_decodes_is_never_chosen(monkeypatch):
    """As int8dq once was, compiled: right for many rows, garbage for one."""

    class Wrong(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if len(x) > 1 else y.flip(-1)

    def build(layer, spec):
        wrong = Wrong(layer.in_features, layer.out_features, False, "meta")
        wrong.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        return wrong

    kernels = SCHEMES[type(parse("int8wo"))].kernels
    wrong = dataclasses.replace(kernels["torchao"], build=build)
    monkeypatch.setitem(kernels, "torchao", wrong)
    (made,) = autoquant.choose([sample()], AutoQuant(), 1, 35.0)
    one = of(made, "int8wo (torchao)")
    assert one.sqnr > 35 and one.verdict.startswith("wrong: decode's output")
    assert made.chosen is not one


# -------------------------------------------------------------------------------------- candidates


def kernels(layer=None, **options):
    found = autoquant.candidates(AutoQuant(int4=True), layer or sample().layer, **options)
    return {(str(one.spec), one.kernel): one.reason for one in found}


def test_slow_kernels_take_part_only_where_they_are_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = kernels()
    assert found["float8dq-row", "cpu"] is None
    assert not any(kernel in ("reference", "triton") for _, kernel in found)
    assert {kernel for _, kernel in kernels(kernel="reference")} == {"cpu", "torch", "reference"}
    with pytest.raises(KernelError, match="--kernel bitsandbytes: none of autoquant's schemes"):
        autoquant.choose([sample()], AutoQuant(), 1, 35.0, kernel="bitsandbytes")
    monkeypatch.setattr("quantbench.ops.cpu.build.refusal", lambda: "no compiler")
    (made,) = autoquant.choose([sample()], AutoQuant(), 1, 35.0)
    assert of(made, "none (torch)").timing and of(made, "int8wo (torchao)").timing
    assert "no compiler" in of(made, "float8dq-row (cpu)").verdict
    assert not any(one.kernel == "reference" for one in made.candidates)


def test_layers_that_a_scheme_or_a_kernel_refuses(monkeypatch):
    # Kernel cpu would take every shape.
    monkeypatch.setattr("quantbench.ops.cpu.build.refusal", lambda: "no compiler")
    odd = sample(40, 100)  # in_features is no multiple of 16, 32 or 64
    (made,) = autoquant.choose([odd], AutoQuant(int4=True), 1, 35.0)
    assert str(made.chosen) == "none (torch)"
    text = autoquant.table([made])
    assert "has to be a multiple of 16" in text
    assert "has in_features 100, no multiple of 64" in text


# ---------------------------------------------------------------------------------------- applying

TOKENS = torch.arange(40, 56)[None]


def logits(transform):
    model = load_model("tiny", precision=torch.float32, num_layers=2, transform=transform)
    with torch.no_grad():
        return model(TOKENS)


def test_each_layer_gets_its_shape_s_choice():
    names = load_config("tiny").with_layers(2).linear_shapes()
    schemes = ["int8wo", "none", "float8wo", "int8dq", "int4wo-64"]
    choices = []
    for shape, scheme in zip(dict.fromkeys(names.values()), schemes, strict=True):
        kernel = "torch" if scheme == "none" else "torchao"
        chosen = autoquant.Candidate(parse(scheme), kernel)
        choices.append(autoquant.ShapeChoice(shape, [], "", chosen, []))
    auto = MixedQuantizer(autoquant.by_shape(choices), CPU, torch.float32)
    mine = logits(auto)
    expected = {name: autoquant.by_shape(choices)[shape] for name, shape in names.items()}
    assert auto.layers == {name: (str(spec), kernel) for name, (spec, kernel) in expected.items()}
    assert auto.ran == Counter(kernel for _, kernel in expected.values())
    # The same, put together layer by layer from the schemes' own quantizers.
    singles = {how: Quantizer(how[0], CPU, torch.float32, how[1]) for how in expected.values()}
    by_hand = logits(lambda name, m: singles[expected[name]](name, m) if name in names else m)
    assert torch.equal(mine, by_hand)

    with pytest.raises(KernelError, match="output is 48 by 64, and no scheme was chosen"):
        auto("output", sample(48).layer)

    # A saved model is read back by name, and by no shape.
    saved = json.loads(json.dumps({name: list(how) for name, how in auto.layers.items()}))
    again = MixedQuantizer(by_name(saved), CPU, torch.float32)
    assert torch.equal(mine, logits(again)) and again.layers == auto.layers


def test_a_saved_kernel_that_cannot_run_here_is_replaced_and_reported():
    auto = MixedQuantizer(by_name({"a": ["int8wo", "from elsewhere"]}), CPU, torch.bfloat16)
    auto("a", sample().layer)
    assert auto.layers["a"][0] == "int8wo" and auto.ran == {auto.layers["a"][1]: 1}
    for name in ("int9", "autoquant"):
        with pytest.raises(CheckpointError, match=f"a was saved as '{name}'"):
            by_name({"a": [name, "torchao"]})


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "graph"])
def test_on_a_gpu(compile, monkeypatch):
    monkeypatch.setattr(devices, "last_level_cache", REAL_CACHE)
    one = sample(512, 1024)
    one = autoquant.LayerSample("layer", one.layer.cuda(), one.activations.cuda())
    (made,) = autoquant.choose([one], AutoQuant(int4=True), 1, 35.0, compile=compile)
    timed = {one.kernel for one in made.candidates if one.timing}
    assert {"torch", "torchao", "triton"} <= timed
