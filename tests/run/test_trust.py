"""A single run says how its samples scatter and what else used the machine."""

import json
import os
import time

import pytest

from quantbench.run import machine
from quantbench.run.facts import Measured, Sample, WarmUp
from quantbench.run.machine import Counters, MachineUse, judge, together
from quantbench.run.run_table import remarks, table
from tests.bench.facts import FACTS
from tests.programs import finished

QUIET = MachineUse(10.0, 2, 2.0, 0.05, 0.0, 3)
BUSY = MachineUse(10.0, 2, 1.1, 1.4, 0.0, 4000)
NEWCOMER = [60.0, 63.0, 200.0, 292.0, 247.0]  # tok/s that were logged as 172, with no word more


def test_samples_that_scatter_five_fold_are_not_to_be_trusted():
    trust = judge(NEWCOMER, BUSY, threads=2, load_average=3.5)
    # mean 172.4; deviations -112.4, -109.4, 27.6, 119.6, 74.6; their squares 45232.5 ÷ 4
    assert trust.spread.coefficient_of_variation == pytest.approx(106.34 / 172.4, abs=1e-3)
    assert trust.trustworthy is False and trust.load_average == 3.5
    assert trust.why_not_trustworthy == (
        "samples scatter 4.9 ×; other processes used 1.4 of 2 cores: not trustworthy; repeat it "
        "on an idle machine, or compare with quantbench ab, which takes turns"
    )


def test_scatter_on_a_quiet_machine_is_not_blamed_on_others():
    why = judge(NEWCOMER, QUIET, threads=2).why_not_trustworthy
    assert "idle machine" not in why and "--max_new_tokens" in why
    assert "other processes used 0.1 of 2 cores" in why


def test_threads_beyond_the_cores_are_not_blamed_on_others():
    why = judge(NEWCOMER, BUSY, threads=1000).why_not_trustworthy
    assert "1000 threads share 2 cores" in why and "--threads 2" in why
    assert "other processes" not in why and "idle machine" not in why


@pytest.mark.parametrize(
    ("speeds", "trustworthy"),
    [
        ([100.0, 100.0], True),
        ([93.0, 107.0], True),  # a deviation of 7 · √2 = 9.9
        ([92.0, 108.0], False),  # 11.3
        ([100.0], None),
    ],
)
def test_ten_percent_is_the_limit(speeds, trustworthy):
    trust = judge(speeds, QUIET, threads=2)
    assert trust.trustworthy is trustworthy
    assert (trust.why_not_trustworthy is None) == (trustworthy is True)


def test_a_steady_neighbour_is_one_too():
    """Samples agree, but each of them shared its cores."""
    steady = [100.0, 101.0, 100.0]
    assert judge(steady, BUSY, threads=2).trustworthy is False
    assert judge([100.0], BUSY, threads=2).trustworthy is False
    idle_cores = MachineUse(10.0, 8, 2.0, 1.4, 0.0, 3)
    assert judge(steady, idle_cores, threads=2).trustworthy is True
    stolen = MachineUse(10.0, 2, 1.1, 0.0, 0.8, 3)
    why = judge(steady, stolen, threads=2).why_not_trustworthy
    assert "the hypervisor took 0.8 of 2 cores" in why
    assert judge(steady, None, threads=2).trustworthy is True


def test_the_counters_tell_this_process_from_others():
    """Another process computes for 0.6 s, and then this process does."""
    spin = "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    before = Counters.read()
    finished("-c", spin)
    between = Counters.read()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    theirs, ours = between.since(before), Counters.read().since(between)
    assert ours.own_cores * ours.seconds >= 0.3 > theirs.own_cores * theirs.seconds
    # None where a sandbox counts nobody's work
    assert theirs.other_cores is None or theirs.other_cores * theirs.seconds > 0.5
    assert ours.cores == len(os.sched_getaffinity(0))


def test_the_kernel_s_ticks(kernel_files):
    """Two cores, of which this process may use one; columns as in man 5 proc."""
    assert machine._ticks({0}) == (None, None)
    cores = "cpu0 100 20 30 9999 9999 4 5 70 60 0\ncpu1 1 2 3 4 5 6 7 8 9 0"
    kernel_files({"proc/stat": f"cpu  11 22 33 44 55 66 77 88 0 0\n{cores}\nintr 5 0"})
    busy, stolen = machine._ticks({0})
    ticks = machine.TICKS_PER_SECOND
    assert busy * ticks == pytest.approx(100 + 20 + 30 + 4 + 5) and stolen * ticks == 70


def test_where_no_work_is_counted_nothing_is_claimed():
    before = Counters(0.0, 2, own=0.0, busy=50.0, stolen=0.0, involuntary_switches=0)
    after = Counters(4.0, 2, own=4.0, busy=50.0, stolen=0.0, involuntary_switches=1)
    assert after.since(before).other_cores is None and after.since(before).stolen_cores is None


def test_samples_add_up():
    total = together([MachineUse(1.0, 2, 1.0, 2.0, 0.0, 5), MachineUse(3.0, 2, 2.0, 0.0, None, 6)])
    assert total == MachineUse(4.0, 2, 1.75, 0.5, None, 11)
    assert together([]) is None


def measured(*speeds):
    samples = [Sample(1.0, 1.0, speed, 1.0, 1.0) for speed in speeds]
    return Measured(FACTS, WarmUp(None, [1.0], True), None, {"generate": {"resident": 1}}, samples)


def test_the_table_shows_the_spread_and_marks_what_scatters():
    steady, scattered = measured(60.0, 61.0), measured(*NEWCOMER)
    assert "60.00 to 61.00 over 2" in table(steady) and "!" not in table(steady)
    assert remarks(steady) == []
    assert "! 60.00 to 292.00 over 5" in table(scattered).split("\n")[1]
    assert remarks(scattered)[0].startswith("! int8wo: samples scatter 4.9 ×")


def test_steady_is_not_said_of_samples(tmp_path):
    """The JSON of a real run has every figure, and what is printed says the same."""
    arguments = ["--compile", "--num_samples", "3", "--max_new_tokens", "4"]
    arguments += ["--write_result", "none", "--output_json_path", tmp_path / "j"]
    done = finished("generate.py", *arguments)
    details = json.loads((tmp_path / "j").read_text())
    trust = judge(
        [sample["tok_s"] for sample in details["samples"]],
        MachineUse(**details["machine"]),
        details["environment"]["threads"],
        details["load_average"],
    )
    assert details["trustworthy"] is trust.trustworthy
    assert details["why_not_trustworthy"] == trust.why_not_trustworthy
    assert details["spread"]["samples"] == 3
    if details["decoder"] == "cpu-step":
        assert any(reason.startswith("--compile had no effect") for reason in details["why"])
    assert all(f"- {reason}" in done.stderr for reason in details["why"])
    assert ("not trustworthy" in done.stderr) == (trust.trustworthy is False)
