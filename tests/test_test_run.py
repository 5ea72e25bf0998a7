"""How the tests themselves run: their seeds, and skips that a machine must not have."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import coverage_of_machine, seeds
from tests.conftest import LONGEST, pytest_collection_modifyitems
from tests.ops import check_syntax
from tests.programs import ROOT, python

DRAWS = """
import os
import numpy, pytest, torch
from hypothesis import given, strategies

@pytest.fixture(scope="module")
def shared():
    return float(torch.rand(()))

@pytest.mark.parametrize("number", range(8))
def test_one_of_many(number, shared):
    drawn = float(numpy.random.rand()), float(torch.rand(())), shared
    with open(os.environ["DRAWN"], "a") as file:
        file.write(f"{os.environ.get('PYTEST_XDIST_WORKER')}: {number} {drawn}\\n")

@given(strategies.integers())
def test_generated(x):
    with open(os.environ["DRAWN"], "a") as file:
        file.write(f"any: generated {x}\\n")
"""
SKIPS = """
import pytest
from tests import coverage_of_machine

@pytest.mark.parametrize("number", range(6))
def test_runs(number):
    coverage_of_machine.ran["avx2"] += 1

@pytest.mark.parametrize("number", range(6))
def test_on_amx(number):
    pytest.skip("instruction set amx: this CPU cannot run it")

@pytest.mark.skipif(True, reason="I felt like it")
def test_with_a_reason_of_its_own():
    pass
"""
NEEDED = ("xdist", "_hypothesis_pytestplugin")  # whose hooks and options ours have to do with


@pytest.fixture
def run(tmp_path):
    """run(plugin, text of a test file, options, names of tests, **environment) → pytest's exit
    status and output."""

    def pytest_of(plugin, text, options=(), names=("",), **environment):
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "pytest.ini").touch()
        loaded = (f"-p{name}" for name in (plugin, *NEEDED))
        command = ["-m", "pytest", *loaded, f"--rootdir={tmp_path}", *options]
        chosen = (f"{tmp_path}/test_it.py{name}" for name in names)
        done = python(*command, *chosen, env=around | environment)
        return done.returncode, done.stdout + done.stderr

    ours = (seeds.VARIABLE, coverage_of_machine.VARIABLE, "PYTEST_ADDOPTS", "PYTEST_XDIST")
    around = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    around["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each of the others takes time to import
    return pytest_of


def test_one_seed_draws_the_same_in_two_workers_in_one_process_and_alone(run, tmp_path):
    def drawn(name, *options, names=("",), **environment):
        path = tmp_path / name
        environment["DRAWN"] = str(path)
        output = run("tests.seeds", DRAWS, options, names, **environment)[1]
        return [line.partition(": ") for line in path.read_text().splitlines()], output

    spread, output = drawn("spread", "-n2", "--dist=load")
    seed = re.search(r"^seed (\d+): --seed \1 ", output, re.M)[1]
    assert {worker for worker, _, _ in spread} == {"gw0", "gw1", "any"}
    again, _ = drawn("again", f"--seed={seed}")
    assert {worker for worker, _, _ in again} == {"None", "any"}
    texts = {text for _, _, text in spread}
    assert {text for _, _, text in again} == texts and len(texts) > 20
    names = ["::test_one_of_many[5]", "::test_generated"]
    alone, _ = drawn("alone", names=names, **{seeds.VARIABLE: seed})
    assert {t for _, _, t in alone} == {t for t in texts if t[0] == "5" or t[0] == "g"}


def test_the_longest_files_exist_and_come_first():
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []
    items = [SimpleNamespace(nodeid=f"{name}::test") for name in ("a.py", *reversed(LONGEST), "b")]
    pytest_collection_modifyitems(items)
    names = [item.nodeid.removesuffix("::test") for item in items]
    assert names == [*LONGEST, "a.py", "b"]


def test_no_test_draws_what_no_seed_repeats():
    unseeded = re.compile(r"\bdefault_rng\(\)|^ +.*\brandom\.Random\(\)", re.M)
    files = [path for path in ROOT.glob("tests/**/test_*.py") if path != Path(__file__)]
    assert [str(path) for path in files if unseeded.search(path.read_text())] == []


@pytest.mark.parametrize("options", [(), ("-n2", "--dist=load")], ids=["alone", "in workers"])
def test_skips_are_counted_by_reason_and_fail_where_the_machine_must_not_lack_it(run, options):
    """Over all worker processes, and so are the instruction sets that were used."""

    def tested(names=("",), **environment):
        return run("tests.coverage_of_machine", SKIPS, options, names, **environment)

    status, output = tested()
    assert status == 1 and "6 passed, 6 skipped, 1 error" in output
    assert "does not know: I felt like it" in output
    assert output.count("skipped 6: instruction set amx") == 1
    assert output.count("instruction sets covered: avx2 in 6 tests") == 1
    if options:
        return
    status, output = tested(QUANTBENCH_EXPECT="compiler,amx")
    assert status == 1 and "6 failed, 6 passed, 1 error" in output
    assert "QUANTBENCH_EXPECT names amx" in output
    status, output = tested(["::test_on_amx"], QUANTBENCH_EXPECT="compiler,avx2")
    assert status == 0 and "instruction set amx" in output


def test_a_machine_cannot_be_expected_to_have_what_is_not_known(run):
    status, output = run("tests.coverage_of_machine", SKIPS, QUANTBENCH_EXPECT="compiler,mmx")
    assert status == 4 and "names mmx; there are compiler, portable, avx2" in output


def test_make_check_fails_without_a_compiler_that_the_machine_must_have(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    for names, status in (("", 0), ("compiler", 0), ("compiler,clang", 1), ("aarch64-gcc", 1)):
        monkeypatch.setenv(coverage_of_machine.VARIABLE, names)
        assert check_syntax.main() == status
        printed = capsys.readouterr().out
        assert printed.count("it is not installed") == len(check_syntax.COMPILERS)
        assert printed.count("QUANTBENCH_EXPECT names") == status


def test_a_whole_file_that_skips_is_counted_once_and_fails_where_it_must_not(run):
    text = "import pytest\npytest.importorskip('triton.of.tomorrow')\n"
    for options in ((), ("-n2",)):
        status, output = run("tests.coverage_of_machine", text, options)
        assert status == 5 and output.count("skipped 1: could not import 'triton.of.tom") == 1
    status, output = run("tests.coverage_of_machine", text, QUANTBENCH_EXPECT="dev")
    assert status == 2 and "triton.of.tomorrow" in output
