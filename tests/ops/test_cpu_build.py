"""How the C++ kernels are built: reasons, the cache, damage, and two processes at once.

The whole library takes a while to build, so these tests build a smaller one from a folder of their
own; that the real one builds, test_linear.py shows.
"""

import contextlib
import re
import signal
from pathlib import Path

import pytest
import torch

from quantbench import host
from quantbench.errors import KernelError
from quantbench.ops.cpu import build, compiler, compiling
from tests.ops.instructions import NEEDS_COMPILER
from tests.programs import python, ran, started, wait_for

# Exported, since it is called from outside.
SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n'
PROGRAM = """
import ctypes, pathlib, sys
from quantbench.ops.cpu import build
build.SOURCES = pathlib.Path(sys.argv[1])
print(ctypes.CDLL(str(build.built())).answer())
"""


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """One small source to build, and an empty cache."""
    if reason := build.unavailable():
        pytest.skip(reason)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return sources


# What the environment says → why the kernels are refused before anything is compiled.
REFUSED = [
    ({"PATH": "/nonexistent"}, "need a C++ compiler: no c++, g++ or clang++; install one or"),
    ({"CXX": "/nonexistent"}, "$CXX is '/nonexistent', which is no program"),
    ({"CXX": "nope g++"}, "$CXX is 'nope g++', of which 'nope' is no program"),
    ({"CXX": "'g++ -m64"}, '$CXX is "\'g++ -m64", which is no program'),
    ({"CXX": "c++ -ffast-math"}, "CXX has -ffast-math, which breaks"),
    *(({"CXXFLAGS": f"-g {flag}"}, f"CXXFLAGS has {flag}") for flag in sorted(compiler.FAST_MATH)),
    *(({"OMP_STACKSIZE": size}, "OMP_STACKSIZE=1024K or more") for size in ("512", "512k")),
]


@pytest.mark.parametrize(("environment", "why"), REFUSED)
def test_what_is_refused_before_compiling(environment, why, small, tmp_path, monkeypatch):
    """Asking whether it is builds nothing."""
    assert build.unavailable() is None
    monkeypatch.delenv("CXX", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    build.load.cache_clear()
    with pytest.raises(KernelError) as raised:
        build.load()
    reason = str(raised.value)
    assert reason == build.unavailable() and why in reason and "\n" not in reason
    assert not (tmp_path / "cache").exists()


def test_what_would_do_is_not_refused(small, monkeypatch):
    for size in ("", "2M"):
        monkeypatch.setenv("OMP_STACKSIZE", size)
        assert build.unavailable() is None
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "native thread pool")
    assert "OpenMP" in build.unavailable()


def test_a_compiler_of_several_words_is_called_with_all_of_them(small, tmp_path, monkeypatch):
    """As for Make: "ccache g++", and "g++ -m64"."""
    launcher = tmp_path / "my launcher"
    launcher.write_text('#!/bin/sh\necho "$*" >> "$0.calls"\nexec "$@"\n')
    launcher.chmod(0o755)
    plain = build.built()
    libraries = [plain]
    for words in (f"'{launcher}' c++", f"'{launcher}' c++ -g"):
        monkeypatch.setenv("CXX", words)
        assert build.unavailable() is None
        libraries.append(build.built())
        assert build.built() == libraries[-1]
    assert len(set(libraries)) == 3
    seen = Path(f"{launcher}.calls").read_text().splitlines()
    assert all(line.startswith("c++ ") for line in seen)
    assert sum(line.startswith("c++ -g ") for line in seen) > 2
    monkeypatch.setenv("CXX", "   ")  # as Make: not set
    assert build.built() == plain
    program = tmp_path / "a compiler"  # a path with spaces is one word
    program.symlink_to(compiler.shutil.which("c++"))
    monkeypatch.setenv("CXX", str(program))
    assert compiler.command() == (str(program),) and build.built().exists()


