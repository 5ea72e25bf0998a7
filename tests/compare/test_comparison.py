"""How a comparison is run, with workers that have no model: order, stopping, failures, resuming."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchlog.config import RunConfig
from compare.figures.rows import rows
from compare.sampling.arm import make_arms
from compare.sampling.comparison import SAMPLES_PER_TURN, SETTLING_ROUNDS, TURNS, Comparison
from compare.sampling.results import Results, Settings

FAKE = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))
COMMON = RunConfig(max_new_tokens="4")
ARMS = ("--quantization none", "--quantization int8wo", "--quantization fp6")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("compare.sampling.comparison.SETTLED", 0)


def begin(arms=ARMS, **settings):
    return Results.begin(Settings(**{"processes": 1, **settings}), make_arms(COMMON, arms), "none")


def compare(results, *behaviours, folder=None, say=lambda line: None):
    def command(number):
        return (*FAKE, *(behaviours[number] if number < len(behaviours) else ()))

    comparison = Comparison(results, folder, say, command)
    comparison.run()
    return rows(results)


def test_it_stops_when_all_ratios_are_narrow():
    results = begin(processes=6)
    found = compare(results, ["--seconds", "1"], ["--seconds", "0.5"], ["--seconds", "2"])
    assert results.ended == "precise" and results.rounds == 40
    assert [row.verdict for row in found] == ["baseline", "faster", "slower"]
    for row, ratio in zip(found[1:], (0.5, 2), strict=True):
        for name in ("ratio_latency", "ratio_throughput"):
            interval = getattr(row, name)
            assert interval.low <= interval.value <= interval.high
            assert interval.value == pytest.approx(ratio, rel=0.005)
    assert found[1].in_words.startswith("100% faster: 2.0")
    assert found[2].in_words.startswith("50% slower: 0.5")


def test_it_stops_at_the_most_rounds_and_minutes():
    noisy = ["--noise", "2"]
    results = begin(max_rounds=7)
    compare(results, noisy, noisy, noisy)
    assert results.ended == "max_rounds" and results.rounds == 7
    results = begin(max_minutes=0)
    compare(results, noisy, noisy, noisy)
    assert results.ended == "max_minutes" and results.rounds == 1


def test_a_round_is_one_sample_an_arm_in_an_order_drawn_anew(tmp_path):
    journal = ["--journal", str(tmp_path / "journal"), "--noise", "2"]
    compare(begin(max_rounds=40), journal, journal, journal)
    asked = [line.split() for line in (tmp_path / "journal").read_text().splitlines()]
    sampled = [pid for pid, what in asked if what == "sample"]
    orders = [tuple(sampled[start : start + 3]) for start in range(0, len(sampled), 3)]
    orders = orders[SETTLING_ROUNDS:]
    assert all(len(set(order)) == 3 for order in orders) and len(orders) == 40
    assert len(set(orders)) == 6  # 40 draws miss one of six with a chance of 0.4 %: seeded
    (tmp_path / "journal").unlink()
    compare(begin(max_rounds=40), journal, journal, journal)
    again = [line.split()[0] for line in (tmp_path / "journal").read_text().splitlines()]
    names = {pid: number for number, pid in enumerate(dict.fromkeys(pid for pid, _ in asked))}
    names_again = {pid: number for number, pid in enumerate(dict.fromkeys(again))}
    assert [names[pid] for pid, _ in asked] == [names_again[pid] for pid in again]


def test_an_arm_that_is_killed_gets_its_reason_and_the_others_go_on():
    results = begin(max_rounds=10)
    found = compare(results, [], ["--die-at", "15"], ["--seconds", "0.5"])
    assert "killed (SIGKILL)" in found[1].failed and found[1].samples == 3
    assert found[1].verdict == "failed" and found[1].ratio_latency is None
    assert found[2].speed_up.value == pytest.approx(2, rel=0.01) and results.ended == "max_rounds"


def test_without_baseline_the_others_are_measured_still():
    results = begin()
    found = compare(results, ["--die-at", "0"], [], [])
    assert results.ended == "baseline failed" and results.rounds == 10
    assert [row.verdict for row in found] == ["failed", "no baseline", "no baseline"]
    assert found[1].tok_s == pytest.approx(1, rel=0.01)


def test_nothing_left_to_measure():
    results = begin(ARMS[:2])
    found = compare(results, ["--bogus"], ["--bogus"])
    assert results.ended == "baseline failed" and results.rounds == 0
    assert all("ended with exit code 2" in row.failed for row in found)


def test_arms_that_do_not_fit_together_are_loaded_in_turn(tmp_path):
    said, journal = [], tmp_path / "journal"
    behaviour = ["--no-memory-beside", "--journal", str(journal)]
    results = begin()
    found = compare(results, behaviour, behaviour, behaviour, say=said.append)
    assert results.in_turn and any("loaded in turn" in line for line in said)
    # four turns of processes that differ by nothing: half of what is expected of them, 2 %, for
    # one, a quarter for the mean, and Student's t at six degrees of freedom make 1.7 %
    assert results.rounds == 4 and results.ended == "precise"
    assert [row.samples for row in found] == [4 * SAMPLES_PER_TURN] * 3
    asked = Counter(line.split()[1] for line in journal.read_text().splitlines())
    # two loads of the attempt side by side, which failed at the second arm
    assert asked["load"] == 3 * 4 + 2 and asked["quality"] == 3
    assert found[1].kl == 0.5 and found[1].verdict == "no difference shown"


def test_turns_come_to_an_end():
    noisy = ["--noise", "2"]
    results = begin(ARMS[:2], in_turn=True)
    compare(results, noisy, noisy)
    assert results.rounds == TURNS


def test_an_arm_that_fits_nowhere_fails():
    results = begin(ARMS[:2], in_turn=True, max_rounds=2)
    found = compare(results, [], ["--die-at", "0"])
    assert "killed" in found[1].failed and results.rounds == 2
    assert results.ended == "nothing to compare with"


def interrupt_at(count):
    """A `say` that does as Ctrl-C would at the count-th line of progress."""
    left = [count]

    def say(line):
        left[0] -= line.startswith("Round")
        if left[0] == 0:
            left[0] -= 1
            raise KeyboardInterrupt

    return say


@pytest.mark.parametrize("in_turn", [False, True])
def test_interrupted_and_gone_on_with(tmp_path, monkeypatch, in_turn):
    monkeypatch.setattr("compare.sampling.comparison.SPEAK_EVERY", -1)
    noisy = ["--noise", "2"]
    results = begin(max_rounds=6, in_turn=in_turn)
    found = compare(results, noisy, noisy, noisy, folder=tmp_path, say=interrupt_at(4))
    assert results.ended == "interrupted" and found[1].ratio_latency
    kept = Results.load(tmp_path)
    before = [[sample for sample in arm.samples if sample.round < 3] for arm in kept.arms]
    compare(kept, noisy, noisy, noisy, folder=tmp_path)
    assert kept.ended == "max_rounds" and kept.rounds == 6
    for arm, old in zip(kept.arms, before, strict=True):
        assert arm.samples[: len(old)] == old
        rounds = Counter(sample.round for sample in arm.samples)
        assert rounds == {n: SAMPLES_PER_TURN if in_turn else 1 for n in range(6)}


def test_a_finished_comparison_loads_nothing(tmp_path):
    results = begin(processes=4)
    compare(results, folder=tmp_path)
    again = Results.load(tmp_path)
    compare(again, ["--bogus"], ["--bogus"], ["--bogus"], folder=tmp_path)
    assert again.ended == "precise" and not any(arm.failed for arm in again.arms)


def test_more_rounds_can_be_asked_for(tmp_path):
    noisy = ["--noise", "2"]
    results = begin(max_rounds=3)
    compare(results, noisy, noisy, noisy, folder=tmp_path)
    again = Results.load(tmp_path)
    again.settings = Settings(max_rounds=5, processes=1)
    compare(again, noisy, noisy, noisy)
    assert again.rounds == 5 and all(len(arm.samples) == 5 for arm in again.arms)


def test_all_are_started_anew_now_and_then(tmp_path):
    """Each process sticks to its own speed; the ratio is that of all of them."""
    said, journal = [], tmp_path / "journal"
    behaviour = ["--journal", str(journal)]
    results = begin(processes=6)
    compare(results, behaviour, behaviour, behaviour, say=said.append)
    assert results.ended == "precise" and results.rounds == 40
    for arm in results.arms:
        rounds = Counter(sample.process for sample in arm.samples)
        assert rounds == {0: 10, 1: 10, 2: 10, 3: 10} and arm.processes == 4
    loaded = [line.partition(":")[0] for line in said if "loading" in line]
    names = [arm.name for arm in results.arms]
    assert loaded == [*names, *reversed(names)] * 2


def test_the_last_process_goes_on():
    results = begin(processes=2, max_rounds=24)
    compare(results)
    rounds = Counter(sample.process for sample in results.arms[1].samples)
    assert rounds == {0: 10, 1: 14} and results.ended == "max_rounds"


def test_few_rounds_are_shared_among_the_processes():
    results = begin(processes=3, max_rounds=7)
    compare(results)
    rounds = Counter(sample.process for sample in results.arms[1].samples)
    assert rounds == {0: 2, 1: 2, 2: 3}


@pytest.mark.parametrize("processes, verdict", [(1, "no difference shown"), (4, "slower")])
def test_one_process_an_arm_shows_less(processes, verdict):
    results = begin(processes=processes, max_rounds=40)
    found = compare(results, [], ["--seconds", "1.03"])
    assert found[1].verdict == verdict


def test_memory_is_that_of_the_first_process(tmp_path):
    """Later ones are forks, which share what they have imported."""
    results = begin(ARMS[:2], processes=2, max_rounds=20)
    compare(results)
    for arm in results.arms:
        arm.samples = [
            replace(sample, peak_memory_bytes={"resident": 5 + sample.process + sample.round})
            for sample in arm.samples
        ]
    assert rows(results)[1].peak_memory_bytes["generate"] == {"resident": 14}
