"""From samples to the statistics' observations, and rows, by hand."""

import math

import pytest

from quantbench.compare.figures import timings
from quantbench.compare.figures.contrasts import SampleTimes, contrasts, fit, process_timing
from quantbench.compare.figures.plan import Plan
from quantbench.compare.figures.rows import best_of, rows
from quantbench.compare.output.tables import remarks, terminal
from quantbench.compare.sampling.answers import Reading
from quantbench.compare.sampling.results import ArmResult, ArmSample, Results, Settings
from quantbench.quality.types import Quality
from tests.compare.facts import arm_facts


def sample(block, round, seconds, process=None, started=0.0, steps=3):
    whole = seconds * (steps + 1)
    return ArmSample(
        prefill_seconds=seconds,
        decode_seconds=seconds * steps,
        tok_s=(steps + 1) / whole,
        prefill_tok_s=7 / seconds,
        decode_tok_s=1 / seconds,
        token_seconds=[seconds] * steps,
        peak_memory_bytes={"resident": 3},
        block=block,
        round=round,
        process=block if process is None else process,
        started=started,
    )


def results(*arms, in_turn=False, blocks=0, **more):
    """Each arm's samples, the baseline's first."""
    found = [
        ArmResult(f"arm {n}", "", [], arm_facts(), None, list(own)) for n, own in enumerate(arms)
    ]
    made = Results(Settings(tokens=0), found, "none", in_turn=in_turn, blocks=blocks, **more)
    made.ended = "precise"
    return made


def looked(made):
    """With one look at all there is, as at the end of a run."""
    fitted = fit(timings.of(made))
    plan = Plan(len(made.arms) - 1, int(fitted.blocks.max()))
    made.looks = [plan.look([], fitted)]
    return made


def blocks_of(*seconds, round_each=2):
    return [
        sample(block, block * round_each + n, value) for block, value in enumerate(seconds)
        for n in range(round_each)
    ]  # fmt: skip


def test_side_by_side_a_process_is_an_observation():
    made = results(blocks_of(1.0, 2.0), blocks_of(0.5, 1.5))
    found = timings.process_timings(made)
    assert [(t.arm, t.block, t.seconds_per_token) for t in found] == [
        (0, 0, 1.0), (0, 1, 2.0), (1, 0, 0.5), (1, 1, 1.5),
    ]  # fmt: skip


def test_a_block_that_is_not_whole_waits_until_it_is():
    made = results(blocks_of(1.0, 9.0), blocks_of(0.5, 0.5), blocks=1)
    assert {timing.block for timing in timings.process_timings(made)} == {0}


def test_decoding_leaves_out_the_prompt():
    """Three steps of 0.1 s behind a prompt of 7 s are three tokens in 0.3 s."""
    own = sample(0, 0, 0.1)
    own = ArmSample(**{**vars(own), "prefill_seconds": 7.0})
    made = results([own], [own])
    (timing, _) = timings.decode_timings(made)
    assert timing.seconds_per_token == pytest.approx(0.1)
    (whole, _) = timings.process_timings(made)
    assert whole.seconds_per_token == pytest.approx(7.3 / 4)


def test_in_turn_each_turn_is_an_observation_with_its_bandwidth():
    """Baseline at 0 s and 10 s, the arm at 5 s: half of each. The baseline stays one process."""
    base = [sample(0, 0, 1.0, started=0.0), sample(0, 2, 4.0, started=10.0)]
    made = results(base, [sample(0, 1, 2.0, started=5.0)], in_turn=True)
    made.bandwidth = {"cpu": [Reading(1e9 * n, n - 1, "fake") for n in (1, 2, 3)]}
    found = timings.process_timings(made)
    assert [(t.arm, t.time, t.bandwidth, t.process) for t in found] == [
        (0, 0.0, 1e9, 0), (0, 10.0, 3e9, 0), (1, 5.0, 2e9, 0),
    ]  # fmt: skip
    values = timings.of(made)
    assert values.values[0, 0] == pytest.approx(math.log(2) - (math.log(1) + math.log(4)) / 2)


