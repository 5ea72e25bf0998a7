"""How a comparison is run, with workers that have no model: order, looks, budgets, failures."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from quantbench.answer.rows import rows
from quantbench.bench.arm import make_arms
from quantbench.compare.figures.plan import shown
from quantbench.compare.sampling.comparison import (
    MOST_SAMPLES,
    SAMPLES,
    SAMPLES_IN_TURN,
    SETTLING,
    Comparison,
    turns,
)
from quantbench.compare.sampling.results import Results, Settings
from quantbench.errors import UsageError
from quantbench.log.config import RunConfig
from tests.bench.world import Behaviour, World

COMMON = RunConfig(max_new_tokens="4")
ARMS = ("--quantization none", "--quantization int8wo", "--quantization fp6")
MANY = [f"--cache_size {10 + n}" for n in range(10)]
EQUAL = Behaviour(between=0.01, noise=0.002)


def begin(arms=ARMS, **settings):
    settings = {"max_minutes": 1000, **settings}
    return Results.begin(Settings(**settings), make_arms(COMMON, arms), "none")


@pytest.fixture
def compare(monkeypatch):
    """Run what `results` asks for in a world of these behaviours; its rows."""

    def run(results, world, folder=None, say=lambda line: None, **more):
        world.install(monkeypatch)
        Comparison(results, folder, say, world.command, **more).run()
        return rows(results)

    return run


def all_equal(count, **more):
    return World.of(*[EQUAL] * count, **more)


# ------------------------------------------------------------------------------- looks, verdicts


def test_plain_differences_are_settled_at_the_first_look(compare):
    results = begin()
    world = World.of(EQUAL, replace(EQUAL, seconds=0.5), replace(EQUAL, seconds=2))
    found = compare(results, world)
    assert results.ended == "precise" and results.blocks == 4
    assert [(look.kind, look.blocks) for look in results.looks] == [("first", 4)]
    assert [row.verdict for row in found] == ["baseline", "faster", "slower"]
    for row, speed in zip(found[1:], (2, 0.5), strict=True):
        assert row.speed_up.low < speed < row.speed_up.high and row.speed_up.confidence == 0.98
        assert row.ratio_throughput.value == pytest.approx(1 / row.speed_up.value)
        assert row.ratio_latency.value == pytest.approx(1 / speed, rel=0.05)
        assert row.typical_step.value == pytest.approx(speed, rel=0.05)
    assert found[1].processes == 4 and found[1].samples == 4 * SAMPLES
    assert found[1].can_be_best and not found[2].can_be_best and not found[0].can_be_best


def test_equal_arms_are_measured_to_the_precision_or_the_end(compare):
    results = begin(ARMS[:2], processes=8)
    found = compare(results, all_equal(2))
    assert [look.kind for look in results.looks][0] == "first" and results.looks[-1].kind == "final"
    assert results.blocks == results.looks[-1].blocks <= 8
    assert found[1].verdict == "no difference shown" and found[1].can_be_best


def test_of_one_process_there_is_a_range_and_no_verdict(compare):
    results = begin(ARMS[:2], processes=1)
    found = compare(results, World.of(EQUAL, replace(EQUAL, seconds=3)))
    assert results.ended == "processes" and results.blocks == 1
    assert found[1].verdict == "no difference shown"
    assert found[1].speed_up.confidence is None and found[1].speed_up.word == "range"
    assert found[1].speed_up.value == pytest.approx(1 / 3, rel=0.1)


def test_late_steps_decide_the_verdict_and_not_the_typical_step(compare):
    """One of three steps takes ten times as long: 13 ÷ 4 of the baseline's seconds, though the
    typical step is the same."""
    exact = Behaviour(between=0.001)
    found = compare(begin(ARMS[:2]), World.of(exact, replace(exact, late=1)))
    assert found[1].verdict == "slower"
    assert found[1].speed_up.value == pytest.approx(4 / 13, rel=0.01)
    assert found[1].typical_step.value == pytest.approx(1, rel=0.01)


def test_a_loser_is_dropped_once_it_is_settled(compare):
    """Two arms near the top stay; the slow one has the processes of the first look alone."""
    results = begin(processes=8, precision=0.001)
    quick = replace(EQUAL, seconds=0.995)
    found = compare(results, World.of(EQUAL, quick, replace(EQUAL, seconds=2)))
    assert [row.dropped for row in found] == [False, False, True]
    assert found[2].processes == 4 < found[1].processes == 8
    assert found[2].verdict == "slower" and found[2].can_be_best is False


# ------------------------------------------------------------------------------- order


def test_blocks_alternate_in_order_and_rounds_within_them(compare):
    world = all_equal(2)
    results = begin(ARMS[:2], processes=4)
    compare(results, world)
    assert world.asked("load")[:4] == [0, 1, 1, 0]
    per_block = 2 * (SETTLING + SAMPLES)
    assert world.asked("sample")[:per_block] == [0, 1] * SETTLING + [0, 1, 1, 0] * (SAMPLES // 2)
    assert world.asked("sample")[per_block : 2 * per_block] == (
        [1, 0] * SETTLING + [1, 0, 0, 1] * (SAMPLES // 2)
    )
    for arm in results.arms:
        blocks = Counter((sample.block, sample.process) for sample in arm.samples)
        assert blocks == {(n, n): SAMPLES for n in range(4)}
    starts = [sample.started for sample in results.baseline.samples]
    assert starts == sorted(starts) and starts[0] >= 1000


def test_turns_have_the_baseline_around_every_three_arms():
    assert turns([1]) == [0, 1, 0]
    assert turns([1, 2, 3]) == [0, 1, 2, 3, 0]
    assert turns([4, 3, 2, 1]) == [0, 4, 3, 2, 0, 1, 0]


def test_in_turn_the_baseline_stays_and_the_others_come_and_go(compare):
    world = all_equal(5)
    results = begin([*ARMS, "--cache_size 9", "--cache_size 8"], in_turn=True, processes=2)
    compare(results, world)
    assert world.turns() == [0, 1, 2, 3, 0, 4, 0, 4, 3, 2, 0, 1, 0]
    assert world.asked("load") == [0, 1, 2, 3, 4, 0, 4, 3, 2, 1]
    assert results.baseline.processes == 2
    counts = Counter(sample.round for arm in results.arms for sample in arm.samples)
    assert counts == {n: SAMPLES_IN_TURN for n in range(14)}
    assert [reading.round for reading in results.bandwidth["cpu"]] == list(range(14))


def test_arms_that_do_not_fit_together_are_loaded_in_turn(compare):
    said = []
    world = World.of(*[replace(EQUAL, fits_beside=0)] * 3)
    results = begin(processes=2)
    found = compare(results, world, say=said.append)
    assert results.in_turn and any("loaded in turn" in line for line in said)
    assert world.turns() == [0, 1, 2, 0, 0, 2, 1, 0][:3] + [0, 2, 1, 0]
    assert [row.samples for row in found[1:]] == [2 * SAMPLES_IN_TURN] * 2
    assert found[1].kl == 0.5 and world.asked("quality").count(1) == 1
    assert results.baseline.processes == 4  # before and after, in two blocks


def test_in_turn_drift_between_the_baselines_cancels(compare):
    """The machine becomes slower by more than 5 % while the run lasts; the arm is as fast."""
    exact = Behaviour(seconds=1.0)
    results = begin(ARMS[:2], in_turn=True, processes=2)
    found = compare(results, World.of(exact, exact, drift=0.001))
    first, *_, last = (sample.prefill_seconds for sample in results.baseline.samples)
    assert last > 1.05 * first
    assert found[1].speed_up.value == pytest.approx(1, abs=0.002)


def test_many_arms_are_loaded_in_turn_twice(compare):
    results = begin(MANY)
    found = compare(results, all_equal(10))
    assert results.in_turn and results.blocks == 2 and len(results.looks) == 1
    assert all(row.processes == 2 for row in found)
    assert all(row.speed_up.confidence == 0.98 for row in found[1:])  # 9 degrees of freedom


# ------------------------------------------------------------------------------- budgets


def test_minutes_of_measuring_set_the_number_of_blocks(compare):
    """A sample takes 4 s: a block of 2 arms 40 s of measuring, loading 1000 s, which do not count.
    Five minutes hold 7 such blocks, and an even number is 6."""
    exact = Behaviour(between=0.1, loading=1000.0)
    results = begin(ARMS[:2], max_minutes=5, processes=16)
    compare(results, World.of(exact, exact))
    assert results.plan.most_blocks == 6 and results.blocks == 6
    assert results.ended == "max_minutes"
    assert results.measuring_seconds == pytest.approx(6 * 40, rel=0.2)


def test_short_of_time_there_are_fewer_samples(compare):
    """A sample takes 400 s. The first look needs four blocks of two arms, so 200 minutes hold three
    samples a process, one of which is not counted: a block takes 40 minutes."""
    slow = Behaviour(seconds=100.0)
    results = begin(ARMS[:2], max_minutes=200)
    compare(results, World.of(slow, slow))
    counts = Counter(sample.block for sample in results.arms[1].samples)
    assert set(counts.values()) == {2} and results.blocks == 4
    results = begin(ARMS[:2], max_minutes=60, samples=5, processes=1)
    compare(results, World.of(slow, slow))
    assert len(results.arms[1].samples) == 5


@pytest.mark.parametrize(("step", "samples"), [(0.01, 8), (1e-5, MOST_SAMPLES), (1.0, SAMPLES)])
def test_short_samples_are_more(compare, step, samples):
    """A sample has 4 tokens: of 0.04 s, 8 make the 0.3 s that are worth starting a process."""
    results = begin(ARMS[:2])
    compare(results, World.of(*[Behaviour(seconds=step, between=0.01)] * 2))
    assert set(Counter(sample.block for sample in results.arms[1].samples).values()) == {samples}


def test_progress_says_where_it_is_and_how_long_it_takes(compare, monkeypatch):
    said = []
    world = World.of(*[replace(EQUAL, loading=50.0)] * 10)
    compare(begin(MANY, processes=2), world, say=said.append)
    assert any("arm 9 of 9" in line and "block 1 of 2" in line for line in said)
    assert any("min left" in line for line in said)
    assert any(line.startswith("After 2 processes of each arm: ") for line in said)


# ------------------------------------------------------------------------------- failures


def test_an_arm_that_is_killed_gets_its_reason_and_the_others_go_on(compare):
    results = begin()
    world = World.of(EQUAL, replace(EQUAL, dies_at=7), replace(EQUAL, seconds=0.5))
    found = compare(results, world)
    assert "killed (SIGKILL)" in found[1].failed and found[1].verdict == "failed"
    assert found[1].speed_up is None and found[1].can_be_best is None
    assert found[2].verdict == "faster"


def test_without_baseline_the_others_are_measured_once(compare):
    results = begin()
    found = compare(results, World.of(replace(EQUAL, fails_to_load=True), EQUAL, EQUAL))
    assert results.ended == "baseline failed" and results.blocks == 1
    assert [row.verdict for row in found] == ["failed", "no baseline", "no baseline"]
    assert found[1].tok_s == pytest.approx(1, rel=0.1)


def test_nothing_left_to_measure(compare):
    bad = replace(EQUAL, fails_to_load=True)
    results = begin(ARMS[:2])
    assert [row.failed for row in compare(results, World.of(bad, bad))] == ["no such thing"] * 2
    assert results.ended == "baseline failed" and results.rounds == 0
    results = begin(ARMS[:2])
    compare(results, World.of(EQUAL, bad))
    assert results.ended == "nothing to compare with"


def test_an_arm_that_fits_nowhere_fails(compare):
    results = begin(ARMS, in_turn=True, processes=2)
    found = compare(results, World.of(EQUAL, replace(EQUAL, fails_to_load=True), EQUAL))
    assert found[1].verdict == "failed" and found[2].processes == 2


# ------------------------------------------------------------------------------- interruptions


def interrupt(world, after):
    """As Ctrl-C would, before the sample of that number."""
    left = [after]

    def hook():
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    world.at_sample = hook


@pytest.mark.parametrize("in_turn", [False, True])
def test_interrupted_and_gone_on_with(compare, tmp_path, in_turn):
    """Whole blocks stay, the rest of an unfinished one goes; the plan is the one it was."""
    world = all_equal(2)
    results = begin(ARMS[:2], processes=6, in_turn=in_turn, precision=0.001)
    per_block = 2 * (SETTLING + SAMPLES) if not in_turn else 3 * SAMPLES_IN_TURN + SETTLING
    interrupt(world, 2 * per_block + 3)
    found = compare(results, world, folder=tmp_path)
    assert results.ended == "interrupted" and results.blocks == 2
    assert [look.kind for look in results.looks] == ["interrupted"]
    assert results.looks[0].blocks == 2 and found[1].speed_up.confidence is None
    kept = Results.load(tmp_path)
    before = [[sample for sample in arm.samples if sample.block < 2] for arm in kept.arms]
    kept.ended = None
    compare(kept, all_equal(2, seed=1), folder=tmp_path)
    assert kept.ended == "processes" and kept.blocks == 6
    assert [look.kind for look in kept.looks] == ["interrupted", "first", "final"]
    for arm, old in zip(kept.arms, before, strict=True):
        assert arm.samples[: len(old)] == old
    per_process = Counter((sample.block, sample.round) for sample in kept.arms[1].samples)
    each = {SAMPLES_IN_TURN} if in_turn else {1}
    assert set(per_process.values()) == each


def test_an_interruption_spends_its_own_level_and_no_other(compare):
    """figures/plan.py: 5 % of the level, times 2 ÷ (k (k + 1)) after k blocks."""
    world = all_equal(2)
    results = begin(ARMS[:2])
    interrupt(world, 3 * 2 * (SETTLING + SAMPLES) + 1)
    compare(results, world)
    assert results.looks[0].level == pytest.approx(0.02 * 0.05 * 2 / (3 * 4))


def test_interrupted_at_what_was_seen_before_there_is_no_new_look(compare, tmp_path):
    world = all_equal(2)
    results = begin(ARMS[:2], processes=6, precision=0.001)
    interrupt(world, 4 * 2 * (SETTLING + SAMPLES) + 1)
    compare(results, world)
    assert [look.kind for look in results.looks] == ["first"]


def test_interrupted_in_the_first_block_there_are_ranges(compare):
    world = all_equal(3)
    results = begin()
    interrupt(world, 3 * SETTLING + 4)
    found = compare(results, world)
    assert results.blocks == 0 and found[1].speed_up.word == "range"


def test_an_estimate_follows_the_first_block(compare):
    """Loading takes 50 s an arm, and 5 samples of 4 s each: 140 s a block, four to the look."""
    said = []
    exact = Behaviour(loading=50.0, between=0.001)
    compare(begin(ARMS[:2], processes=4), World.of(exact, exact), say=said.append)
    (line,) = [line for line in said if line.startswith("The first block is done")]
    assert line == "The first block is done; about 7 min left"


def test_in_turn_whole_groups_of_an_unfinished_block_stay(compare, tmp_path):
    """A B C D A is kept, of E A nothing."""
    arms = [*ARMS, "--cache_size 9", "--cache_size 8"]
    world = all_equal(5)
    results = begin(arms, in_turn=True, processes=1)
    interrupt(world, 5 * SAMPLES_IN_TURN + SETTLING + 2)
    compare(results, world, folder=tmp_path)
    kept = Results.load(tmp_path)
    kept.ended, again = None, all_equal(5, seed=1)
    compare(kept, again)
    assert again.turns() == [0, 4, 0] and kept.blocks == 1
    assert [len(arm.samples) for arm in kept.arms] == [12, 3, 3, 3, 3]


def test_a_finished_comparison_loads_nothing(compare, tmp_path):
    results = begin(ARMS[:2], processes=2)
    compare(results, all_equal(2), folder=tmp_path)
    again, world = Results.load(tmp_path), all_equal(2)
    compare(again, world, folder=tmp_path)
    assert again.ended == "processes" and not world.journal


def test_more_processes_are_an_extension_with_a_level_of_its_own(compare, tmp_path):
    """figures/plan.py: the k-th extension has 5 % of the level ÷ 2^k."""
    results = begin(ARMS[:2], processes=4, precision=0.001)
    compare(results, all_equal(2), folder=tmp_path)
    for number, processes in enumerate((8, 10), 1):
        again = Results.load(tmp_path)
        again.settings = replace(again.settings, processes=processes)
        again.ended = None
        compare(again, all_equal(2, seed=number), folder=tmp_path, extend=True)
        assert again.blocks == processes and again.looks[-1].kind == "extension"
        assert again.looks[-1].level == pytest.approx(0.02 * 0.05 / 2**number)
    assert sum(look.level for look in again.looks) < 0.02


def test_fewer_processes_than_planned_are_an_interruption(compare, tmp_path):
    results = begin(ARMS[:2], processes=12, precision=0.001)
    world = all_equal(2)
    interrupt(world, 5 * 2 * (SETTLING + SAMPLES) + 1)
    compare(results, world, folder=tmp_path)
    kept = Results.load(tmp_path)
    kept.ended, kept.settings = None, replace(kept.settings, processes=6)
    compare(kept, all_equal(2), extend=True)
    assert kept.blocks == 6 and kept.ended == "processes"
    assert [look.kind for look in kept.looks][-1] in ("middle", "interrupted")


def test_an_extension_without_anything_more_to_do_ends_as_before(compare, tmp_path):
    results = begin(ARMS[:2], processes=2)
    compare(results, all_equal(2), folder=tmp_path)
    again, world = Results.load(tmp_path), all_equal(2)
    again.ended = None
    compare(again, world, folder=tmp_path, extend=True)
    assert again.ended == "processes" and len(again.looks) == 1 and not world.asked("load")


def test_looks_are_kept_and_read_back(compare, tmp_path):
    results = begin(ARMS[:2])
    compare(results, World.of(EQUAL, replace(EQUAL, seconds=0.5)), folder=tmp_path)
    again = Results.load(tmp_path)
    assert again.looks == results.looks and again.plan == results.plan
    assert shown(again.looks)[1].verdict == "faster" and math.isfinite(shown(again.looks)[1].high)


# ------------------------------------------------------------------------------- what is kept


def test_each_arm_is_estimated_once_and_by_no_arm_s_process(compare):
    """The estimator's memory would count as the arm's."""
    world = all_equal(3)
    found = compare(begin(processes=2), world)
    assert world.expected == [(False, scheme) for scheme in ("none", "int8wo", "fp6")]
    assert all(row.estimated["token_seconds"] == 0.5 for row in found)


def test_quantized_arms_are_kept_until_the_run_has_ended(compare, tmp_path):
    saved = []
    world = all_equal(2)
    world.at_sample = lambda: saved.extend(process.saved for process in world.alive)
    (tmp_path / "arms" / "1").mkdir(parents=True)
    results = begin(ARMS[:2], processes=2)
    compare(results, world, folder=tmp_path)
    assert set(filter(None, saved)) == {str(tmp_path / "arms" / "0"), str(tmp_path / "arms" / "1")}
    assert not (tmp_path / "arms").exists()


def test_after_ctrl_c_they_stay_for_resume(compare, tmp_path):
    world = all_equal(2)
    interrupt(world, 4)
    (tmp_path / "arms" / "1").mkdir(parents=True)
    compare(begin(ARMS[:2]), world, folder=tmp_path)
    assert (tmp_path / "arms" / "1").exists()


def test_a_fixed_measurement_has_its_rounds_and_one_look(compare):
    results = Results.begin(Settings.of_rounds(8, 4), make_arms(COMMON, ARMS), "none")
    compare(results, all_equal(3), probe_rounds=True)
    assert results.rounds == 8 and results.blocks == 4 and len(results.looks) == 1
    assert [reading.round for reading in results.bandwidth["cpu"]] == list(range(8))
    results = Results.begin(Settings.of_rounds(1, 4), make_arms(COMMON, ARMS), "none")
    compare(results, all_equal(3))
    assert results.rounds == 1 and results.blocks == 1


def test_memory_is_that_of_the_first_process(compare):
    """Later ones load the saved quantized form, with other peaks."""
    results = begin(ARMS[:2], processes=2)
    compare(results, all_equal(2))
    for arm in results.arms:
        arm.samples = [
            replace(sample, peak_memory_bytes={"resident": 5 + sample.process + sample.round})
            for sample in arm.samples
        ]
    assert rows(results)[1].peak_memory_bytes["generate"] == {"resident": 5 + SAMPLES - 1}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"commit": "0" * 40}, "commit"),
        ({"machine": "an abacus"}, "machine"),
        ({"versions": {"torch": "1.0"}}, "torch"),
    ],
)
def test_samples_of_another_origin_are_not_mixed(changes, what):
    results = Results.begin(Settings.of_rounds(8, 4), make_arms(COMMON, ARMS), "none")
    results.require_same_origin("--resume out")
    commit = results.about.commit.removesuffix("-dirty")  # the tests may run before a commit
    results.about = replace(results.about, commit=f"{commit}-dirty")
    results.require_same_origin("--resume out")  # a log that grew in the checkout
    results.about = replace(results.about, **changes)
    with pytest.raises(UsageError, match=f"with {what} .*mixed"):
        results.require_same_origin("--resume out")