def test_a_library_is_built_once_for_its_sources_and_flags(small, tmp_path, monkeypatch, capsys):
    library = build.built()
    assert library.parent == tmp_path / "cache" / "quantbench"
    assert capsys.readouterr().err.count("\n") == 1
    with monkeypatch.context() as patch:
        patch.setattr(build, "_build", None)  # would fail
        assert build.built() == library
    assert capsys.readouterr().err == ""
    (small / "two.h").write_text("// included by none\n")
    second = build.built()
    monkeypatch.setenv("CXXFLAGS", "-g")
    assert len({library, second, build.built()}) == 3


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "short", "one bit"])
def test_a_damaged_library_is_built_again(small, damage):
    library = build.built()
    whole = library.read_bytes()
    flipped = whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:]
    library.write_bytes(flipped if damage is None else damage)
    assert build.built() == library
    assert build._intact(library) and len(library.read_bytes()) == len(whole)


def contents(tmp_path: Path) -> list[str]:
    """What is in the cache: the kinds of files, or their names."""
    return sorted(p.suffix or p.name for p in (tmp_path / "cache" / "quantbench").iterdir())


def wrapper(tmp_path: Path, monkeypatch, lines: str) -> Path:
    """A compiler that does these lines of shell before it compiles."""
    path = tmp_path / "compiler"
    first = '[ "$1" != --version ] || exec c++ --version'
    path.write_text(f'#!/bin/sh\n{first}\n{lines}\nexec c++ "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


FAILURES = [
    ("c++ -no-such-option", SOURCE, r"c\+\+ -no-such-option cannot build .*no-such-option"),
    ("/bin/false", SOURCE, "/bin/false cannot build .*status 1 and said nothing"),
    ("/bin/true", SOURCE, "/bin/true cannot build .*wrote no library"),
    ("c++", "int answer() { return nothing; }\n", "nothing.*CXX names another"),
]


@pytest.mark.parametrize(("compiler_", "source", "message"), FAILURES)
def test_a_failed_build_is_told_and_remembered(compiler_, source, message, small, monkeypatch):
    monkeypatch.setenv("CXX", compiler_)
    (small / "one.cpp").write_text(source)
    assert build.unavailable() is None  # not tried yet
    with pytest.raises(KernelError, match=message):
        build.built()
    monkeypatch.setattr(compiling, "library", None)  # would fail otherwise
    with pytest.raises(KernelError, match=f"{message}.*remove .*failed to try again") as error:
        build.built()
    assert "\n" not in str(error.value) and build.unavailable() == str(error.value)


@pytest.mark.parametrize(
    ("message", "lasts"),
    [("error: broken", True), ("fatal error: Killed signal terminated program cc1plus", False)],
)
def test_a_failed_build_is_tried_again(message, lasts, small, tmp_path, monkeypatch):
    """At once if the machine was to blame; otherwise when the note of it is removed, or when what
    failed has changed."""
    path = wrapper(tmp_path, monkeypatch, f'[ -e "$0.broken" ] && echo "{message}" >&2 && exit 1')
    broken = Path(f"{path}.broken")
    broken.touch()
    with pytest.raises(KernelError, match=message):
        build.built()
    assert contents(tmp_path) == [".failed", "lock"][not lasts :]
    broken.unlink()
    if lasts:
        (small / "one.cpp").write_text(SOURCE + "// changed\n")
        assert build.unavailable() is None and build.built().exists()
        (small / "one.cpp").write_text(SOURCE)
        next((tmp_path / "cache" / "quantbench").glob("*.failed")).unlink()
    assert build.built().exists()


@NEEDS_COMPILER
@pytest.mark.parametrize("flag", ["-Ofast", "-ffast-math", "-ffinite-math-only"])
def test_sources_refuse_those_flags_themselves(flag, tmp_path):
    """For who compiles them by other means."""
    command = [*compiler.command(), "-std=c++20", flag, f"-I{build.SOURCES}", "-fsyntax-only"]
    for header in ("linear/layout.h", "hqq/hqq.h", "step/rows.h", "attention/attention.h"):
        source = tmp_path / "source.cpp"
        source.write_text(f'#include "{header}"\n')
        done = ran(*command, source)
        assert done.returncode and "remove -Ofast" in done.stderr


def test_tiles_are_configured_in_one_place_that_gcc_12_compiles_rightly():
    """Its intrinsic reads 64 bytes and says 8: without the line before, stores to the others may be
    dropped, and the tiles' shapes with them."""
    sources = [*build.SOURCES.rglob("*.h"), *build.SOURCES.rglob("*.cpp")]
    texts = {str(path.relative_to(build.SOURCES)): path.read_text() for path in sources}
    places = [name for name, text in texts.items() for _ in re.findall("tile_?loadc|ldtilec", text)]
    assert places == ["common/tiles.h"]
    reads_all = r'asm volatile\("" : : "m"\(shapes\)\);\s*_tile_loadconfig\(&shapes\);'
    assert re.search(rf"const TileShapes& shapes\) {{[^}}]*{reads_all}", texts["common/tiles.h"])


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    small, tmp_path, monkeypatch
):
    if compiler.platform.machine() != "x86_64":
        pytest.skip("instruction set avx2: not of this architecture")
    monkeypatch.setenv("QUANTBENCH_PREBUILD", "1")
    refuses = 'case "$*" in *-mamx*) echo "error: unrecognized -mamx-tile" >&2; exit 1;; esac'
    wrapper(tmp_path, monkeypatch, refuses)
    visible = '__attribute__((visibility("default")))'
    (small / "variants.cpp").write_text(
        "// Variants: portable avx2 amx\nint VARIANT() { return 2; }\n"
    )
    (small / "one.cpp").write_text(
        "__attribute__((weak)) int amx();\n__attribute__((weak)) int avx2();\n"
        f'extern "C" {visible} int answer() {{ return (amx ? 10 : 0) + (avx2 ? avx2() : 0); }}\n'
        f'extern "C" {visible} const char* sets() {{ return QUANTBENCH_BUILT; }}\n'
    )
    library = build.ctypes.CDLL(str(build.built()))
    library.sets.restype = build.ctypes.c_char_p
    assert library.answer() == 2
    assert library.sets() == b" portable avx2 "


