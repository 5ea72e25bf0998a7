"""How a session goes, with workers that have no model: order, groups, budgets, failures."""

import contextlib
import json
import math
import os
import random
from collections import Counter
from dataclasses import replace

import pytest

from quantbench.bench import store as stores
from quantbench.bench.arm import make_arms
from quantbench.bench.session import LEAST_CYCLES, MOST_BESIDE, Rule
from quantbench.bench.store import Results, Settings, Store
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.rows import rows
from quantbench.compare.stop import Enough
from quantbench.errors import LogError, QuantbenchError, UsageError
from quantbench.log.config import RunConfig
from quantbench.quality.types import NoQuality, QualityReference
from tests.bench.world import Behaviour, World

COMMON = RunConfig(max_new_tokens="8")
ARMS = ("--quantization none", "--quantization int8wo", "--quantization fp6")
EQUAL = Behaviour(between=0.002, noise=0.01, loading=2.0)


@pytest.fixture
def measure(monkeypatch):
    """Measure these arms in a world of these behaviours; the results and the world."""

    def run(behaviours, rule=None, folder=None, results=None, world=None, arms=None, **settings):
        world = world or World.of(*behaviours)
        every = [*ARMS, *(f"--cache_size {100 + n}" for n in range(40))]
        texts = every[: arms or len(world.behaviours)]
        world.install(monkeypatch)
        settings = {"max_minutes": 1000, "tokens": 0, **settings}
        results = results or Results.begin(Settings(**settings), make_arms(COMMON, texts), "none")
        usual = Enough(Limits()) if results.settings.cycles is None else Rule()
        world.session(Store(results, folder), rule or usual).run()
        return results, world

    return run


# ------------------------------------------------------------------------------------ the answer


def test_plain_differences_are_found_with_their_intervals(measure):
    results, world = measure([EQUAL, replace(EQUAL, seconds=0.05), replace(EQUAL, seconds=0.2)])
    assert results.ended == "answered" and all(arm.processes == 2 for arm in results.arms)
    found = rows(results)
    assert [row.verdict for row in found] == ["baseline", "faster", "slower"]
    for row, speed in zip(found[1:], (2, 0.5), strict=True):
        for ratio in (row.speed_up, row.decode_speed_up, row.prompt_speed_up):
            assert ratio.low < speed < ratio.high and ratio.high / ratio.low < 1.2
    assert [row.can_be_best for row in found] == [False, True, False]
    assert found[1].tok_s == pytest.approx(20, rel=0.1)


def test_an_arm_that_the_answer_cannot_name_gets_no_second_process(measure):
    """int8wo is faster and not larger than the third; a recommendation needs no more of that."""
    behaviours = [EQUAL, replace(EQUAL, seconds=0.05), replace(EQUAL, seconds=0.3)]
    results, _ = measure(behaviours, Enough(Limits(), answer_only=True))
    assert [arm.processes for arm in results.arms] == [2, 2, 1]


