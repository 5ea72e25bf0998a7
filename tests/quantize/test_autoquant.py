"""autoquant: what it decides on given measurements, how it measures, what it keeps and applies."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from torch import nn

from quantbench.errors import CheckpointError, KernelError
from quantbench.models.loading import load_model
from quantbench.ops.cpu import build
from quantbench.quantize import scheme
from quantbench.quantize.autoquant import cache as kept
from quantbench.quantize.autoquant import choose as autoquant
from quantbench.quantize.autoquant import race, verdict
from quantbench.quantize.autoquant.choose import (
    AutoQuantizer,
    Sample,
    choose,
    decibels,
    exact_product,
    table,
)
from quantbench.quantize.autoquant.race import Timing
from quantbench.quantize.autoquant.verdict import (
    Candidate,
    Choice,
    Measurement,
    decide,
    full_precision,
)
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import AutoQuant, parse

CPU = torch.device("cpu")
REAL_CACHE = race.last_level_cache
FULL_PRECISION = full_precision("torch")


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """As few rounds and copies as the rules allow, and no cache but the test's own."""
    monkeypatch.setattr(race, "SECONDS", 0)
    monkeypatch.setattr(race, "last_level_cache", lambda device: 1 << 18)
    build.refusal()  # builds the C++ kernels where the machine keeps them
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def sample(N=96, K=64, bias=False, dtype=torch.bfloat16, name="layer", rows=80):
    layer = nn.Linear(K, N, bias=bias).to(dtype).requires_grad_(False)
    return Sample(name, layer, torch.randn(rows, K).to(dtype))


def candidate(name, kernel="torchao"):
    return FULL_PRECISION if name == "none" else Candidate(parse(name), kernel)


def measured(name, microseconds, sqnr=45.0, agreement=60.0, kernel="torchao"):
    seconds = microseconds * 1e-6
    timing = Timing(seconds, 0.9 * seconds, 1.1 * seconds, 20)
    return Measurement(candidate(name, kernel), 1000, timing, sqnr, agreement)


def refused(name, reason):
    return Measurement(candidate(name), reason=reason)


def choice(chosen, *measurements, shape=(8, 8), min_sqnr=35.0, rotated=2, cache=1, kept=False):
    judged = tuple(decide(measurements, min_sqnr)[1]) if measurements else ()
    setting = "batch 1, bfloat16, compiled"
    return Choice(shape, ("a",), setting, min_sqnr, chosen, judged, rotated, cache, kept)


# --------------------------------------------------------------------------------------- decisions

