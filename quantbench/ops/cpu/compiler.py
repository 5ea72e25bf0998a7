"""Finding the machine's C++ compiler and building a library with it.

A source with a line "// Variants: portable avx2" is compiled once for each instruction set that the
line names, with that set's flags and -DVARIANT=avx2; other sources once, with neither. Sets of
other machines are left out, and one that the compiler does not support is left out of the library,
and so are all that MACHINES lists after it: those of younger processors.
"""

import contextlib
import functools
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from quantbench import host
from quantbench.errors import KernelError

Words = tuple[str, ...]  # a program and its first arguments, or options
TORCH = Path(torch.__file__).resolve().parent
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"),
    "-DTORCH_TARGET_VERSION=0x020B000000000000",  # the stable interface of torch 2.11
    *(f"-isystem{TORCH / folder}" for folder in ("include", "include/torch/csrc/api/include")),
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (
    *(*AVX2, "-mprefer-vector-width=512"),
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")),
)
AVX512VNNI = (*AVX512, "-mavx512vnni")
AVX512BF16 = (*AVX512VNNI, "-mavx512bf16")
AMX = (*AVX512BF16, "-mavx512vbmi", *(f"-mamx-{part}" for part in ("tile", "bf16", "int8")))
DOTPROD = "-march=armv8.2-a+dotprod"
# The instruction sets of each machine: the flags, and what is compiled to see whether the compiler
# and the assembler support one.
MACHINES: Mapping[str, Mapping[str, tuple[Words, str]]] = {
    "x86_64": {
        "avx2": (AVX2, "__m256i f(__m256i a) { return _mm256_add_epi8(a, a); }"),
        "avx512": (AVX512, "__m512i f(__m512i a) { return _mm512_add_epi8(a, a); }"),
        "avx512vnni": (AVX512VNNI, "__m512i f(__m512i a) { return _mm512_dpbusd_epi32(a, a, a); }"),
        "avx512bf16": (
            AVX512BF16,
            "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }",
        ),
        "amx": (
            AMX,
            "void f() { _tile_dpbf16ps(0, 1, 2); _tile_dpbsud(0, 1, 2); _tile_release(); }",
        ),
        "avxvnni": (
            (*AVX2, "-mavxvnni"),
            "__m256i f(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }",
        ),
    },
    "aarch64": {
        "neon-dotprod": (
            (DOTPROD,),
            "int32x4_t f(int32x4_t a, int8x16_t b) { return vdotq_s32(a, b, b); }",
        ),
        "neon-i8mm": (
            (f"{DOTPROD}+i8mm",),
            "int32x4_t f(int32x4_t a, int8x16_t b) { return vmmlaq_s32(a, b, b); }",
        ),
    },
}
HEADERS = {"x86_64": "immintrin.h", "aarch64": "arm_neon.h"}
_VARIANTS = re.compile(r"^// Variants: (.*)$", re.MULTILINE)
# For the sources in a folder. hqq rounds products before it adds them, so that all instruction sets
# give the same bits.
FLAGS_OF_FOLDERS = {"hqq": ("-ffp-contract=off",)}
# These flags remove additions that are there to round, and tests for NaN: see src/common/variant.h.
FAST_MATH = {
    *("-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-fassociative-math"),
    *("-ffinite-math-only", "-freciprocal-math", "-ffp-model=fast", "-ffp-model=aggressive"),
}
ANSWER_SECONDS = 20  # for --version
BUILD_SECONDS = 900  # for one source
JOB_BYTES = 1 << 30  # memory for one compiler process; more than the largest source needs
# Compiler messages when the machine failed, not the source: the build is tried again next time.
PASSING = ("Killed", "No space left", "annot allocate memory", "out of memory")


class Passing(KernelError):
    """A failed build that may succeed the next time, because the machine was the cause."""


def command() -> Words | None:
    """The compiler: $CXX, or else the first of c++, g++ and clang++; None if there is none.

    $CXX may be several words, as Make takes it: "ccache g++", "g++ -m64".
    """
    words = _named()
    candidates = (words,) if words else (("c++",), ("g++",), ("clang++",))
    for program, *rest in candidates:
        if path := shutil.which(program):
            # /bin/c++ and /usr/bin/c++ are one program; a link's own name tells it what it is.
            path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            return (path, *rest)
    return None


def _named() -> Words:
    """The words of $CXX; none where it is not set, one where they are a program's path."""
    text = os.environ.get("CXX", "")
    if shutil.which(text):
        return (text,)
    try:
        return tuple(shlex.split(text))
    except ValueError:  # a quote that is not closed
        return (text,)


def unavailable() -> str | None:
    """Why there is no compiler, or why CXXFLAGS cannot be used; otherwise None."""
    words = _named()
    if command() is None:
        tried = "no c++, g++ or clang++"
        if words:
            which = "which" if len(words) == 1 else f"of which {words[0]!r}"
            tried = f"$CXX is {os.environ['CXX']!r}, {which} is no program"
        return f"the C++ kernels need a C++ compiler: {tried}; install one or set CXX"
    for variable, given in (("CXX", words), ("CXXFLAGS", own_flags())):
        if wrong := sorted(FAST_MATH & set(given)):
            return (
                f"{variable} has {' and '.join(wrong)}, which breaks the rounding of the C++ "
                f"kernels; remove it from {variable}"
            )
    return None


def identity(compiler: Words) -> list[str]:
    """Everything about the compiler and its flags on which the library depends; not where torch
    lies, so that virtual environments with the same torch share a library."""
    parts = [torch.__version__, platform.machine(), *compiler, version(compiler)]
    parts += [flag.replace(str(TORCH), "torch") for flag in flags()]
    return [*parts, repr(MACHINES), repr(FLAGS_OF_FOLDERS)]


