"""The typical step beside the mean."""

import math

import numpy as np
import pytest
from scipy import stats

from quantbench.compare.figures.contrasts import SampleTimes, contrasts, fit, process_timing
from quantbench.compare.figures.families import Interval
from quantbench.compare.figures.late_steps import LateSteps, late_steps, scatter_sentence
from tests.seeds import new_generator


def processes(generator, blocks, late, late_by=2.0, speeds=None, between=0.005):
    """By arm, the share of steps that take `late_by` steps longer."""
    timings = []
    for block in range(blocks):
        for arm, share in enumerate(late):
            speed = (speeds or [1.0] * len(late))[arm]
            speed *= math.exp(generator.standard_normal() * between)
            samples = []
            for _ in range(4):
                steps = 1 + generator.standard_normal(50) * 0.02
                steps += late_by * (generator.random(50) < share)
                samples.append(SampleTimes(speed, (steps * speed).tolist()))
            timings.append(process_timing(arm, block, samples))
    return timings


def test_an_arm_with_late_steps_is_named():
    timings = processes(np.random.default_rng(11), 8, (0.01, 0.15, 0.01))
    tailed, plain = late_steps(timings)
    assert tailed.disagree and tailed.shares_differ and not plain.disagree
    assert tailed.typical.ratio == pytest.approx(1, abs=0.02)
    # 51 tokens of which 50 steps: 1 + 2 × 0.15 × 50 / 51 against 1 + 2 × 0.01
    assert tailed.mean_over_typical.ratio == pytest.approx(1.294 / 1.02, abs=0.06)
    assert tailed.share == pytest.approx(0.15, abs=0.04)
    assert tailed.sentence().startswith("its typical step takes 1.0")
    assert f"{tailed.share:.1%} of its steps are late" in tailed.sentence()
    assert plain.sentence() == ""


def test_a_prompt_that_is_not_faster_is_the_reason():
    """Steps twice as fast, the prompt as long: 20 of 70 seconds against 20 of 120."""
    generator, timings = np.random.default_rng(5), []
    for block in range(8):
        for arm, step in enumerate((1.0, 0.5)):
            step *= math.exp(generator.standard_normal() * 0.005)
            timings.append(process_timing(arm, block, [SampleTimes(20, [step] * 100)]))
    (steps,) = late_steps(timings)
    assert steps.disagree and not steps.shares_differ
    assert steps.sentence() == (
        "its typical step takes 0.50 × the baseline's: the prompt takes 29% of its time, "
        "17% of the baseline's"
    )


@pytest.mark.parametrize(
    ("shares_differ", "prompt_share", "says"),
    [
        (True, 0.17, "20.0% of its steps are late, 1.0% of the baseline's"),
        (True, 0.29, "20.0% of its steps are late, 1.0% of the baseline's"),
        (False, 0.29, "the prompt takes 29% of its time, 17% of the baseline's"),
        (False, 0.17, "1.0% of the baseline's (these shares cannot be told apart)"),
    ],
)
def test_the_reason_is_the_share_that_differs_late_steps_first(shares_differ, prompt_share, says):
    typical, mean = (Interval(1, ratio, ratio, ratio, 0.98, 8, 7) for ratio in (1.0, 1.2))
    steps = LateSteps(1, typical, mean, 0.2, 0.01, shares_differ, prompt_share, 0.17)
    assert steps.sentence().endswith(says)


def test_late_steps_of_both_arms_are_no_disagreement():
    (steps,) = late_steps(processes(np.random.default_rng(7), 8, (0.1, 0.1), speeds=[1, 0.7]))
    assert not steps.disagree and not steps.shares_differ
    assert steps.typical.ratio == pytest.approx(0.7, abs=0.02)


def test_arms_without_late_steps_are_not_told_apart_by_nothing():
    (steps,) = late_steps(processes(new_generator(), 5, (0.0, 0.0)))
    assert steps.share == steps.baseline_share == 0 and not steps.shares_differ


def test_equal_shares_are_seldom_called_different():
    generator, trials = new_generator(), 120
    wrong = sum(
        late_steps(processes(generator, 5, (0.05, 0.05)))[0].shares_differ for _ in range(trials)
    )
    assert wrong <= stats.binom.isf(1e-4, trials, 0.02)


def test_few_processes_say_nothing():
    (steps,) = late_steps(processes(new_generator(), 2, (0.0, 0.3)))
    assert not steps.disagree and steps.typical.word == "range"


def test_the_machines_scatter_in_words():
    # A fixed seed: one draw in a hundred has an arm that scatters otherwise, and is judged alone.
    timings = processes(np.random.default_rng(4), 9, (0.0, 0.0, 0.0), between=0.03)
    sentence = scatter_sentence(fit(contrasts(timings)))
    assert "16 degrees of freedom" in sentence and "%" in sentence
    alone = scatter_sentence(fit(contrasts(timings[:3])))
    assert alone == "too few processes to say how far they scatter on this machine"