@pytest.mark.parametrize("processes, weights", [((0, 0), [1.0, 0.0]), ((0, 1), [0.5, 0.5])])
def test_what_a_process_differs_by_is_common_to_its_turns(processes, weights):
    def turn(arm, process, time):
        return process_timing(arm, 0, [SampleTimes(1.0, [1.0], time)], process=process)

    first, second = processes
    found = contrasts([turn(0, first, 0.0), turn(1, 0, 1.0), turn(0, second, 2.0)])
    assert found.weights[0, 0].tolist() == pytest.approx(weights)


# --------------------------------------------------------------------------------- rows


def test_a_row_by_hand():
    """Four blocks in which the arm takes half as long: log 0.5 each, without any scatter."""
    made = looked(results(blocks_of(1, 2, 1, 2), blocks_of(0.5, 1, 0.5, 1)))
    baseline, row = rows(made)
    assert row.verdict == "faster" and baseline.verdict == "baseline"
    for found in (row.speed_up, row.typical_step):
        assert found.value == pytest.approx(2) and found.low == pytest.approx(found.high)
    assert row.ratio_latency.value == pytest.approx(0.5)
    assert row.speed_up.confidence == 0.98 and row.speed_up.word == "98 % interval"
    assert row.can_be_best is True and baseline.can_be_best is False
    assert row.processes == 4
    assert row.command.startswith("python generate.py ")


def test_the_interval_is_students():
    """Log ratios ±a in turn, four blocks: mean 0, standard error 2a / √3 / 2; Student's t of 3
    degrees of freedom at 1 - 0.8 × 2 % is 4.930, and both sides of 1 are in the interval."""
    a = 0.01
    up, down = math.exp(a), math.exp(-a)
    made = looked(results(blocks_of(1, 1, 1, 1), blocks_of(up, down, up, down)))
    _, row = rows(made)
    reach = 4.930 * (2 * a / math.sqrt(3)) / 2
    assert row.speed_up.high == pytest.approx(math.exp(reach), rel=1e-4)
    assert row.verdict == "no difference shown"


def test_of_three_processes_there_is_a_range():
    made = looked(results(blocks_of(1, 1, 1), blocks_of(0.5, 0.4, 0.8)))
    _, row = rows(made)
    assert row.speed_up.word == "range" and row.verdict == "no difference shown"
    assert (row.speed_up.low, row.speed_up.high) == pytest.approx((1 / 0.8, 1 / 0.4))
    assert "(range 1.25 to 2.50)  too few processes" in terminal(made, rows(made))
    assert "95 %" not in terminal(made, rows(made))


def test_those_that_cannot_be_told_from_the_fastest_are_named():
    made = looked(results(*(blocks_of(*[s] * 4) for s in (1.0, 0.5, 0.5, 0.9))))
    for arm in made.arms:  # a little scatter, the same in both of the fast ones
        arm.samples = [ArmSample(**{**vars(s), "started": 1.0}) for s in arm.samples]
    found = rows(made)
    assert [row.can_be_best for row in found] == [False, True, True, False]
    assert "these 2 cannot be told from the fastest: arm 1, arm 2" in remarks(made, found)
    assert best_of(made)([0, 3]) == {3} and best_of(made)([2, 3]) == {2}


def test_of_many_arms_the_reasons_are_in_the_report_alone():
    made = looked(results(*[blocks_of(1, 1)] * 10))
    assert any("memory-bound" in line for line in remarks(made, with_reasons(made)))
    shown = terminal(made, with_reasons(made))
    assert "memory-bound" not in shown and "in the report (--output DIR, or -o md)" in shown


def with_reasons(made):
    found = rows(made)
    for row in found:
        row.why = ["not memory-bound"]
    return found


def test_quality_on_another_model_is_carried():
    made = looked(results(blocks_of(1, 1), blocks_of(1, 1)))
    scores = Quality(64, 8.0, 0.1, 1.5, 0.1, perplexity_ratio_interval=[1.4, 1.6])
    made.arms[1].quality = scores
    row = rows(made)[1]
    assert row.perplexity_ratio.value == 1.5 and row.perplexity_ratio.high == 1.6


def test_without_samples_nothing_is_claimed():
    made = results([], [])
    made.arms[1].samples = []
    assert [row.verdict for row in rows(made)] == ["baseline", "not measured"]
    assert rows(made)[1].speed_up is None
