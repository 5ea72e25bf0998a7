"""Curves and passes against a machine whose law is known (tests/estimate/invented.py)."""

import pytest

from estimate.calibration import DrawPoint, Speed
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
