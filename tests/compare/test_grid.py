"""quantbench ab --over: arms of the values of options, and of their combinations."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest

from quantbench.bench.answers import Runnable
from quantbench.bench.arm import make_arms
from quantbench.bench.grid import combined
from quantbench.compare.commands import ab
from quantbench.log.config import RunConfig
from tests.bench.world import Behaviour, World
from tests.programs import command
from tests.refusals import one_line

COMMON = RunConfig(max_new_tokens="4")


def configs(*overs, texts=(), common=COMMON, may_differ=()):
    return [arm.config for arm in make_arms(*combined(common, texts, overs), may_differ)]


def test_arms_are_every_combination():
    made = configs("threads=1,2", "compile=on,off", "kv-cache=dense,int8")
    assert len(made) == 8
    assert made[0] == dataclasses.replace(COMMON, threads=1, compile=True)
    assert made[1] == dataclasses.replace(COMMON, threads=1, compile=True, kv_cache="int8")
    assert made[-1] == dataclasses.replace(COMMON, threads=2, kv_cache="int8")


def test_arms_that_are_given_have_each_of_the_values():
    texts = ("", "--quantization int8wo")
    made = configs("threads=1,2", texts=texts)
    assert [(str(one.quantization), one.threads) for one in made] == [
        ("none", 1), ("none", 2), ("int8wo", 1), ("int8wo", 2)]  # fmt: skip


def test_a_switch_of_all_arms_is_off_in_some():
    common = dataclasses.replace(COMMON, compile=True)
    assert [one.compile for one in configs("compile=off,on", common=common)] == [False, True]


def test_an_alias_and_a_value_with_spaces():
    assert [one.precision for one in configs("dtype=bfloat16,float32")] == ["bfloat16", "float32"]
    made = configs("prompt=Once upon a time,Hello", may_differ=("prompt",))
    assert [one.prompt for one in made] == ["Once upon a time", "Hello"]


# ------------------------------------------------------------------------------- the comparison

NO_ROOM = Runnable("no room", "refused")
run = partial(command, "ab", "--device", "cpu", "--write_result", "none", "--max_new_tokens", "8")


@pytest.fixture
def measured(monkeypatch):
    """Compare in a world whose arms take these seconds a token; those of None have no room."""

    def measured(seconds, *words):
        def answer(kind, do, argvs):
            assert (kind, do) == (list[Runnable], "plans") and len(argvs) == len(seconds)
            return [Runnable() if each else NO_ROOM for each in seconds]

        worker = SimpleNamespace(answer=answer, close=lambda: None)
        monkeypatch.setattr(ab, "Process", lambda: worker)
        able = [Behaviour(each, between=0.002, noise=0.002) for each in seconds if each]
        World(able).install(monkeypatch)
        return run("--over", "threads=1,2,3", "--max_minutes", "1000", *words)

    return measured


def test_the_values_are_compared_with_the_first(measured):
    result = measured((1.0, 0.5, 2.0))
    assert result.exit_code == 0, result.output
    lines = {line.split("  ")[0]: line for line in result.stdout.splitlines()}
    assert "faster" in lines["none, threads=2"] and "slower" in lines["none, threads=3"]


def test_what_cannot_run_is_named_and_has_not_failed(measured):
    result = measured((1.0, None, 0.5))
    assert result.exit_code == 0 and "Not measured: no room" in result.stderr
    assert "threads=2" not in result.stdout and "none, threads=3" in result.stdout
    assert one_line(measured((None, None, None))) == "no room"
    assert "only none, threads=3 can run here" in one_line(measured((None, None, 1.0)))