def version(compiler: Words) -> str:
    """The compiler's answer to --version. Raises KernelError where none comes."""
    try:
        asked = (*compiler, "--version"), _stamp(compiler[0])
        return _answer(*asked)
    except subprocess.TimeoutExpired:
        why = f"does not answer --version within {ANSWER_SECONDS} s"
    except OSError as error:
        why = f"cannot be started: {error.strerror}"
    raise KernelError(
        f"the C++ kernels need a C++ compiler, and {shlex.join(compiler)} {why}; CXX names another"
    )


def _stamp(program: str) -> int:
    return os.stat(program).st_mtime_ns


@functools.cache
def _answer(command: Words, changed: int) -> str:
    """What a command prints; it has no input, and is killed with its children if it hangs."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=ANSWER_SECONDS)[0]
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def flags() -> tuple[str, ...]:
    return (*FLAGS, *own_flags())


def own_flags() -> list[str]:
    return os.environ.get("CXXFLAGS", "").split()


@dataclass(frozen=True)
class Unit:
    source: Path
    variant: str | None  # the instruction set, where the source has variants
    options: Words  # in addition to `flags`

    @property
    def object_name(self) -> str:
        return f"{self.source.parent.name}-{self.source.stem}-{self.variant}.o"


def units(sources: Path, machine: str | None = None) -> list[Unit]:
    """What is compiled of the folder `sources` for a machine, the one that this is if None."""
    sets, made = MACHINES.get(machine or platform.machine(), {}), []
    for source in sorted(sources.rglob("*.cpp")):
        named = _VARIANTS.search(source.read_text(encoding="utf-8"))
        own = (*FLAGS_OF_FOLDERS.get(source.parent.name, ()), f"-I{sources}")
        for variant in named[1].split() if named else [None]:
            if variant in (None, "portable") or variant in sets:
                options = sets[variant][0] if variant in sets else ()
                define = [f"-DVARIANT={variant.replace('-', '_')}"] if variant else []
                made.append(Unit(source, variant, (*options, *define, *own)))
    return made


def library(compiler: Words, sources: Path, scratch: Path) -> Path:
    """Compile all sources into one library in the folder `scratch`. Raises KernelError."""
    processes, target = _Processes(compiler, scratch), scratch / "kernels.so"
    every = units(sources)
    used = {unit.variant for unit in every}
    wanted = [name for name in MACHINES.get(platform.machine(), ()) if name in used]
    with ThreadPoolExecutor(jobs()) as pool:
        try:
            pairs = zip(wanted, pool.map(processes.know, wanted), strict=True)
            known = [
                "portable",
                *(name for name, _ in itertools.takewhile(lambda pair: pair[1], pairs)),
            ]
            defined = f'-DQUANTBENCH_BUILT=" {" ".join(known)} "'

            def compile_one(unit: Unit) -> Path:
                compiled = scratch / unit.object_name
                processes.run(*unit.options, defined, "-c", unit.source, "-o", compiled)
                return compiled

            chosen = [unit for unit in every if unit.variant is None or unit.variant in known]
            objects = list(pool.map(compile_one, chosen))
            processes.run("-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", target)
        except BaseException:
            processes.end()
            raise
    if not target.is_file():
        raise _cannot_build(compiler, "it reported success and wrote no library")
    return target


def jobs() -> int:
    """How many compilers may run at once: one for each CPU, and for each JOB_BYTES of memory."""
    free = host.free_memory()
    limits = [host.cores(physical=False), None if free is None else free // JOB_BYTES]
    return max(1, min((limit for limit in limits if limit is not None), default=1))


class _Processes:
    """The compiler's processes that are running."""

    def __init__(self, compiler: Words, folder: Path) -> None:
        self.compiler, self.folder = compiler, folder
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.ending = False

    def run(self, *arguments: str | Path) -> None:
        """Call the compiler. Raises KernelError where it fails."""
        with self.lock:
            if self.ending:
                raise Passing("the build has been ended")
            process = subprocess.Popen(
                [*self.compiler, *flags(), *map(str, arguments)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(self.folder)},  # a folder that is removed later
                start_new_session=True,  # a process group, so that its children can be killed, too
            )
            self.running.add(process)
        try:
            _, errors = process.communicate(timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            why = f"one of its processes did not end within {BUILD_SECONDS} s"
            raise _cannot_build(self.compiler, why, Passing) from None
        with self.lock:
            self.running.discard(process)
        if process.returncode:
            lines = errors.strip().splitlines()
            chosen = [line.strip() for line in lines if "error" in line] or lines[-1:]
            status = f"it ended with status {process.returncode} and said nothing"
            passing = process.returncode < 0 or any(word in errors for word in PASSING)
            kind = Passing if passing else KernelError
            raise _cannot_build(self.compiler, "; ".join(chosen[:2]) or status, kind)

    def know(self, name: str) -> bool:
        """Whether the compiler supports an instruction set of this machine."""
        machine = platform.machine()
        options, probe = MACHINES[machine][name]
        source, target = (self.folder / f"probe-{name}.{ending}" for ending in ("cpp", "o"))
        source.write_text(f"#include <{HEADERS[machine]}>\n{probe}\n", encoding="utf-8")
        try:
            self.run(*options, "-c", source, "-o", target)
        except Passing:
            raise
        except KernelError:
            return False
        return True

    def end(self) -> None:
        """Kill them, and start no more."""
        with self.lock:
            self.ending = True
            for process in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _cannot_build(
    compiler: Words, reason: str, kind: type[KernelError] = KernelError
) -> KernelError:
    return kind(
        f"{shlex.join(compiler)} cannot build the C++ kernels: {reason} "
        "(CXX names another compiler; GCC 11 and clang 14 or newer will do)"
    )