# What Linux tells of the vectors of a processor, as people publish it → what is built for it.
WITH_AVX512 = "fma f16c avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
WITH_BF16 = f"{WITH_AVX512} avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg"
PROCESSORS = {
    "Core 2": ("x86_64", "sse2 ssse3", ""),
    "Zen 3": ("x86_64", "fma f16c avx avx2", "avx2"),
    "Alder Lake": ("x86_64", "fma f16c avx2 avx_vnni", "avx2 avxvnni"),
    "Knights Landing": ("x86_64", "fma f16c avx2 avx512f avx512pf avx512er avx512cd", "avx2"),
    "Skylake-X": ("x86_64", WITH_AVX512, "avx2 avx512"),
    "Zen 4": ("x86_64", WITH_BF16, "avx2 avx512 avx512vnni avx512bf16"),
    "Sapphire Rapids": (
        "x86_64",
        f"{WITH_BF16} avx_vnni amx_bf16 avx512_fp16 amx_tile amx_int8",
        "avx2 avx512 avx512vnni avx512bf16 amx avxvnni",
    ),
    "Cortex-A72": ("aarch64", "fp asimd evtstrm crc32 cpuid", ""),
    "Apple M1": ("aarch64", "asimdrdm sha3 asimddp sha512 asimdfhm sb", "neon-dotprod"),
    "AmpereOne": ("aarch64", "asimddp asimdfhm frint i8mm bf16 rng", "neon-dotprod neon-i8mm"),
    "not told": ("x86_64", "", " ".join(compiler.MACHINES["x86_64"])),
}


