"""Finding the machine's C++ compiler and building a library with it.

A source with a line "// Variants: portable avx2" is compiled once for each instruction set that the
line names, with that set's flags and -DVARIANT=avx2; other sources once, with neither. Sets of
other machines are left out, and one that the compiler does not support is left out of the library,
and so are all that MACHINES lists after it: those of younger processors.
"""

import contextlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from quantbench import host
from quantbench.errors import KernelError

TORCH = Path(torch.__file__).resolve().parent  # the same for all checkouts that share it
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
DOTPROD = "-march=armv8.2-a+dotprod"
INSTRUCTIONS = {
    "portable": (),
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512vnni": AVX512VNNI,
    "avx512bf16": AVX512BF16,
    "amx": (*AVX512BF16, "-mavx512vbmi", *(f"-mamx-{part}" for part in ("tile", "bf16", "int8"))),
    "avxvnni": (*AVX2, "-mavxvnni"),
    "neon-dotprod": (DOTPROD,),
    "neon-i8mm": (f"{DOTPROD}+i8mm",),
}
MACHINES = {
    "x86_64": ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "avxvnni"),
    "aarch64": ("neon-dotprod", "neon-i8mm"),
}
_VARIANTS = re.compile(r"^// Variants: (.*)$", re.MULTILINE)
# For the sources in a folder. hqq rounds products before it adds them, so that all instruction sets
# give the same bits.
FLAGS_OF_FOLDERS = {"hqq": ("-ffp-contract=off",)}
# Compiled to see whether the compiler and the assembler support an instruction set.
PROBES = {
    "avx2": "__m256i f(__m256i a) { return _mm256_add_epi8(a, a); }",
    "avx512": "__m512i f(__m512i a) { return _mm512_add_epi8(a, a); }",
    "avx512vnni": "__m512i f(__m512i a) { return _mm512_dpbusd_epi32(a, a, a); }",
    "avx512bf16": "__m512 f(__m512 a, __m512bh b) { return _mm512_dpbf16_ps(a, b, b); }",
    "amx": "void f() { _tile_dpbf16ps(0, 1, 2); _tile_dpbsud(0, 1, 2); _tile_release(); }",
    "avxvnni": "__m256i f(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }",
    "neon-dotprod": "int32x4_t f(int32x4_t a, int8x16_t b) { return vdotq_s32(a, b, b); }",
    "neon-i8mm": "int32x4_t f(int32x4_t a, int8x16_t b) { return vmmlaq_s32(a, b, b); }",
}
# These flags remove additions that are there to round, and tests for NaN: see src/common/variant.h.
FAST_MATH = {
    *("-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-fassociative-math"),
    *("-ffinite-math-only", "-freciprocal-math", "-ffp-model=fast", "-ffp-model=aggressive"),
}
JOB_BYTES = 1 << 30  # memory for one compiler process; more than the largest source needs
# Compiler messages when the machine failed, not the source: the build is tried again next time.
PASSING = ("Killed", "No space left", "annot allocate memory", "out of memory")


class Passing(KernelError):
    """A failed build that may succeed the next time, because the machine was the cause."""


Words = tuple[str, ...]  # a program and its first arguments


def command() -> Words | None:
    """The compiler: $CXX, or else the first of c++, g++ and clang++; None if there is none.

    $CXX may be several words, as Make takes it: "ccache g++", "g++ -m64".
    """
    words = _named()
    candidates = (words,) if words else (("c++",), ("g++",), ("clang++",))
    for program, *rest in candidates:
        if path := shutil.which(program):
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
    for variable, given in (("CXX", words), ("CXXFLAGS", _own_flags())):
        if wrong := sorted(FAST_MATH & set(given)):
            return (
                f"{variable} has {' and '.join(wrong)}, which breaks the rounding of the C++ "
                f"kernels; remove it from {variable}"
            )
    return None


def identity(compiler: Words) -> list[str]:
    """Everything about the compiler and its flags on which the library depends."""
    parts = [torch.__version__, platform.machine(), *compiler, version(compiler), *flags()]
    return [*parts, repr(INSTRUCTIONS), repr(FLAGS_OF_FOLDERS), repr(PROBES)]


def version(compiler: Words) -> str:
    """The compiler's answer to --version."""
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout


def flags() -> tuple[str, ...]:
    return (*FLAGS, *_own_flags())


def _own_flags() -> list[str]:
    return os.environ.get("CXXFLAGS", "").split()


@dataclass(frozen=True)
class Unit:
    """A source, compiled once."""

    source: Path
    variant: str | None  # the instruction set, where the source has variants
    options: Words  # in addition to `flags`

    @property
    def object_name(self) -> str:
        return f"{self.source.parent.name}-{self.source.stem}-{self.variant}.o"


def instruction_sets(machine: str) -> tuple[str, ...]:
    return ("portable", *MACHINES.get(machine, ()))


