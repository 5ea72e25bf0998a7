"""Curves and passes against a machine whose law is known (tests/estimate/invented.py)."""

import dataclasses
import math

import numpy as np
import pytest

from errors import UsageError
from estimate.calibration import BandwidthPoint, DrawPoint, Speed, WholePoint
from estimate.calibration_models import DEEP, MODELS
from estimate.curves import Curves, between, fit
from estimate.passes import CalibratedMachine, scatter
from models.presets import preset
from tests.estimate import invented


def test_a_law_of_two_terms_is_found():
    """3 µs and 2 ns a byte, of five exact measurements."""
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
    found = fit([[1.0, size] for size in sizes], [3e-6 + 2e-9 * size for size in sizes])
    assert found.coefficients == pytest.approx((3e-6, 2e-9), rel=1e-6)
    assert found.scatter < 1e-9


def test_no_coefficient_is_below_zero():
    """An exact fit would need −1 of the first term."""
    found = fit([[1.0, 10.0], [1.0, 20.0]], [9.0, 19.0])
    assert min(found.coefficients) >= 0


@pytest.mark.parametrize(
    ("at", "expected"),
    [(4, 2.0), (64, 32.0), (16, 8.0), (128, 64.0), (1, 2.0)],  # straight in log-log; flat below
)
def test_between_measured_rows(at, expected):
    assert between({4: 2.0, 64: 32.0}, at) == pytest.approx(expected)


@pytest.mark.parametrize("what", ["bandwidth", "products", "attention", "draws", "wholes"])
def test_a_calibration_that_lacks_something_is_one_line(what):
    calibration = dataclasses.replace(invented.calibration(), **{what: []})
    with pytest.raises(UsageError, match=f"--calibration: it has no {what}; calibrate again"):
        CalibratedMachine(calibration)


@pytest.mark.parametrize("slow", [1.0, 1.4])
def test_products_of_shapes_that_were_not_measured(slow):
    curves = Curves(invented.calibration(slow=slow))
    for scheme in invented.BITS:
        assert curves.product(scheme, 1, 2048, 11264) == pytest.approx(
            slow * invented.product(scheme, 1, 2048, 11264), rel=1e-3
        )
    assert curves.product("none", 1024, 2048, 11264) == pytest.approx(
        slow * invented.product("none", 1024, 2048, 11264), rel=1e-3
    )


def test_more_rows_than_a_calibration_model_s_prompt_go_as_products_alone():
    """Prompts of calibration models have up to 512 rows. Here products of 2048 rows take 1.5 times
    as long for each row as those of 512: in a model, where they take 1.1 times as long, too."""
    calibration = invented.calibration()
    slower = [
        dataclasses.replace(p, seconds=1.5 * p.seconds) if p.rows == 2048 else p
        for p in calibration.products
    ]
    for products, ratio in ((calibration.products, 1.0), (slower, 1.5)):
        curves = CalibratedMachine(dataclasses.replace(calibration, products=products)).curves
        for rows in (2048, 8192):
            assert curves.product("none", rows, 2048, 8192, called=False) == pytest.approx(
                ratio * invented.IN_PLACE * invented.product("none", rows, 2048, 8192), rel=0.02
            )
        assert curves.product("none", 512, 2048, 8192, called=False) == pytest.approx(
            invented.IN_PLACE * invented.product("none", 512, 2048, 8192), rel=0.02
        )


@pytest.mark.parametrize("name", ["TinyLlama-1.1B-Chat-v1.0", "Llama-3.2-1B"])
@pytest.mark.parametrize("scheme", invented.BITS)
def test_models_that_were_not_calibrated(name, scheme):
    """The in-place ratio and the costs of layers and steps come from other models; the law is the
    same, and what is left is the pull towards 1 of the ratio (passes.PRIOR)."""
    machine, config = CalibratedMachine(invented.calibration()), preset(name)
    for rows, depth in ((1, 0), (4, 4096), (16, 100)):
        expected = invented.whole(config, scheme, rows, 1, depth)
        assert machine.step(config, scheme, "dense", rows, depth).seconds == pytest.approx(
            expected, rel=0.02
        )
    expected = invented.whole(config, scheme, 4, 512, 0)
    found = machine.prompt(config, scheme, "dense", 4, 512)
    assert found.seconds == pytest.approx(expected, rel=0.02)


def test_the_scatter_of_a_machine_without_any():
    """One large model alone does not tell a product's ratio (1.1 here) from the costs beside it:
    each fit is off by up to that tenth."""
    assert scatter(invented.calibration()) == pytest.approx({"token": 0, "prompt": 0}, abs=0.1)


