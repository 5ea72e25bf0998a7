"""Curves and passes against a machine whose law is known (tests/estimate/invented.py)."""

import dataclasses
import math

import numpy as np
import pytest

from quantbench.errors import UsageError
from quantbench.estimate.calibration import (
    AttentionPoint,
    BandwidthPoint,
    DrawPoint,
    Speed,
    StackPoint,
    WholePoint,
    copies_of,
)
from quantbench.estimate.calibration_models import DEEP, MODELS
from quantbench.estimate.curves import WIDEST, Curves, between, fit
from quantbench.estimate.passes import CalibratedMachine, scatter
from quantbench.models.presets import preset
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


# Bytes of a stack or a block, and how many times as fast as from memory they are read.
CACHED = ((16 << 20, 4.0), (64 << 20, 2.0), (1 << 30, 1.0))


def cached_share(size):
    """Seconds of a byte among so many ÷ those from memory."""
    return np.interp(math.log(size), [math.log(n) for n, _ in CACHED], [1 / t for _, t in CACHED])


def stacks(name, rows=(1, 4, 16), each=1.0):
    """each: seconds of a byte ÷ those that memory takes."""
    return [
        StackPoint(name, count, n, each * n * cached_share(n) / invented.MEMORY, invented.SPEED)
        for count in rows
        for n in ((16 << 20) << i for i in range(7))
    ]


def cached_step(config, scheme, rows, depth, each):
    """Seconds of a step of the invented machine, if it had a cache: each weight takes IN_PLACE
    times as long as in a stack of all of the model's bytes."""
    size = invented.BITS[scheme] / 8 * sum(n * k for n, k in config.linear_shapes().values())
    from_memory = invented.IN_PLACE * size / invented.MEMORY
    stock = invented.whole(config, scheme, rows, 1, depth)
    return stock + from_memory * (each * cached_share(size) - 1)


@pytest.mark.parametrize("each", [1.0, 2.5])
@pytest.mark.parametrize("scheme", invented.BITS)
def test_weights_of_a_step_take_what_they_take_in_a_stack_of_its_size(scheme, each):
    """Which is not what a block of this size takes: a kernel computes, too."""
    calibration = invented.calibration(
        weight_stacks=[point for name in invented.BITS for point in stacks(name, each=each)]
    )
    wholes = [
        dataclasses.replace(
            p, seconds=cached_step(MODELS[p.model], p.scheme, p.rows, p.depth, each)
        )
        if p.tokens == 1
        else p
        for p in calibration.wholes
    ]
    machine = CalibratedMachine(dataclasses.replace(calibration, wholes=wholes))
    small = dataclasses.replace(preset("Llama-3.2-1B").with_layers(1), vocab_size=8192)
    for config in (small, preset("TinyLlama-1.1B-Chat-v1.0")):
        seconds = machine.step(config, scheme, "dense", 1, 0).seconds
        assert seconds == pytest.approx(cached_step(config, scheme, 1, 0, each), rel=0.02)


@pytest.mark.parametrize(
    "picoseconds, expected",
    [
        ([10, 10, 10, 30, 30, 30, 30], [10, 10, 10, 30, 30, 30, 30]),  # a cliff stays
        ([10, 10, 90, 10, 30, 30, 30], [10, 10, 10, 30, 30, 30, 30]),  # one is unlike the others
        ([10, 10, 10, 30, 30, 30, 60], [10, 10, 10, 30, 30, 30, 30]),  # and it is the last
        ([10, 10, 32, 31, 28, 27, 40], [10, 10, 29, 29, 29, 29, 29]),  # larger ones are not faster
        ([10, 20, 30, 40, 50, 60, 70], [10, 20, 30, 40, 50, 60, 70]),
    ],
)
def test_stacks_that_were_measured_unlike_those_beside_them(picoseconds, expected):
    sizes = [(16 << 20) << i for i in range(len(picoseconds))]
    points = [
        StackPoint("int8wo", 1, size, size * each * 1e-12, invented.SPEED)
        for size, each in zip(sizes, picoseconds, strict=True)
    ]
    curves = Curves(invented.calibration(weight_stacks=points))
    seconds = [curves.waiting("int8wo", 1, size) for size in sizes]  # of a weight, which is a byte
    assert seconds == pytest.approx([each * 1e-12 for each in expected], rel=0.05)
    assert curves.waiting("int8wo", 1, 0) == curves.waiting("int8wo", 1, sizes[-1])