NAN, INF = math.nan, math.inf
CASES = {
    "the fastest": ([("none", 100), ("int8wo", 60), ("int8dq", 50)], "int8dq"),
    "only full precision": ([("none", 100)], "none"),
    "slower than full precision": ([("none", 100), ("int8wo", 101, 99.0)], "none"),
    "much slower, at any quality": ([("none", 1), ("int8wo", 1000, INF)], "none"),
    "a tie": ([("none", 100), ("int8wo", 100)], "none"),
    "faster within noise": ([("none", 100), ("int8wo", 97.5)], "none"),
    "faster beyond noise": ([("none", 100), ("int8wo", 96.5)], "int8wo"),
    "not enough dB": ([("none", 100), ("int4wo-64", 10, 34.9), ("int8wo", 60)], "int8wo"),
    "just enough dB": ([("none", 100), ("int4wo-64", 10, 35.0), ("int8wo", 60)], "int4wo-64"),
    "no dB at all": ([("none", 100), ("int8wo", 10, NAN), ("int8dq", 10, -INF)], "none"),
    "full precision below min_sqnr": ([("none", 100, 20.0), ("int8wo", 50, 20.0)], "none"),
    "broken in decode's shape": ([("none", 100), ("int8wo", 10, 45.0, 3.0)], "none"),
    "NaN in decode's shape": ([("none", 100), ("int8wo", 10, 45.0, NAN)], "none"),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_chosen(given, expected, backwards):
    measurements = [measured(*one) for one in given]
    chosen, judged = decide(measurements[::-1] if backwards else measurements, 35.0)
    assert chosen == candidate(expected)
    assert [m.seconds for m in judged] == sorted(m.seconds for m in judged)
    assert [m.candidate for m in judged if m.verdict.startswith("chosen")] == [chosen]


def test_every_candidate_hears_why():
    _, judged = decide(
        [
            measured("none", 100),
            measured("int8wo", 60),
            measured("int8dq", 90),
            measured("float8wo", 50, sqnr=31.84),
            measured("float8dq-row", 131),
            measured("int4wo-64", 98),
            measured("fp6", 40, agreement=-12.0),
            refused("int4wo-32", "has in_features 48, no multiple of 32"),
        ],
        35.0,
    )
    assert {str(m.candidate.spec): m.verdict for m in judged} == {
        "none": "slower: 1.67 × the chosen",
        "int8wo": "chosen",
        "int8dq": "slower: 1.50 × the chosen",
        "float8wo": "31.8 dB < 35 dB",
        "float8dq-row": "slower than full precision: 1.31 × its time",
        "int4wo-64": "no faster than full precision beyond noise: 0.98 × its time",
        "fp6": "wrong: timed, its output was -12.0 dB from what it gives many rows",
        "int4wo-32": "has in_features 48, no multiple of 32",
    }


def test_without_full_precision_there_is_nothing_to_compare_with():
    broken = dataclasses.replace(Measurement(FULL_PRECISION), reason="no compiler")
    with pytest.raises(KernelError, match="full precision: no compiler"):
        decide([broken, measured("int8wo", 10)], 35.0)


def test_the_table_says_what_less_quality_would_buy():
    small = [measured("none", 100), measured("int8wo", 60), measured("int4wo-64", 30, 20.3)]
    large = [measured("none", 400), measured("int8wo", 200), measured("int4wo-64", 125, 19.9)]
    choices = [
        choice(candidate("int8wo"), *small, shape=(32, 16)),
        choice(candidate("int8wo"), *large, shape=(64, 48), rotated=5_000_000, cache=9_000_000),
    ]
    text = table(choices)
    assert (
        "int4wo-64 (torchao) would be 1.6 to 2.0 × as fast in 2 of 2 shapes at 19.9 to 20.3 dB: "
        "--min_sqnr 19" in text
    )
    assert "32 × 16 (a), batch 1, bfloat16, compiled → int8wo (torchao): 1.67 × as fast" in text
    assert "In 1 of 2 shapes weights may have come from the last-level cache: it holds 9 MB" in text
    assert "earlier run" not in text
    # With that much less asked for, that is what is chosen.
    assert [decide(given, 19)[0] for given in (small, large)] == [candidate("int4wo-64")] * 2


def test_the_table_promises_nothing_that_is_not_there():
    """Neither a gain within noise, nor a broken kernel, nor one that loses everything."""
    given = [
        measured("none", 100),
        measured("int8wo", 60),
        measured("int4wo-64", 59, 20.0),
        measured("float8wo", 10, 30.0, agreement=0.0),
        measured("int8dq", 10, 0.4),
        measured("float8dq-row", 10, NAN),
    ]
    assert "--min_sqnr" not in table([choice(candidate("int8wo"), *given)])


# ----------------------------------------------------------------------------------------- quality


def test_decibels_worked_by_hand():
    exact = torch.tensor([3.0, 4.0])
    assert decibels(exact, torch.tensor([3.0, 4.5])) == pytest.approx(20)  # 25 / 0.25
    assert decibels(exact, torch.tensor([0.0, 0.0])) == pytest.approx(0)
    assert decibels(exact, exact) == math.inf
    assert decibels(torch.zeros(2), exact) == -math.inf
    assert decibels(exact, torch.tensor([math.inf, 4.0])) == -math.inf
    assert math.isnan(decibels(exact, torch.tensor([math.nan, 4.0])))


def test_the_exact_product_is_that_of_float64(monkeypatch):
    monkeypatch.setattr(scheme, "CPU_BLOCK_ELEMENTS", 5 * 64)
    one = sample(N=37, bias=True)
    x, weight, bias = one.activations, one.layer.weight, one.layer.bias
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(exact_product(one.layer, x), expected)


def test_the_noise_of_int8_weights_is_what_theory_says():
    """Rounding to steps of s adds noise of variance s² / 12; s is the largest of K normal numbers
    over 127.5. Its mean square is ∫ 2m (1 - P(|w| < m)^K) dm, with P(|w| < m) = erf(m / √2)."""
    K = 1024
    m = torch.linspace(0, 8, 100_001, dtype=torch.float64)
    largest = torch.trapezoid(2 * m * (1 - torch.erf(m / 2**0.5) ** K), m)
    theory = 10 * math.log10(12 * 127.5**2 / largest)
    one = sample(256, K, dtype=torch.float32)
    nn.init.normal_(one.layer.weight)
    (made,) = choose([one], AutoQuant(), 1, 35.0)
    assert made.of(candidate("int8wo")).sqnr == pytest.approx(theory, abs=1)
    # float32 sums of K products: 2^-24 each, growing as √K at most: 120 dB and more.
    assert made.of(FULL_PRECISION).sqnr > 110


def test_of_layers_that_share_a_shape_the_worst_counts():
    """A row whose largest weight is 1000 times the others' leaves them few of int8's steps."""
    good, bad = sample(name="good"), sample(name="bad")
    bad.layer.weight[:, 0] *= 1000
    bad.activations[:, 0] = 0  # and nothing is heard of that weight
    alone = [choose([one], AutoQuant(), 1, 35.0)[0] for one in (good, bad)]
    quality = [made.of(candidate("int8wo")).sqnr for made in alone]
    assert quality[1] < 20 < 35 < quality[0]
    for both in ([good, bad], [bad, good]):
        (made,) = choose(both, AutoQuant(), 1, 35.0)
        assert made.of(candidate("int8wo")).sqnr == quality[1]
        assert made.of(candidate("int8wo")).verdict.endswith("dB < 35 dB")
        assert set(made.layers) == {"good", "bad"}


# ---------------------------------------------------------------------------------------- measuring


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_small_layer_from_end_to_end(monkeypatch, compile):
    monkeypatch.setattr(autoquant, "TOO_SLOW", math.inf)
    samples = [sample(bias=True), sample(bias=True, name="twin"), sample(48, 64, name="other")]
    samples = samples[: 2 if compile else 3]  # a shape takes seconds to compile
    reports = []
    made = choose(
        samples,
        AutoQuant(int4=True),
        2,
        35.0,
        report=lambda done, total: reports.append((done, total)),
        compile=compile,
    )
    assert [one.shape for one in made] == [(96, 64), (48, 64)][: len(samples) - 1]
    assert made[0].layers == ("layer", "twin")
    total = sum(len(one.measurements) for one in made)
    assert reports == [(i, total) for i in range(1, total + 1)]
    for one in made:
        schemes = {str(m.candidate.spec) for m in one.measurements}
        assert schemes == {"none", *map(str, AutoQuant(int4=True).candidates)}
        assert all(m.timing.rounds >= 20 for m in one.measurements)
        assert all(m.agreement > verdict.AGREEMENT for m in one.measurements)
        assert one.rotated >= one.cache and not one.kept
        # 16 bits are rounded to 2^-9 at most, 56 dB and some; E4M3 to 2^-4, 30 dB; 4 bits give
        # about a step of 1/15 of the range, 20 dB and some.
        assert one.of(FULL_PRECISION).sqnr > 50
        assert 20 < one.of(candidate("float8wo")).sqnr < 40
        assert 15 < one.of(candidate("int4wo-64")).sqnr < 30
        assert one.of(FULL_PRECISION).bytes == 2 * math.prod(one.shape) + 2 * (
            one.shape[0] * (one.shape == (96, 64))
        )
    text = table(made)
    assert all(unit in text for unit in ("µs", "MB", "GB/s", "dB", "batch 2"))


def test_a_large_layer_is_measured_by_some_of_its_rows(monkeypatch):
    large = sample(1001, bias=True)
    part = autoquant._part(large, 4).layer
    for measured, whole in zip(part.parameters(), large.layer.parameters(), strict=True):
        assert torch.equal(measured, whole[[0, 250, 500, 750]])
    monkeypatch.setattr(autoquant, "MOST_WEIGHTS", 64 * 190)
    (made,) = choose([large], AutoQuant(), 1, 35.0)
    whole = autoquant._as(candidate("int8wo"), large)
    assert made.shape == (1001, 64) and "measured on 128 of its rows" in made.setting
    assert made.of(candidate("int8wo")).bytes == pytest.approx(race.module_bytes(whole), rel=0.01)
    assert made.of(FULL_PRECISION).bytes == pytest.approx(2 * 1001 * 65, rel=0.01)


def test_what_is_hopelessly_slow_is_timed_a_few_times():
    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.1)
            return super().forward(x)

    layers = [nn.Linear(8, 8), Slow(8, 8), nn.Linear(8, 8)]
    result = race.race(layers, torch.randn(1, 1, 8), compile=False, too_slow=50)
    rounds = [timing.rounds for timing in result.timings]
    assert rounds[1] == race.HEATS and min(rounds[0], rounds[2]) >= race.ROUNDS
    assert 0.1 <= result.timings[1].seconds