def test_a_machine_that_is_slower_now():
    """Steps of an invented machine read weights at memory's speed, prompts multiply: at half of
    memory's speed the one takes twice as long, and the other as long as before."""
    machine, config = CalibratedMachine(invented.calibration()), preset("Llama-3.2-1B")
    half = Speed(invented.MEMORY / 2, invented.ARITHMETIC)
    step = machine.step(config, "none", "dense", 1, 0)
    slower = machine.at_speed(step, half, "none", 1, step=True)
    assert slower.products == pytest.approx(2 * step.products, rel=1e-3)
    prompt = machine.prompt(config, "none", "dense", 1, 512)
    same = machine.at_speed(prompt, half, "none", 512, step=False)
    assert same.products == pytest.approx(prompt.products, rel=1e-3)


def test_attention_goes_with_the_speed_of_memory():
    """The cache is read at memory's speed: at half of it attention takes twice as long."""
    machine, config = CalibratedMachine(invented.calibration()), preset("Llama-3.2-1B")
    half = Speed(invented.MEMORY / 2, invented.ARITHMETIC)
    step = machine.step(config, "none", "dense", 4, 4096)
    slower = machine.at_speed(step, half, "none", 4, step=True)
    assert slower.attention == pytest.approx(2 * step.attention, rel=1e-3)


def test_attention_that_was_measured_while_memory_was_slow():
    calibration = invented.calibration()
    slow = Speed(invented.MEMORY / 2, invented.ARITHMETIC)
    points = [
        dataclasses.replace(p, seconds=2 * p.seconds, speed=slow) if p.queries == 1 else p
        for p in calibration.attention
    ]
    curves = Curves(dataclasses.replace(calibration, attention=points))
    expected = invented.attention(4, 1, 4096, 32, 8, 64)
    size = 4 * 4 * 8 * 64 * 4096  # bytes of keys and values
    config = preset("Llama-3.2-1B")
    assert curves.attention(config, "dense", 4, 1, 4096, size) == pytest.approx(expected, rel=1e-3)


def test_attention_in_a_model_takes_longer_than_alone():
    """By a quarter, in steps behind 8192 positions of every scheme and number of rows."""

    def whole(config, scheme, rows):
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        more = config.num_layers * invented.attention(rows, 1, 8193, *heads) / 4
        return invented.whole(config, scheme, rows, 1, 8192) + more

    calibration = invented.calibration()
    deep = [
        WholePoint(scheme, name, "dense", "cpu-step", rows, 1, 8192,
                   whole(MODELS[name], scheme, rows), invented.SPEED)
        for scheme in invented.BITS for name in DEEP for rows in (1, 4, 16)
    ]  # fmt: skip
    calibration.wholes.extend(deep)
    machine, config = CalibratedMachine(calibration), preset("TinyLlama-1.1B-Chat-v1.0")
    for scheme, rows in (("none", 1), ("int8wo", 4), ("int4wo-128", 16)):
        seconds = machine.step(config, scheme, "dense", rows, 8192).seconds
        assert seconds == pytest.approx(whole(config, scheme, rows), rel=0.02)


@pytest.mark.parametrize("alike", [True, False])
def test_attention_that_does_not_go_with_the_speed_of_memory(alike):
    """Half of the rounds were measured at half of memory's speed. There products took twice as
    long, and attention either twice as long, too, or as long as before."""
    half = Speed(invented.MEMORY / 2, invented.ARITHMETIC)

    def point(scheme, name, rows, speed):
        config, times = MODELS[name], invented.MEMORY / speed.read
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        attention = config.num_layers * invented.attention(rows, 1, 8193, *heads)
        rest = invented.whole(config, scheme, rows, 1, 8192) - attention
        seconds = times * rest + (times if alike else 1) * attention
        return WholePoint(scheme, name, "dense", "cpu-step", rows, 1, 8192, seconds, speed)

    calibration = invented.calibration()
    shallow = [p for p in calibration.wholes if p.tokens == 1]
    calibration.wholes.extend(
        dataclasses.replace(p, seconds=2 * p.seconds, speed=half) for p in shallow
    )
    calibration.wholes.extend(
        point(scheme, name, rows, speed)
        for scheme in invented.BITS for name in DEEP for rows in (1, 4, 16)
        for speed in 3 * (half, invented.SPEED)
    )  # fmt: skip
    machine, config = CalibratedMachine(calibration), preset("Llama-3.2-1B")
    then = machine.curves.speed
    now = invented.SPEED if then == half else half
    step = machine.step(config, "none", "dense", 16, 8192)
    ratio = machine.at_speed(step, now, "none", 16, step=True).attention / step.attention
    assert ratio == pytest.approx(then.read / now.read if alike else 1.0, rel=0.05)


# Bytes of a block, and how many times as fast as memory it is read.
CACHED = ((16 << 20, 4.0), (64 << 20, 2.0), (1 << 30, 1.0))


def with_cache(steep, arithmetic):
    """The invented machine with a cache, of whose steps each weight takes `arithmetic` seconds and
    waits for memory, joined by the norm `steep`."""
    calibration = invented.calibration(
        bandwidth=[BandwidthPoint(n, times * invented.MEMORY, 0.0) for n, times in CACHED]
    )
    wholes = [
        dataclasses.replace(
            p, seconds=cached_step(MODELS[p.model], p.scheme, p.rows, p.depth, steep, arithmetic)
        )
        if p.tokens == 1
        else p
        for p in calibration.wholes
    ]
    return dataclasses.replace(calibration, wholes=wholes)