OPEN = {  # what the faster arm has, and whether the slower one still gets a second process
    "nothing against it": ({}, Limits(), False),
    "it may exceed the KL": ({"kl": 0.029, "kl_interval": [0.01, 0.05]}, Limits(), True),
    "its quality is not known": (None, Limits(), True),
    "it takes too much memory": ({}, Limits(max_memory=2), True),
    "it is too slow": ({}, Limits(min_tok_s=1e4), True),
    "its KL makes it no compromise": ({"kl": 0.2, "kl_interval": [0.2, 0.2]}, Limits(0.3), True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_only_an_arm_that_can_be_recommended_keeps_another_from_a_second_process(measure, name):
    """The second arm is 1.3 times as fast as the third, and both take the same memory."""
    changes, asked, is_open = OPEN[name]
    behaviours = [EQUAL, replace(EQUAL, seconds=0.077), EQUAL]
    results, _ = measure(behaviours, cycles=40, processes=1, tokens=64)
    arm = results.arms[1]
    arm.quality = NoQuality("unknown") if changes is None else replace(arm.quality, **changes)
    still = Enough(asked, answer_only=True).open(results)
    assert (2 in still) == is_open and 1 in still


def test_quality_beyond_the_limit_is_not_timed(measure):
    """In a recommendation, which does not load it; ab times it even so."""
    behaviours = [EQUAL, replace(EQUAL, kl=0.3), EQUAL]
    results, world = measure(behaviours, Enough(Limits(), answer_only=True), tokens=64)
    assert results.arms[1].dropped == "KL above 0.03" and not results.arms[1].turns
    assert 1 not in world.asked("load") + world.asked("turn") and results.ended == "answered"
    results, world = measure(behaviours, tokens=64)
    assert results.arms[1].dropped is None and results.arms[1].turns
    assert world.asked("judge") == [1, 2]  # once, whatever the processes


def test_one_process_judges_all_arms_before_any_is_loaded(measure, tmp_path):
    """And what it has judged is not judged again."""
    results, world = measure([EQUAL] * 3, tokens=64, folder=tmp_path, cycles=2, processes=1)
    judged = [(-1, "read"), (1, "judge"), (2, "judge")]
    assert world.journal[:4] == [*judged, (0, "load")]
    assert [arm.quality.kl for arm in results.arms] == [None, 0.001, 0.001]
    kept = stores.load(tmp_path)
    kept.settings = replace(kept.settings, cycles=4, processes=2)
    assert [arm.judged for arm in kept.arms] == [arm.judged for arm in results.arms]
    _, again = measure([EQUAL] * 3, folder=tmp_path, results=kept)
    assert again.asked("load") and not again.asked("read") + again.asked("judge")


def test_an_arm_that_the_judge_cannot_load_has_failed(measure):
    behaviours = [EQUAL, replace(EQUAL, fails_to_load=True), EQUAL]
    results, world = measure(behaviours, tokens=64)
    assert results.arms[1].failed == "no such thing" and 1 not in world.asked("load")
    assert world.asked("read") == [-1] and results.arms[2].turns


def test_another_judge_goes_on_where_an_arm_has_killed_one(measure):
    results, world = measure([EQUAL, replace(EQUAL, kills_its_judge=True), EQUAL], tokens=64)
    assert results.arms[1].failed.startswith("killed (SIGKILL)")
    assert world.asked("read") == [-1, -1] and results.arms[2].quality.kl == 0.001


def test_judging_takes_half_of_the_minutes(measure):
    """Arms of 20 s: the first ends at 20 s of 60, and none is begun that would end after 60."""
    results, world = measure([replace(EQUAL, scoring=20.0)] * 6, tokens=64, max_minutes=2)
    assert world.asked("judge") == [1, 2, 3] and results.arms[4].quality is None
    assert rows(results)[4].why_no_quality == "--max_minutes left no time to measure it"


def test_what_is_timed_is_what_was_judged(measure):
    """Three times the reference's noise is rounding; 0.001 is, where there is less noise."""
    for apart, noise, words in ((0.0029, 0.001, None), (0.0031, 0.001, "KL 0.0031 nats on 1 "),
                                (0.0009, 0.0, None), (math.nan, 0.001, "KL nan nats")):  # fmt: skip
        world = World.of(EQUAL, replace(EQUAL, apart=apart), noise=noise)
        results, _ = measure([], tokens=64, world=world, cycles=2, processes=1)
        failed = results.arms[1].failed
        assert failed is None if words is None else words in failed


def test_a_reference_that_is_no_arm_is_read_by_the_judge(measure):
    reference = QualityReference(["--checkpoint_path", "tiny_moe"], "floats")
    results, world = measure([EQUAL] * 3, tokens=64, reference=reference, arms=2)
    assert world.journal[:4] == [(-1, "read"), (0, "judge"), (1, "judge"), (0, "load")]
    assert [arm.quality.kl for arm in results.arms] == [0.001, 0.001]


def test_a_reference_that_cannot_be_read_leaves_speeds(measure):
    behaviours = [EQUAL, EQUAL, replace(EQUAL, fails_to_load=True)]  # the last is the reference's
    reference = QualityReference(["--checkpoint_path", "tiny_moe"], "floats")
    results, world = measure(behaviours, tokens=64, reference=reference, arms=2)
    assert not world.asked("judge")
    why = NoQuality("floats, the reference: no such thing")
    assert [arm.quality for arm in results.arms] == [why, why] and results.ended == "answered"


COARSER = [
    # schemes with their KL divergence, and those that are judged
    ({"uintx-4-64": 0.3, "uintx-3-64": 1.0, "uintx-4-32": 0.2, "uintx-5-64": 0.01},
     ["uintx-4-64", "uintx-4-32", "uintx-5-64"]),
    ({"uintx-4-64": 0.05, "uintx-3-64": 1.0}, ["uintx-4-64", "uintx-3-64"]),  # not far
    ({"int4wo-64": 0.3, "int4wo-256": 1.0, "int4wo-256-hqq": 0.2, "fp6": 0.3},
     ["int4wo-64", "int4wo-256-hqq", "fp6"]),
]  # fmt: skip


@pytest.mark.parametrize(("kls", "judged"), COARSER)
def test_a_coarser_variant_of_what_is_far_beyond_the_limit_is_not_judged(measure, kls, judged):
    behaviours = [EQUAL, *(replace(EQUAL, kl=kl) for kl in kls.values())]
    texts = [f"--quantization {name}" for name in ("none", *kls)]
    results = Results.begin(Settings(max_minutes=1000), make_arms(COMMON, texts), "none")
    rule = Enough(Limits(), answer_only=True)
    _, world = measure([], rule, results=results, world=World.of(*behaviours))
    assert [list(kls)[number - 1] for number in world.asked("judge")] == judged


# ----------------------------------------------------------------------------------------- order


def test_cycles_alternate_and_prompts_have_their_own(measure):
    results, world = measure([EQUAL] * 3, cycles=6, processes=1)
    by_cycle = {}
    for arm in range(3):
        for turn in results.arms[arm].turns:
            by_cycle.setdefault((turn.cycle, turn.kind), []).append(arm)
    assert sum(kind == "decode" for _, kind in by_cycle) == 6
    assert all(sorted(arms) == [0, 1, 2] for arms in by_cycle.values())
    assert world.asked("turn")[:3] == [0, 1, 2]  # they settle
    counted = world.asked("turn")[6:]
    assert counted[:3] == [0, 1, 2] and [2, 1, 0] == counted[6:9]


def test_groups_share_the_baseline(measure):
    """More arms than fit together: two groups, and one process of the baseline."""
    count = MOST_BESIDE + 3
    results, world = measure([EQUAL] * count, cycles=4, processes=1)
    assert world.asked("load") == [0, *range(1, count)]
    assert all(len(results.turns(n, "decode")) == 4 for n in range(1, count))
    assert len(results.turns(0, "decode")) == 8 and results.baseline.processes == 1


def test_the_second_process_is_loaded_in_the_other_order(measure):
    results, world = measure([EQUAL] * 3, cycles=3, processes=2)
    assert world.asked("load") == [0, 1, 2, 0, 2, 1]
    assert {turn.process for turn in results.arms[1].turns} == {0, 1}
    assert [reading.cycle for reading in results.bandwidth["cpu"]] == [*range(6)]


def test_memory_is_read_before_every_cycle(measure, tmp_path):
    """And each reading is a separate line in the folder, with its cycle."""
    results, _ = measure([EQUAL] * 2, folder=tmp_path, cycles=9, processes=1)
    assert [reading.cycle for reading in results.bandwidth["cpu"]] == [*range(9)]
    kept = [json.loads(line) for line in (tmp_path / stores.SAMPLES).read_text().splitlines()]
    stored = [line["bandwidth"]["reading"]["cycle"] for line in kept if "bandwidth" in line]
    assert stored == [*range(9)]
    assert all(row.limit_share.low is None for row in rows(results))  # nine are too few
    arm = results.arms[1]
    run = replace(arm.run, config=replace(arm.run.config, speculate="lookup"))
    arm.facts = replace(arm.facts, run=run)
    assert rows(results)[1].limit_share is None  # a step gives several tokens


def test_arms_come_in_a_later_group_where_memory_is_short(measure):
    short = replace(EQUAL, fits_beside=1)
    results, _ = measure([short] * 3, cycles=3, processes=1)
    assert [len(results.turns(n, "decode")) for n in range(3)] == [6, 3, 3]


def test_an_arm_that_does_not_fit_beside_the_baseline_is_loaded_alone(measure, capsys):
    """Baseline, arm and baseline are one observation; drift between them cancels."""
    alone = Behaviour(fits_beside=0)
    world = World.of(alone, alone)
    world.slowness = lambda now: 1 + (now - 1000) / 3000
    results, _ = measure([], world=world, processes=4)
    said = capsys.readouterr().err
    assert "does not fit into memory with the others: each is loaded alone" in said
    assert world.order()[:3] == [0, 1, 0]
    found = Compared(results)
    assert len({turn.cycle for turn in results.arms[1].turns}) == results.arms[1].processes
    assert found.decode[1].ratio == pytest.approx(1, abs=0.01)
    assert rows(results)[1].verdict == "too few cycles"


def test_cycles_that_an_earlier_version_marked_as_repeated_count(measure, tmp_path):
    results, _ = measure([EQUAL, EQUAL], folder=tmp_path, cycles=3, processes=1)
    with open(tmp_path / stores.SAMPLES, "a") as file:
        file.write('{"repeated": {"cycle": 1}}\n')
    assert rows(stores.load(tmp_path)) == rows(results)


# --------------------------------------------------------------------------------------- budgets


def test_minutes_include_loading(measure):
    """Loading two arms takes 4 of 5 minutes, and what is left goes to turns."""
    slow = replace(EQUAL, loading=120.0, noise=0.5)
    results, world = measure([slow, slow], max_minutes=5)
    assert results.ended == "max_minutes" and world.now - 1000 < 6 * 60
    assert len(results.turns(1, "decode")) >= LEAST_CYCLES


def test_what_there_was_no_time_for_is_not_measured(measure):
    slow = replace(EQUAL, loading=100.0)
    results, _ = measure([slow] * 20, max_minutes=5)
    verdicts = Counter(row.verdict for row in rows(results))
    assert results.ended == "max_minutes" and verdicts["not measured"] >= 15


def test_processes_end_it(measure):
    wild = replace(EQUAL, noise=0.5)
    results, _ = measure([wild, wild], processes=1, max_minutes=2)
    assert results.ended in ("processes", "max_minutes") and results.arms[1].processes == 1


@pytest.mark.parametrize("minutes", [0, 0.5, 2])
def test_fixed_cycles_end_with_the_minutes(measure, minutes):
    """Nothing is started that there is no time for, and a plan of 24 cycles ends within it."""
    slow = replace(EQUAL, seconds=1.0, loading=10.0)
    most = {"cycles": 24, "processes": 2, "max_minutes": minutes}
    results, world = measure([slow] * 4, Rule(), **most)
    assert results.ended == "max_minutes" and world.now - 1000 < 60 * max(minutes, 0.5) + 30
    assert results.turns(1, "decode") and len(results.turns(1, "decode")) < 24


def test_a_second_process_is_announced_as_a_check(measure, capsys):
    """By one line, and so are the first ones: not by one for each arm."""
    measure([EQUAL] * 3, cycles=3, processes=3)
    said = [line for line in capsys.readouterr().err.splitlines() if "loading" in line]
    assert [line.partition(";")[0] for line in said] == [
        "loading arms",
        "checking with a second process of each arm: loading",
        "checking with another process of each arm: loading",
    ]


# -------------------------------------------------------------------------------------- failures


def test_an_arm_that_is_killed_gets_its_reason_and_the_others_go_on(measure):
    results, _ = measure([EQUAL, replace(EQUAL, dies_at=7), replace(EQUAL, seconds=0.05)])
    found = rows(results)
    assert "killed (SIGKILL)" in found[1].failed and found[1].verdict == "failed"
    assert found[2].verdict == "faster"
    assert "'int8wo' failed: killed" in results.failure()


@pytest.mark.parametrize(
    ("broken", "ended", "verdicts"),
    [
        ((0,), "baseline failed", ["failed", "no baseline", "no baseline"]),
        ((1, 2), "nothing to compare", ["baseline", "failed", "failed"]),
    ],
)
def test_nothing_left_to_compare(measure, broken, ended, verdicts):
    behaviours = [replace(EQUAL, fails_to_load=n in broken) for n in range(3)]
    results, _ = measure(behaviours)
    assert results.ended == ended
    assert [row.verdict for row in rows(results)] == verdicts


# ------------------------------------------------------------------------ interruption, resuming


def interrupted_at(world, count):
    """As Ctrl-C would, before the turn of that number."""
    left = [count]

    def hook():
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    world.at_turn = hook


def test_interrupted_and_gone_on_with(measure, tmp_path):
    """Every turn that was taken counts; the arms go on in new processes."""
    world = World.of(EQUAL, replace(EQUAL, seconds=0.09))
    interrupted_at(world, random.randrange(30, 60))
    results, _ = measure([], folder=tmp_path, world=world)
    assert results.ended == "interrupted"
    kept = stores.load(tmp_path)
    assert [arm.turns for arm in kept.arms] == [arm.turns for arm in results.arms]
    assert (kept.settings, kept.ended) == (results.settings, "interrupted")
    before = len(kept.arms[1].turns)
    world.at_turn = None
    more, _ = measure([], folder=tmp_path, results=kept, world=world)
    assert more.ended == "answered" and len(more.arms[1].turns) > before
    again = stores.load(tmp_path)
    assert [arm.turns for arm in again.arms] == [arm.turns for arm in more.arms]
    assert rows(again) == rows(more)


def test_a_line_that_a_kill_cut_short_is_left_out(measure, tmp_path):
    """Who only reads changes nothing; who goes on removes it."""
    results, _ = measure([EQUAL, EQUAL], folder=tmp_path, cycles=3, processes=1)
    path = tmp_path / stores.SAMPLES
    whole = path.read_bytes()
    cut = whole + b'{"turn": {"arm": 1, "cy'
    path.write_bytes(cut)
    kept = stores.load(tmp_path)
    assert [arm.turns for arm in kept.arms] == [arm.turns for arm in results.arms]
    assert path.read_bytes() == cut
    Store(kept, tmp_path)
    assert path.read_bytes() == whole


def test_one_process_at_a_time_measures_into_a_folder(measure, tmp_path):
    """And nobody goes on behind what another process has added since."""
    measure([EQUAL, EQUAL], folder=tmp_path, cycles=3, processes=1)
    first, second = stores.load(tmp_path), stores.load(tmp_path)
    before = (tmp_path / stores.SAMPLES).read_bytes()
    holder = Store(first, tmp_path)
    with pytest.raises(LogError, match=f"process {os.getpid()} measures there now; wait for its"):
        Store(second, tmp_path)
    assert (tmp_path / stores.SAMPLES).read_bytes() == before
    holder.add(stores.Ended("answered", 1.0))
    holder.file.close()
    with pytest.raises(LogError, match="another process has measured there since it was read"):
        Store(second, tmp_path)


@pytest.mark.parametrize("kind", ["link", "hard link", "fifo"])
def test_samples_that_are_no_file_are_not_written(measure, tmp_path, kind):
    folder, mine = tmp_path / "results", tmp_path / "mine"
    measure([EQUAL, EQUAL], folder=folder, cycles=3, processes=1)
    samples = folder / stores.SAMPLES
    samples.replace(mine)
    {"link": samples.symlink_to, "hard link": samples.hardlink_to}.get(
        kind, lambda _: os.mkfifo(samples)
    )(mine)
    before = mine.read_bytes()
    with pytest.raises(QuantbenchError, match="samples.jsonl: "):
        Store(stores.load(folder), folder)
    assert mine.read_bytes() == before


@pytest.mark.parametrize("seed", range(3))
def test_after_kills_no_turn_is_counted_twice(monkeypatch, tmp_path, seed):
    """A cycle that a kill broke off keeps its number, and the next cycle gets another."""

    class Kill(BaseException):
        pass

    chance, behaviours = random.Random(seed), [EQUAL, replace(EQUAL, seconds=0.05), EQUAL]
    arms = make_arms(COMMON, ARMS)
    results = Results.begin(Settings(tokens=0, max_minutes=1000), arms, "none")
    for kills in (4, 3, 2, 1, 0):
        world, left = World.of(*behaviours), [chance.randrange(1, 120)]
        world.install(monkeypatch)

        def at_turn(left=left):
            left[0] -= 1
            if left[0] == 0:
                raise Kill

        world.at_turn = at_turn if kills else None
        kept = Store(results, tmp_path)
        with contextlib.suppress(Kill):
            world.session(kept, Enough(Limits())).run()
        kept.file.close()
        results = stores.load(tmp_path)
    turns = [turn for arm in results.arms for turn in arm.turns]
    keys = Counter((turn.arm, turn.process, turn.cycle, turn.kind) for turn in turns)
    assert results.ended == "answered" and len(keys) == len(turns)


@pytest.mark.parametrize("what", ["machine", "commit", "torch"])
def test_samples_of_elsewhere_are_not_mixed(measure, tmp_path, what):
    measure([EQUAL, EQUAL], folder=tmp_path, cycles=3, processes=1)
    meta = json.loads((tmp_path / stores.META).read_text())
    about = meta["about"]["versions"] if what == "torch" else meta["about"]
    about[what] = "another"
    (tmp_path / stores.META).write_text(json.dumps(meta))
    with pytest.raises(UsageError, match=f"measured with {what} another"):
        stores.same_origin(stores.load(tmp_path), "--resume DIR")


def test_a_whole_run_is_a_prompt_and_its_steps(measure):
    """By hand: seconds per token of a run of one prompt (1 token here) and 8 new ones."""
    results, _ = measure([EQUAL, EQUAL], cycles=5, processes=1)
    found = Compared(results)
    prompts, steps = (results.turns(1, kind) for kind in ("prompt", "decode"))
    first = [s for s in steps if len(prompts) < 2 or s.cycle < prompts[1].cycle]
    step = sum(s.seconds for s in first) / sum(s.tokens for s in first)
    expected = (prompts[0].seconds + 7 * step) / 8
    assert found.turns[1].seconds[0] == pytest.approx(expected)
    assert math.isfinite(found.decode[1].ratio)