def test_what_is_hopelessly_slow_is_not_tried_on_other_shapes(monkeypatch):
    """Where nothing is fast enough, only full precision is timed on the second one."""
    monkeypatch.setattr(autoquant, "TOO_SLOW", 0.0)
    first, second = choose([sample(), sample(48)], AutoQuant(), 1, 35.0)
    assert all(m.timing.rounds == race.HEATS for m in first.measurements)
    for one in second.measurements:
        in_full = str(one.candidate.spec) == "none"
        assert one.reason == (None if in_full else "far too slow on 96 × 64")


def test_copies_share_what_is_compiled():
    torch._dynamo.reset()
    layers = [sample(K=64).layer, sample(K=64).layer]
    torch._dynamo.utils.counters.clear()
    race.race(layers, torch.randn(1, 1, 64).bfloat16(), compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(layers)


@pytest.mark.parametrize(
    ("sizes", "cache", "expected"),
    [
        ((100, 50), 1000, 8),  # 7 whole rounds of 150 and the 50 of the smaller one
        ((2000, 1000), 1000, 1),  # each drives itself out
        ((1, 1), 10**6, race.TURNS),  # no more than are ever used
    ],
)
def test_how_many_copies(sizes, cache, expected):
    numbers = race.copies(sizes, cache, 10**9, whole=False)
    assert numbers == [expected] * 2
    assert race.rotated(sizes, numbers, cache, whole=False) >= cache


def test_copies_that_fill_a_device_cache_by_themselves():
    assert race.copies((100, 30), 1000, 10**9, whole=True) == [20, 67]


@pytest.mark.parametrize("whole", [False, True])
def test_the_budget_for_copies_is_kept(whole):
    sizes = (100, 50)
    numbers = race.copies(sizes, 10_000, 3_000, whole)
    assert sum(a * b for a, b in zip(sizes, numbers, strict=True)) <= 3_000
    assert race.rotated(sizes, numbers, 10_000, whole) < 10_000
    assert race.copies(sizes, 10_000, 0, whole) == [1, 1]


def test_no_copy_is_used_again_before_the_cache_has_been_filled():
    """What is read between two uses of a copy, added up from the order in which runs are called."""
    sizes, cache = (700, 350, 350, 190), 20_000
    numbers = race.copies(sizes, cache, 10**9, whole=False)
    reads = []

    def run(i):
        def once(turn):
            reads.append((i, turn % numbers[i]))
            return 1.0

        return once

    race.interleaved({i: run(i) for i in range(len(sizes))})
    last, total = {}, 0
    for i, number in reads:
        assert total - last.get((i, number), -cache) >= cache - sizes[i]  # it fills the rest itself
        total += sizes[i]
        last[i, number] = total
    assert len({tuple(i for i, _ in reads[j : j + 4]) for j in range(0, len(reads), 4)}) > 10


def test_rounds_are_interleaved_and_warm_ups_left_out():
    calls = []

    def run(i):
        return lambda turn: calls.append((turn, i)) or (1000.0 if turn < race.WARM_UPS else i + 1.0)

    timings = race.interleaved({i: run(i) for i in range(3)})
    assert {i: t.seconds for i, t in timings.items()} == {0: 1, 1: 2, 2: 3}
    assert all(t.rounds == race.ROUNDS >= 20 for t in timings.values())
    assert Counter(calls) == Counter(
        (turn, i) for turn in range(race.WARM_UPS + race.ROUNDS) for i in range(3)
    )
    assert [turn for turn, _ in calls] == sorted(turn for turn, _ in calls)


def test_median_and_quartiles():
    seconds = iter([9.0] * race.WARM_UPS + [float(i) for i in range(1, race.ROUNDS + 1)])
    timing = race.interleaved({0: lambda turn: next(seconds)})[0]
    assert (timing.low, timing.seconds, timing.high) == (5.75, 10.5, 15.25)


def test_what_fails_is_out_and_the_others_go_on():
    class Failing(nn.Linear):
        def forward(self, x):
            raise RuntimeError("no such instruction\nand many more lines")

    x = torch.randn(1, 1, 64)
    result = race.race([nn.Linear(64, 8), Failing(64, 8)], x, compile=False)
    assert isinstance(result.timings[0], Timing)
    assert result.timings[1] == "RuntimeError: no such instruction"
    assert result.outputs[1] is None


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

    int8wo = autoquant.SCHEMES[type(parse("int8wo"))]
    monkeypatch.setitem(
        int8wo.kernels, "torchao", dataclasses.replace(int8wo.kernels["torchao"], build=build)
    )
    (made,) = choose([sample()], AutoQuant(), 1, 35.0)
    one = made.of(candidate("int8wo"))
    assert one.sqnr > 35 and one.verdict.startswith("wrong: timed, its output was")
    assert made.chosen != one.candidate


def test_layers_are_timed_without_the_hooks_that_found_their_inputs():
    one, fired = sample(), []
    one.layer.register_forward_pre_hook(lambda layer, x: fired.append(x))
    choose([one], AutoQuant(), 1, 35.0)
    assert not fired


def test_fewer_activations_than_the_batch_are_enough():
    (made,) = choose([sample(rows=3)], AutoQuant(), 7, 35.0)
    assert made.of(candidate("int8wo")).sqnr > 35


def test_the_last_level_cache_is_the_largest_one(tmp_path):
    for index, size in enumerate(["32K", "1024K", "36M"]):
        folder = tmp_path / f"cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(size + "\n")
    assert REAL_CACHE(CPU, tmp_path) == 36 << 20
    assert REAL_CACHE(CPU, tmp_path / "none") == race.CACHE_IF_UNKNOWN
    assert REAL_CACHE(CPU) > 0


# --------------------------------------------------------------------------------------- candidates


def kernels(found):
    return {(str(m.candidate.spec), m.candidate.kernel): m.reason for m in found}


def test_the_reference_takes_part_only_where_there_is_nothing_else(monkeypatch):
    built = kernels(autoquant.candidates(AutoQuant(int4=True), sample().layer))
    assert built["float8dq-row", "cpu"] is None and not any(k == "reference" for _, k in built)
    monkeypatch.setattr("quantbench.ops.cpu.build.refusal", lambda: "no compiler")
    found = kernels(autoquant.candidates(AutoQuant(int4=True), sample().layer))
    assert found["none", "torch"] is None and found["int8wo", "torchao"] is None
    assert ("int8wo", "reference") not in found and not any(k == "triton" for _, k in found)
    assert ("float8dq-row", "reference") in found
    eight = kernels(autoquant.candidates(AutoQuant(), sample().layer))
    assert {name for name, _ in eight} == {"none", *map(str, AutoQuant().candidates)}


def test_tritons_interpreter_is_no_candidate(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = kernels(autoquant.candidates(AutoQuant(), sample().layer))
    assert not any(kernel == "triton" for _, kernel in found)


def test_layers_that_a_scheme_or_a_kernel_refuses(monkeypatch):
    # Kernel cpu would take every shape.
    monkeypatch.setattr("quantbench.ops.cpu.build.refusal", lambda: "no compiler")
    odd = sample(40, 100)  # in_features is no multiple of 16, 32 or 64
    found = kernels(autoquant.candidates(AutoQuant(int4=True), odd.layer))
    assert "has to be a multiple of 16" in found["int8wo", "torchao"]
    assert found["int8wo", "reference"] is None
    refusals = {name: reason for (name, _), reason in found.items() if "no multiple" in str(reason)}
    assert set(refusals) == {"int4wo-64", "int8dq-int4wo-32"}
    (made,) = choose([odd], AutoQuant(int4=True), 1, 35.0)
    assert "has in_features 100, no multiple of 64" in table([made])


def test_one_kernel_can_be_asked_for():
    (made,) = choose([sample()], AutoQuant(), 1, 35.0, kernel="reference")
    assert {m.candidate.kernel for m in made.measurements} == {"cpu", "torch", "reference"}
    with pytest.raises(KernelError, match="--kernel bitsandbytes: none of autoquant's schemes"):
        choose([sample()], AutoQuant(), 1, 35.0, kernel="bitsandbytes")


# ------------------------------------------------------------------------------------- kept timings


@pytest.fixture
def races(monkeypatch):
    """How many layers each race had."""
    counted, real = [], race.race

    def counting(layers, *rest, **settings):
        counted.append(len(layers))
        return real(layers, *rest, **settings)

    monkeypatch.setattr(race, "race", counting)
    return counted


def timings(made):
    return {str(m.candidate): m.timing for one in made for m in one.measurements}


def test_timings_are_kept_and_quality_is_not(races, tmp_path):
    path, one = tmp_path / "deep" / "down" / "timings.json", sample()
    first = choose([one], AutoQuant(int4=True), 1, 35.0, path)
    assert len(races) == 1 and os.listdir(path.parent) == [path.name]
    one.layer.weight[:, 0] *= 1000
    second = choose([one], AutoQuant(int4=True), 1, 35.0, path)
    assert len(races) == 1 and second[0].kept
    assert timings(first) == timings(second)
    name = candidate("int8wo")
    assert second[0].of(name).sqnr != first[0].of(name).sqnr
    assert "Timings of 1 of 1 shapes are kept from an earlier run" in table(second)
    # Fewer candidates than were timed need no new timing, more do.
    fewer = choose([one], AutoQuant(), 1, 35.0, path)
    assert len(races) == 1 and timings(fewer).items() <= timings(first).items()


def test_more_candidates_than_were_kept_are_timed_together(races, tmp_path):
    path, one = tmp_path / "timings.json", sample()
    choose([one], AutoQuant(), 1, 35.0, path)
    choose([one], AutoQuant(int4=True), 1, 35.0, path)
    choose([one], AutoQuant(int4=True), 1, 35.0, path)
    assert len(races) == 2 and races[0] < races[1]


def test_another_setting_is_another_timing(races, tmp_path, monkeypatch):
    path = tmp_path / "timings.json"

    def again(one, batch_size=1, compile=False):
        choose([one], AutoQuant(), batch_size, 35.0, path, compile=compile)
        return len(races)

    plain = sample()
    assert again(plain) == 1
    assert again(plain, batch_size=2) == 2
    assert again(sample(bias=True)) == 3
    assert again(sample(dtype=torch.float32)) == 4
    assert again(sample(N=112)) == 5
    assert again(plain, compile=True) == 6
    monkeypatch.setattr(kept.devices, "describe", lambda device: {"name": "another"})
    assert again(plain) == 7
    monkeypatch.setattr(kept.importlib.metadata, "version", lambda package: "99.0")
    assert again(plain) == 8
    monkeypatch.setattr(kept, "SOURCES", (".py",))  # as if a kernel's source had changed
    monkeypatch.setattr(kept, "__file__", str(tmp_path / "quantize" / "autoquant" / "cache.py"))
    assert again(plain) == 9
    assert again(plain) == 9
    monkeypatch.undo()
    assert len(json.loads(path.read_text())["timings"]) == 9


FOREIGN = [
    "",
    "no json",
    "[]",
    "null",
    '{"timings": 3}',
    '{"timings": {}}',
    '{"other": {}}',
    "\udcff\udcfe",
    "[" * 100_000,
]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_none_of_ours_is_written_anew(content, races, tmp_path):
    path, one = tmp_path / "timings.json", sample()
    path.write_bytes(content.encode(errors="surrogateescape"))
    choose([one], AutoQuant(), 1, 35.0, path)
    choose([one], AutoQuant(), 1, 35.0, path)
    assert len(races) == 1 and list(json.loads(path.read_text())) == ["timings"]


DAMAGE = [
    lambda entry: entry.pop("cache"),
    lambda entry: entry.update(rotated="many"),
    lambda entry: entry.update(timings=[1, 2]),
    lambda entry: entry["timings"].pop("none (torch)"),
    lambda entry: entry["timings"]["none (torch)"][0].update(seconds=-1.0),
    lambda entry: entry["timings"]["none (torch)"][0].update(seconds=math.nan),
    lambda entry: entry["timings"]["none (torch)"][0].update(seconds="fast"),
    lambda entry: entry["timings"]["none (torch)"][0].update(more=1),
    lambda entry: entry["timings"]["none (torch)"].pop(),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_a_damaged_entry_is_measured_again(damage, races, tmp_path):
    path, one = tmp_path / "timings.json", sample()
    choose([one], AutoQuant(), 1, 35.0, path)
    content = json.loads(path.read_text())
    (entry,) = content["timings"].values()
    damage(entry)
    path.write_text(json.dumps(content))
    (made,) = choose([one], AutoQuant(), 1, 35.0, path)
    assert len(races) == 2 and not made.kept


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "timings.json"
    choose([sample()], AutoQuant(), 1, 35.0, path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(kept.os, "replace", full)
    (made,) = choose([sample()], AutoQuant(), 2, 35.0, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    (tmp_path / "a file").touch()
    choose([sample()], AutoQuant(), 2, 35.0, tmp_path / "a file" / "timings.json")


def test_what_failed_is_tried_again_next_time(races, tmp_path, monkeypatch):
    path = tmp_path / "timings.json"
    with monkeypatch.context() as patch:
        patch.setattr(autoquant, "decibels", lambda *_: 1 / 0)
        with pytest.raises(KernelError, match="ZeroDivisionError"):
            choose([sample()], AutoQuant(), 1, 35.0, path)
    assert not path.exists()
    (made,) = choose([sample()], AutoQuant(), 1, 35.0, path)
    assert not made.kept and len(races) == 2


def test_where_timings_are_kept(monkeypatch, tmp_path):
    assert autoquant.default_cache() == tmp_path / "cache" / "quantbench" / "autoquant.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert autoquant.default_cache() == tmp_path / ".cache" / "quantbench" / "autoquant.json"


# ----------------------------------------------------------------------------------------- applying

TOKENS = torch.arange(40, 56)[None]


def logits(transform):
    model = load_model("tiny", precision=torch.float32, transform=transform)
    with torch.no_grad():
        return model(TOKENS), model


def shapes_of_tiny():
    with torch.device("meta"):
        model = load_model("tiny", precision=torch.float32)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: (m.out_features, m.in_features) for name, m in linears.items()}


def test_a_model_whose_every_shape_got_one_scheme_is_that_scheme():
    chosen = {shape: candidate("int8wo") for shape in shapes_of_tiny().values()}
    choices = [choice(one, shape=shape) for shape, one in chosen.items()]
    auto = AutoQuantizer(choices, CPU, torch.float32)
    mine, _ = logits(auto)
    expected, _ = logits(Quantizer(parse("int8wo"), CPU, torch.float32, "torchao"))
    assert torch.equal(mine, expected)
    assert auto.ran == {"torchao": len(shapes_of_tiny())}


def test_each_layer_gets_what_its_shape_was_given():
    names = shapes_of_tiny()
    schemes = ["int8wo", "none", "float8wo", "int8dq", "int4wo-64"]
    distinct = dict.fromkeys(names.values())
    assert len(distinct) == len(schemes)
    chosen = dict(zip(distinct, map(candidate, schemes), strict=True))
    auto = AutoQuantizer([choice(c, shape=s) for s, c in chosen.items()], CPU, torch.float32)
    mine, model = logits(auto)
    expected = {name: chosen[shape] for name, shape in names.items()}
    assert auto.layers == {name: (str(c.spec), c.kernel) for name, c in expected.items()}
    assert set(auto.layers) == set(names)
    assert auto.ran == Counter(c.kernel for c in expected.values())
    # The same, put together layer by layer from the schemes' own quantizers.
    singles = {c: Quantizer(c.spec, CPU, torch.float32, c.kernel) for c in chosen.values()}
    by_hand, _ = logits(lambda name, m: singles[expected[name]](name, m) if name in names else m)
    assert torch.equal(mine, by_hand)
    full, _ = logits(None)
    assert 5 < decibels(full, mine) < 60

    # A saved model is read back by name, and by no shape.
    saved = {name: list(how) for name, how in auto.layers.items()}
    again = AutoQuantizer([], CPU, torch.float32, json.loads(json.dumps(saved)))
    assert torch.equal(mine, logits(again)[0]) and again.layers == auto.layers


def test_the_two_stages_are_the_whole():
    auto = AutoQuantizer([choice(candidate("int8wo"), shape=(96, 64))], CPU, torch.bfloat16)
    one = sample()
    numbers = auto.quantized("a", one.layer)
    assert auto.takes(one.layer) and not auto.layers
    whole, halves = auto("a", one.layer), auto.built("a", numbers)
    assert torch.equal(whole(one.activations), halves(one.activations))
    norm = nn.LayerNorm(4)
    assert not auto.takes(norm) and auto("norm", norm) is norm


def test_a_layer_of_another_shape_is_named():
    auto = AutoQuantizer([choice(candidate("int8wo"), shape=(96, 64))], CPU, torch.bfloat16)
    with pytest.raises(KernelError, match="output is 48 by 64, and autoquant has chosen nothing"):
        auto("output", sample(48).layer)


def test_a_saved_kernel_that_cannot_run_here_is_replaced_and_told():
    auto = AutoQuantizer([], CPU, torch.bfloat16, {"a": ["int8wo", "from elsewhere"]})
    auto("a", sample().layer)
    assert auto.layers["a"][0] == "int8wo" and auto.ran == {auto.layers["a"][1]: 1}
    with pytest.raises(CheckpointError, match="a was saved as 'int9'"):
        AutoQuantizer([], CPU, torch.bfloat16, {"a": ["int9", "torchao"]})


# ---------------------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "graph"])
def test_on_a_gpu(compile, monkeypatch):
    monkeypatch.setattr(race, "last_level_cache", REAL_CACHE)
    one = sample(512, 1024)
    one = Sample("layer", one.layer.cuda(), one.activations.cuda())
    (made,) = choose([one], AutoQuant(int4=True), 1, 35.0, compile=compile)
    timed = {m.candidate.kernel for m in made.measurements if m.timing}
    assert {"torch", "torchao", "triton"} <= timed
    assert made.rotated >= made.cache
    assert all(m.agreement > verdict.AGREEMENT for m in made.measurements if m.timing)


def test_two_processes_keep_each_other_s_timings(tmp_path):
    """Each reads the file, adds an entry and replaces it."""
    path = tmp_path / "timings.json"
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from quantbench.quantize.autoquant import cache\n"
        "for number in range(40):\n"
        "    key = {'writer': sys.argv[2], 'number': number}\n"
        "    cache.write(Path(sys.argv[1]), key, cache.Clock({}, 1, 1))\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    writers = [subprocess.Popen([*command, name]) for name in ("first", "second")]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(json.loads(path.read_text())["timings"]) == 80