def units(sources: Path, machine: str | None = None) -> list[Unit]:
    """What is compiled of the folder `sources` for a machine, the one that this is if None."""
    sets, made = instruction_sets(machine or platform.machine()), []
    for source in sorted(sources.rglob("*.cpp")):
        named = _VARIANTS.search(source.read_text())
        own = (*FLAGS_OF_FOLDERS.get(source.parent.name, ()), f"-I{sources}")
        for variant in filter(sets.__contains__, named[1].split()) if named else [None]:
            define = f"-DVARIANT={variant.replace('-', '_')}" if variant else None
            extra = (*INSTRUCTIONS[variant], define) if variant else ()
            made.append(Unit(source, variant, (*extra, *own)))
    return made


def library(compiler: Words, sources: Path, scratch: Path) -> Path:
    """Compile all sources into one library in the folder `scratch`. Raises KernelError."""
    processes = _Processes(scratch)
    with ThreadPoolExecutor(jobs()) as pool, processes.ended_with_this_one():
        every = units(sources)
        used = {unit.variant for unit in every}
        wanted = [name for name in MACHINES.get(platform.machine(), ()) if name in used]
        known = ["portable", *_known(compiler, wanted, processes, pool)]
        defined = f'-DQUANTBENCH_BUILT=" {" ".join(known)} "'

        def compile_one(unit: Unit) -> Path:
            target = scratch / unit.object_name
            options = (*flags(), *unit.options, defined)
            processes.run(compiler, [*options, "-c", unit.source, "-o", target])
            return target

        chosen = [unit for unit in every if unit.variant is None or unit.variant in known]
        objects = list(pool.map(compile_one, chosen))
        target = scratch / "kernels.so"
        link = ["-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", target]
        processes.run(compiler, [*flags(), *link])
    if not target.is_file():
        raise _cannot_build(compiler, "it reported success and wrote no library")
    return target


def _known(
    compiler: Words, wanted: list[str], processes: "_Processes", pool: ThreadPoolExecutor
) -> list[str]:
    """The wanted instruction sets that the compiler supports, up to the first that it does not."""

    def knows(name: str) -> bool:
        source, target = (processes.folder / f"probe-{name}.{ending}" for ending in ("cpp", "o"))
        header = "arm_neon.h" if name in MACHINES["aarch64"] else "immintrin.h"
        source.write_text(f"#include <{header}>\n{PROBES[name]}\n")
        try:
            processes.run(compiler, [*flags(), *INSTRUCTIONS[name], "-c", source, "-o", target])
        except Passing:
            raise
        except KernelError:
            return False
        return True

    known = []
    for name, yes in zip(wanted, pool.map(knows, wanted), strict=True):
        if not yes:
            break
        known.append(name)
    return known


def jobs() -> int:
    """How many compilers may run at once: one for each CPU, and for each JOB_BYTES of memory."""
    free = host.free_memory()
    limits = [host.cores(physical=False), None if free is None else free // JOB_BYTES]
    return max(1, min((limit for limit in limits if limit is not None), default=1))


class _Processes:
    """The compiler processes that are running. They are killed if SIGTERM ends this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.ending = False

    def run(self, compiler: Words, arguments: list) -> None:
        words = [*compiler, *map(str, arguments)]
        with self.lock:
            if self.ending:
                raise Passing("the build has been ended")
            process = subprocess.Popen(
                words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(self.folder)},  # a folder that is removed later
                start_new_session=True,  # a process group, so that its children can be killed, too
            )
            self.running.add(process)
        _, errors = process.communicate()
        with self.lock:
            self.running.discard(process)
        if process.returncode:
            raise _failure(compiler, process.returncode, errors)

    @contextlib.contextmanager
    def ended_with_this_one(self) -> Iterator[None]:
        """On SIGTERM, kill the compilers and let the caller clean up before the process ends."""
        handles = threading.current_thread() is threading.main_thread()
        handles = handles and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

        def end(*_) -> None:
            raise _Terminated

        if handles:
            signal.signal(signal.SIGTERM, end)
        try:
            yield
        except BaseException:
            self._end()
            raise
        finally:
            if handles:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end(self) -> None:
        with self.lock:
            self.ending = True
            for process in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


class _Terminated(BaseException):
    """SIGTERM arrived while compilers were running."""


@contextlib.contextmanager
def terminates() -> Iterator[None]:
    """A context around `library` and the cleaning up after it: at its end, SIGTERM ends the process
    if it arrived inside."""
    try:
        yield
    except _Terminated:
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM) from None


def _failure(compiler: Words, status: int, errors: str) -> KernelError:
    lines = errors.strip().splitlines()
    chosen = [line.strip() for line in lines if "error" in line] or lines[-1:]
    reason = "; ".join(chosen[:2]) or f"it ended with status {status} and said nothing"
    passing = status < 0 or any(word in errors for word in PASSING)
    return _cannot_build(compiler, reason, Passing if passing else KernelError)


def _cannot_build(
    compiler: Words, reason: str, kind: type[KernelError] = KernelError
) -> KernelError:
    return kind(
        f"{shlex.join(compiler)} cannot build the C++ kernels: {reason} "
        "(CXX names another compiler; GCC 11 and clang 14 or newer will do)"
    )
