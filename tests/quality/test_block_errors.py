"""Standard errors over dependent values."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.signal import lfilter

from quantbench.quality.block_errors import block_mean
from tests.seeds import new_generator


def passages(generator, windows, tokens, correlation=0.98):
    """Nats of an AR(1) text, mean 2: hard passages and easy ones."""
    steps = generator.standard_normal(windows * tokens) * math.sqrt(1 - correlation**2)
    before = correlation * generator.standard_normal(1)
    nats, _ = lfilter([1], [1, -correlation], steps, zi=before)
    return (2 + nats).reshape(windows, tokens)


def test_the_ratio_estimator_by_hand():
    """Means per token 2, 3, 1 and 2 of 10, 20, 10 and 10 tokens: 110 / 50 = 2.2."""
    estimate = block_mean([20, 60, 10, 20], [10, 20, 10, 10])
    residuals = np.array([-2, 16, -12, -2])
    assert estimate.mean == pytest.approx(2.2) and estimate.freedom == 3
    assert estimate.standard_error == pytest.approx(math.sqrt(4 / 3 * (residuals**2).sum()) / 50)
    low, high = estimate.ends()
    assert high - 2.2 == pytest.approx(3.182 * estimate.standard_error, rel=1e-3)
    assert low + high == pytest.approx(4.4)


def test_equal_windows_are_the_mean_of_their_means():
    windows = new_generator().standard_normal(12) + 5
    estimate = block_mean((windows * 8).tolist(), [8] * 12)
    assert estimate.mean == pytest.approx(windows.mean())
    assert estimate.standard_error == pytest.approx(stats.sem(windows))


def test_tokens_of_one_passage_are_not_independent():
    """Intervals from windows hold the truth as often as they say; from tokens far more seldom.

    Windows are as long as `quality` takes them, twenty times the correlation's length. Of windows
    of 128 tokens, which resemble their neighbours, only 90 % of the intervals held it.
    """
    generator, trials, windows, tokens = new_generator(), 300, 24, 1024
    blocked = independent = 0
    for _ in range(trials):
        nats = passages(generator, windows, tokens)
        low, high = block_mean(nats.sum(1).tolist(), [tokens] * windows).ends(0.95)
        blocked += low <= 2 <= high
        independent += abs(nats.mean() - 2) <= 1.96 * stats.sem(nats.ravel())
    assert blocked >= stats.binom.ppf(1e-4, trials, 0.93)
    assert independent < 0.5 * trials


def test_windows_that_resemble_their_neighbours_are_merged():
    generator = new_generator()
    freedom = []
    for _ in range(20):
        nats = passages(generator, 64, 32, 0.99)  # a window is a third of the correlation's length
        freedom.append(block_mean(nats.sum(1).tolist(), [32] * 64).freedom)
    assert np.median(freedom) < 63 and min(freedom) >= 7
    alone = [
        block_mean(generator.standard_normal(64).tolist(), [1] * 64).freedom for _ in range(40)
    ]
    assert sum(one == 63 for one in alone) >= 25  # 5 % of them are merged by chance


def test_few_windows_have_no_standard_error():
    estimate = block_mean([1.0, 2.0, 3.0], [1, 1, 1])
    assert math.isinf(estimate.standard_error) and estimate.ends() == (-math.inf, math.inf)