@pytest.mark.parametrize(("machine", "features", "sets"), PROCESSORS.values(), ids=PROCESSORS)
def test_only_what_the_processor_has_is_built(machine, features, sets, tmp_path, monkeypatch):
    name = "flags" if machine == "x86_64" else "Features"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{name}\t\t: {features}\n" * 2)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setattr(compiler.platform, "machine", lambda: machine)
    assert compiler.sets_of_this_cpu() == sets.split()


@NEEDS_COMPILER
def test_the_processor_itself_agrees():
    """The library asks the processor's own instruction, cpuid."""
    best, runs = build.isa(), []
    for name in build.ISAS:
        with contextlib.suppress(KernelError):
            build.use_isa(name)
            runs.append(name)
    build.use_isa(best)
    assert runs == ["portable", *compiler.sets_of_this_cpu()] and best in runs


def test_a_library_that_does_not_load_is_a_reason(small, monkeypatch):
    """As when the compiler's C++ library is newer than the one that Python uses."""
    (small / "one.cpp").write_text('extern "C" int absent(); int (*there)() = absent;\n')
    build.load.cache_clear()
    with pytest.raises(KernelError, match="do not load: .*absent.*CXX") as error:
        build.load()
    assert "\n" not in str(error.value)


def test_no_more_compilers_than_cores_and_memory(monkeypatch, tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(compiling, "JOB_BYTES", 1)
    for file, text, jobs in (
        *((None, "", 64), ("cpu.max", "350000 100000\n", 4), ("cpu.max", "max 100000\n", 64)),
        *(("memory.current", "100\n", 64), ("memory.max", "105\n", 5)),
        *(("memory.max", "100\n", 1), ("memory.max", "max\n", 64)),
    ):
        if file:
            (group / file).write_text(text)
        assert compiling.jobs() == jobs


def test_a_build_that_is_interrupted_leaves_nothing(small, tmp_path, monkeypatch):
    lines = 'case "$*" in *" -c "*) touch "$0.called"; sleep 60;; esac'
    path = wrapper(tmp_path, monkeypatch, lines)
    process = started("-c", PROGRAM, small)
    wait_for(Path(f"{path}.called").exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1].endswith("KeyboardInterrupt\n")
    assert contents(tmp_path) == ["lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(small, tmp_path):
    left = tmp_path / "cache" / "quantbench" / "build-killed"
    left.mkdir(parents=True)
    (left / "one.cpp.o").write_text("half")
    build.built()
    assert not left.exists()


def test_the_libraries_that_were_used_last_stay(small, monkeypatch):
    monkeypatch.setattr(build, "MAX_LIBRARIES", 2)
    libraries = []
    for version in (0, 1, 0, 2):
        (small / "one.cpp").write_text(SOURCE + f"// {version}\n")
        libraries.append(build.built())
    assert [path.exists() for path in libraries] == [True, False, True, True]


def test_a_cache_that_cannot_be_written_is_an_error(small, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(KernelError, match="set XDG_CACHE_HOME"):
        build.built()


def test_processes_at_once_build_it_once(small, tmp_path):
    running = [started("-c", PROGRAM, small) for _ in range(2)]
    ended = [process.communicate() for process in running]
    assert [out for out, _ in ended] == ["42\n", "42\n"], ended
    assert sum(error.count("Building") for _, error in ended) == 1


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("isa", "says"), [("portable", "portable\n"), ("mmx", "there are portable, avx2, avx512")]
)
def test_the_environment_names_an_instruction_set(isa, says, monkeypatch):
    monkeypatch.setenv("QUANTBENCH_ISA", isa)
    done = python("-c", "from quantbench.ops.cpu import build; print(build.isa())")
    assert says in done.stdout + done.stderr and bool(done.returncode) == (isa == "mmx")