def test_stacks_that_another_process_disturbed_do_not_count():
    """Where arithmetic was read at half of its speed: here they took four times as long."""
    half = Speed(invented.MEMORY, invented.ARITHMETIC / 2)
    quiet = stacks("none")
    disturbed = [dataclasses.replace(p, seconds=4 * p.seconds, speed=half) for p in quiet]
    curves = Curves(invented.calibration(weight_stacks=quiet + 2 * disturbed))
    assert curves.waiting("none", 1, 64 << 20) == pytest.approx(2 / 100e9)


def test_of_several_rounds_of_what_is_measured_alone_the_median_counts():
    """In one of three a neighbour had the last-level cache, which no reading of speed shows."""
    once = invented.calibration(
        weight_stacks=stacks("none"), cache_stacks=stacks("dense", rows=[1], each=1.2)
    )

    def slow(points):
        return [dataclasses.replace(p, seconds=4 * p.seconds) for p in points]

    names = ("attention", "weight_stacks", "cache_stacks")
    of_rounds = {
        name: [*slow(points), *points, *points]
        for name, points in ((name, getattr(once, name)) for name in names)
    }
    curves = [Curves(c) for c in (once, dataclasses.replace(once, **of_rounds))]
    size, config = 64 << 20, preset("Llama-3.2-1B")
    assert len({c.waiting("none", 1, size) for c in curves}) == 1
    assert len({c.cache_waiting("dense", size) for c in curves}) == 1
    for queries in (1, 128):
        how = config, "dense", 1, queries, 4096, 1 << 20
        step_or_prompt = [c.attention(*how) for c in curves]
        assert step_or_prompt[0] == pytest.approx(step_or_prompt[1])


def test_a_prompt_s_weight_takes_the_longer_the_wider_its_product_is():
    """By a tenth for every 1000 inputs, up to as many as calibration models have: nobody measured
    wider ones."""

    def more(config, tokens):
        shapes = [s for name, s in config.linear_shapes().items() if name != "output"]
        wider = [min(k, WIDEST) * invented.product("none", tokens, k, n) for n, k in shapes]
        return 1e-4 * sum(wider)

    calibration = invented.calibration()
    wholes = [
        dataclasses.replace(p, seconds=p.seconds + more(MODELS[p.model], p.rows * p.tokens))
        if p.tokens > 1 and p.scheme == "none"
        else p
        for p in calibration.wholes
    ]
    machine = CalibratedMachine(dataclasses.replace(calibration, wholes=wholes))
    base = preset("Llama-3.2-1B")
    for config in (base, dataclasses.replace(base, ffn_dim=2 * WIDEST)):
        seconds = machine.prompt(config, "none", "dense", 1, 512).seconds
        expected = invented.whole(config, "none", 1, 512, 0) + more(config, 512)
        assert seconds == pytest.approx(expected, rel=0.02)