def cached_step(config, scheme, rows, depth, steep, arithmetic):
    weights = sum(n * k for n, k in config.linear_shapes().values())
    size = invented.BITS[scheme] / 8
    share = np.interp(
        math.log(size * weights), [math.log(n) for n, _ in CACHED], [1 / t for _, t in CACHED]
    )
    waiting = share * size / invented.MEMORY
    joined = (arithmetic**steep + waiting**steep) ** (1 / steep)
    stock = invented.IN_PLACE * weights * size / invented.MEMORY
    return invented.whole(config, scheme, rows, 1, depth) - stock + weights * joined


@pytest.mark.parametrize("steep, arithmetic", [(1.0, 5e-12), (2.0, 2e-11), (3.0, 1e-11)])
@pytest.mark.parametrize("scheme", invented.BITS)
def test_what_a_step_waits_for_is_what_caches_do_not_hold(scheme, steep, arithmetic):
    """By how many bytes it reads, and by whether the kernel computes meanwhile."""
    machine = CalibratedMachine(with_cache(steep, arithmetic))
    small = dataclasses.replace(preset("Llama-3.2-1B").with_layers(1), vocab_size=8192)
    for config in (small, preset("TinyLlama-1.1B-Chat-v1.0")):
        seconds = machine.step(config, scheme, "dense", 1, 0).seconds
        expected = cached_step(config, scheme, 1, 0, steep, arithmetic)
        assert seconds == pytest.approx(expected, rel=0.02)


def test_keys_and_values_wait_as_the_whole_step_does():
    """Memory gives 50 GB/s, and a block of 64 MiB is read at twice that; alone, attention is
    measured with 128 MiB."""
    curves = Curves(with_cache(1.0, 5e-12))
    assert curves.byte_seconds(64 << 20) == pytest.approx(1 / 100e9)
    assert curves.byte_seconds(0) == curves.byte_seconds(1 << 30) == pytest.approx(1 / 50e9)
    config = preset("Llama-3.2-1B")
    few, many = (
        curves.attention(config, "dense", 1, 1, 8192, 1 << 20, among=n) for n in (64 << 20, 0)
    )
    assert many - few == pytest.approx((1 << 20) / 100e9)


def test_a_round_that_was_disturbed_does_not_count():
    """One of three rounds took three times as long: their median is the other two's."""
    calibration = invented.calibration()
    rounds = [dataclasses.replace(p, seconds=3 * p.seconds) for p in calibration.wholes]
    disturbed = dataclasses.replace(calibration, wholes=2 * calibration.wholes + rounds)
    config = preset("Llama-3.2-1B")
    steps = [
        CalibratedMachine(some).step(config, "none", "dense", 1, 0).seconds
        for some in (calibration, disturbed)
    ]
    assert steps[1] == pytest.approx(steps[0])


def test_what_was_measured_beside_another_process_does_not_count():
    """Where arithmetic was read at half of its speed, another process had a core: these rounds,
    which took four times as long, are the larger part of a model's."""
    calibration = invented.calibration()
    half = Speed(invented.MEMORY, invented.ARITHMETIC / 2)
    disturbed = [
        dataclasses.replace(p, seconds=4 * p.seconds, speed=half)
        for p in calibration.wholes if p.model == "wide"
    ]  # fmt: skip
    machine = CalibratedMachine(
        dataclasses.replace(calibration, wholes=calibration.wholes + 2 * disturbed)
    )
    config = preset("Llama-3.2-1B")
    expected = CalibratedMachine(calibration).step(config, "none", "dense", 4, 0).seconds
    assert machine.step(config, "none", "dense", 4, 0).seconds == pytest.approx(expected)


def test_a_prompt_of_many_sequences_is_cut_as_a_run_cuts_it():
    """devices.prefill_chunk: 16 sequences go through 32 positions at a time on a processor."""
    machine, config = CalibratedMachine(invented.calibration()), preset("Llama-3.2-1B")
    whole = machine.prompt(config, "none", "dense", 16, 64)
    halves = machine.prompt(config, "none", "dense", 16, 64, chunk=32)
    assert whole == halves


def test_draws_are_interpolated_between_rows():
    """Rows need not cost alike: here one costs 1 ns a number, 16 rows 3.2 ns, 4 rows between."""
    calibration = invented.calibration(
        draws=[
            DrawPoint(True, rows, vocabulary, vocabulary * each * 1e-9)
            for rows, each in ((1, 1.0), (16, 3.2))
            for vocabulary in (32768, 131072)
        ]
    )
    assert Curves(calibration).draw(4, 65536, True) == pytest.approx(65536e-9 * 3.2**0.5)
