"""How the C++ kernels are built: reasons, the cache, damage, and two processes at once.

The whole library takes a while to build, so these tests build a smaller one from a folder of their
own; that the real one builds, test_cpu_attention.py shows.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from errors import KernelError
from ops.cpu import build

ROOT = Path(__file__).parents[2]
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """One small source to build, and an empty cache beside it."""
    if reason := build.unavailable():
        pytest.skip(reason)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return sources


@pytest.mark.parametrize("variable", ["CXX", "PATH"])
def test_no_compiler_is_a_reason(variable, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, "/nonexistent")
    reason = build.unavailable()
    assert reason and "compiler" in reason and "CXX" in reason
    build.load.cache_clear()
    with pytest.raises(KernelError, match="compiler"):
        build.load()


def test_asking_builds_nothing(small, tmp_path):
    assert build.unavailable() is None
    assert not (tmp_path / "cache").exists()


def test_the_second_time_it_is_there(small, tmp_path, monkeypatch, capsys):
    library = build.built()
    assert library.parent == tmp_path / "cache" / "quantbench"
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(build, "_compile", None)  # would fail
    assert build.built() == library
    assert capsys.readouterr().err == ""


def test_other_sources_and_flags_are_another_library(small, monkeypatch):
    first = build.built()
    (small / "two.h").write_text("// included by none\n")
    second = build.built()
    monkeypatch.setenv("CXXFLAGS", "-g")
    assert len({first, second, build.built()}) == 3


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "short", "one bit"])
def test_a_damaged_library_is_built_again(small, damage):
    library = build.built()
    whole = library.read_bytes()
    flipped = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    library.write_bytes(flipped if damage is None else damage)
    assert build.built() == library
    assert build._intact(library) and len(library.read_bytes()) == len(whole)


def test_an_error_of_the_compiler_is_told_and_leaves_nothing(small, tmp_path):
    (small / "one.cpp").write_text("int answer() { return nothing; }\n")
    with pytest.raises(KernelError, match="nothing.*CXX names another"):
        build.built()
    assert [path.name for path in (tmp_path / "cache" / "quantbench").iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_is_an_error(small, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(KernelError, match="set XDG_CACHE_HOME"):
        build.built()


def test_processes_at_once_build_it_once(small, tmp_path):
    program = (
        "import ctypes, pathlib, sys\n"
        "from ops.cpu import build\n"
        "build.SOURCES = pathlib.Path(sys.argv[1])\n"
        "print(ctypes.CDLL(str(build.built())).answer())\n"
    )
    # What is built must be called from outside, so it is exported.
    (small / "one.cpp").write_text(
        SOURCE.replace("int", '__attribute__((visibility("default"))) int')
    )
    command = [sys.executable, "-c", program, str(small)]
    pipe = subprocess.PIPE
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) for _ in range(2)
    ]
    ended = [process.communicate() for process in running]
    assert [out for out, _ in ended] == ["42\n", "42\n"], ended
    assert sum(error.count("Building") for _, error in ended) == 1


def test_the_environment_names_an_instruction_set():
    if reason := build.unavailable():
        pytest.skip(reason)
    program = "from ops.cpu import build; print(build.isa())"

    def run(isa: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", program]
        environment = {**build.os.environ, "QUANTBENCH_ISA": isa}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    assert run("portable").stdout == "portable\n"
    assert "there are portable, avx2, avx512" in run("mmx").stderr