def test_a_layer_of_a_prompt_takes_as_long_beside_its_products_whatever_the_length():
    """Its calls take 500 µs, also where it has as few rows as a step; a step's layer takes 20."""
    calibration = invented.calibration()
    wholes = [
        dataclasses.replace(
            p, seconds=p.seconds + 480e-6 * MODELS[p.model].num_layers - invented.STEP
        )
        if p.tokens > 1
        else p
        for p in calibration.wholes
    ]
    machine = CalibratedMachine(dataclasses.replace(calibration, wholes=wholes))
    small, each = preset("Qwen3-0.6B").with_layers(4), []
    for tokens in (2, 8, 16, 17, 24, 31, 32, 40, 100, 512):
        parts = machine.prompt(small, "int8wo", "dense", 1, tokens)
        # 5 %: the invented rest of a layer is interpolated between lengths
        assert parts.fixed == pytest.approx(4 * 500e-6, rel=0.05)
        each.append(parts.seconds)
    assert each == sorted(each)
    assert machine.step(small, "int8wo", "dense", 1, 5).fixed == pytest.approx(180e-6, rel=0.05)


def test_keys_and_values_wait_as_the_whole_step_does():
    """Alone, attention was measured in stacks of some size, and took as long as they do."""
    calibration = invented.calibration(cache_stacks=stacks("dense", rows=[1]))
    points = [
        dataclasses.replace(p, seconds=p.seconds * cached_share(copies_of(p.bytes) * p.bytes))
        if p.queries == 1
        else p
        for p in calibration.attention
    ]
    curves = Curves(dataclasses.replace(calibration, attention=points))
    config, size = preset("Llama-3.2-1B"), 4 * 8192 * 8 * 64
    few, many = (
        curves.attention(config, "dense", 1, 1, 8192, size, among=n) for n in (64 << 20, 0)
    )
    assert many == pytest.approx(size / 50e9, rel=0.01)
    assert many - few == pytest.approx(size / 100e9, rel=0.01)


def test_a_calibration_without_stacks_has_blocks():
    """Those of earlier reports (tests/estimate/accuracy_report.py) have none."""
    curves = Curves(
        invented.calibration(
            bandwidth=[BandwidthPoint(n, times * invented.MEMORY, 0.0) for n, times in CACHED]
        )
    )
    assert curves.byte_seconds(64 << 20) == pytest.approx(1 / 100e9)
    assert curves.byte_seconds(0) == curves.byte_seconds(1 << 30) == pytest.approx(1 / 50e9)
    assert curves.waiting("none", 1, 64 << 20) == pytest.approx(2 / 100e9)
    assert curves.cache_waiting("dense", 64 << 20) == pytest.approx(1 / 100e9)


@pytest.mark.parametrize("slots, heads", [(1, 1), (64, 4), (16, 4), (1, 4)])
def test_a_kernel_that_takes_slots_and_heads_in_blocks(slots, heads):
    """A group of five heads takes as long as one of eight where heads are taken in fours, and four
    slots as long as 64 where these are taken at once."""

    def seconds(rows, depth, H, K, E):
        group = -(-H // K // heads) * heads
        blocks = -(-depth // slots) * slots
        return 2e-6 + rows * K * E * (4 * depth / invented.MEMORY + 2e-11 * group * blocks)

    points = [
        AttentionPoint(
            "dense", rows, 1, depth, *shape, 4 * rows * depth * shape[1] * shape[2],
            seconds(rows, depth, *shape), invented.SPEED,
        )
        for shape in ((16, 8, 128), (24, 6, 64), (24, 3, 64), (10, 2, 64))
        for rows in (1, 4, 16) for depth in (4, 250, 2048, 8192)
    ]  # fmt: skip
    chunks = [p for p in invented.calibration().attention if p.queries > 1]
    curves = Curves(invented.calibration(attention=points + chunks))
    config = dataclasses.replace(preset("Llama-3.2-1B"), num_heads=20, num_kv_heads=4, head_dim=128)
    for depth in (5, 8192):
        cached = 4 * depth * 4 * 128 * 4  # rows, slots, key heads, numbers; bytes of key and value
        estimated = curves.attention(config, "dense", 4, 1, depth, cached)
        assert estimated == pytest.approx(seconds(4, depth, 20, 4, 128), rel=0.02)


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
