"""The file in which sessions keep what processes of this machine differ by."""

import json
import math

import pytest

from quantbench.bench.store import ArmResult, Results, Settings, Store
from quantbench.compare import machine_floor
from quantbench.compare.intervals import Compared
from quantbench.compare.limits import Limits
from quantbench.compare.stop import Enough
from quantbench.log.origin import machine
from tests.bench.world import Behaviour, World


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "cache" / "processes.json"
    monkeypatch.setenv(machine_floor.VARIABLE, str(path))
    return path


def session(monkeypatch, between, seed=0):
    world = World.of(*[Behaviour(between=between, noise=0.002)] * 4, seed=seed)
    world.install(monkeypatch)
    argv = ["--max_new_tokens", "8"]
    results = Results(Settings(max_minutes=1, tokens=0), [ArmResult(n, "", argv) for n in "abcd"])
    world.session(Store(results, None), Enough(Limits())).run()
    return Compared(results)


def kept(file, **changes):
    file.parent.mkdir(exist_ok=True)
    whole = {"format": 1, "machine": machine(), "freedom": 16.0, "squares": 16 * 0.03**2}
    file.write_text(json.dumps({**whole, **changes}))


def test_sessions_teach_what_processes_differ_by(file, monkeypatch):
    assert machine_floor.known() is None
    freedoms = []
    for seed in range(8):
        machine_floor.learn(session(monkeypatch, 0.04, seed))
        freedoms.append(json.loads(file.read_text())["freedom"])
    assert freedoms == sorted(freedoms) and freedoms[0] > 2 and freedoms[-1] <= machine_floor.MOST
    floor = machine_floor.known()
    assert floor.assumed == 0 and floor.deviation == pytest.approx(0.04, rel=0.4)


def test_a_file_that_knows_little_is_not_used(file):
    kept(file, freedom=4.0, squares=4 * 0.016**2)
    assert machine_floor.known() is None
    kept(file)
    floor = machine_floor.known()
    assert (floor.deviation, floor.freedom, floor.assumed) == (pytest.approx(0.03), 16, 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Expecting value"),
        ("[]", "Kept takes Kept"),
        ("[" * 100_000, "recursion"),
        ({"machine": "another"}, "it is of another machine or version"),
        ({"format": 2}, "it is of another machine or version"),
        ({"freedom": 1e9}, "its numbers are out of range"),
        ({"freedom": 0}, "its numbers are out of range"),
        ({"squares": math.nan}, "its numbers are out of range"),
        ({"squares": "much"}, "squares"),
    ],
)
def test_a_file_that_is_no_use_is_ignored_with_a_line_and_replaced(
    file, content, why, capsys, monkeypatch
):
    if isinstance(content, dict):
        kept(file, **content)
    else:
        file.parent.mkdir()
        file.write_text(content)
    assert machine_floor.known() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line and why in line
    machine_floor.learn(session(monkeypatch, 0.04))
    capsys.readouterr()
    assert machine_floor.known() is not None and capsys.readouterr().err == ""


def test_negative_squares_of_noisy_sessions_are_a_small_floor(file):
    kept(file, squares=-1.0)
    assert machine_floor.known().deviation == machine_floor.LEAST


def test_a_file_that_cannot_be_written_is_left(file, monkeypatch, capsys):
    file.parent.write_text("in the way")
    machine_floor.learn(session(monkeypatch, 0.04))
    assert "what processes differ by was not kept" in capsys.readouterr().err


def test_a_session_begins_with_the_floor_of_the_file(file):
    kept(file)
    floor = machine_floor.known()
    assert Compared(Results(Settings(floor=floor), [])).floor == floor
