"""Finding the machine's C++ compiler: its command, its flags, what a library of it depends on."""

import contextlib
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
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
# For the sources in a folder. hqq rounds products before it adds them, so that all instruction sets
# give the same bits.
FLAGS_OF_FOLDERS = {"hqq": ("-ffp-contract=off",)}
# These flags remove additions that are there to round, and tests for NaN: see src/common/variant.h.
FAST_MATH = {
    *("-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-fassociative-math"),
    *("-ffinite-math-only", "-freciprocal-math", "-ffp-model=fast", "-ffp-model=aggressive"),
}
ANSWER_SECONDS = 20  # for --version


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
    for variable, options in (("CXX", words), ("CXXFLAGS", own_flags())):
        if wrong := sorted(FAST_MATH & set(options)):
            return (
                f"{variable} has {' and '.join(wrong)}, which breaks the rounding of the C++ "
                f"kernels; remove it from {variable}"
            )
    return None


def sets_of_this_cpu() -> list[str]:
    """The instruction sets that this processor has, beside portable; all, where Linux does not tell
    what it has."""
    has = {name.replace("_", "").replace("asimddp", "dotprod") for name in host.cpu_features()}
    known = MACHINES.get(platform.machine(), {})
    return [name for name, (flags, _) in known.items() if not has or _features(flags) <= has]


def _features(flags: Words) -> set[str]:
    """Those that compiler flags name: -mavx512vnni and -mamx-tile are Linux's avx512_vnni and
    amx_tile without what joins them."""
    named = {flag[2:].replace("-", "") for flag in flags if "=" not in flag}
    return named.union(*(flag.split("+")[1:] for flag in flags))


def identity(compiler: Words, sets: list[str]) -> list[str]:
    """Everything about the compiler, its flags and the instruction sets on which the library
    depends; not where torch lies, so that virtual environments with the same torch share one."""
    parts = [torch.__version__, platform.machine(), *sets, *compiler, version(compiler)]
    parts += [flag.replace(str(TORCH), "torch") for flag in flags()]
    return [*parts, repr(MACHINES), repr(FLAGS_OF_FOLDERS)]


def version(compiler: Words) -> str:
    """The compiler's answer to --version. Raises KernelError where none comes."""
    try:
        question = (*compiler, "--version"), _stamp(compiler[0])
        return _answer(*question)
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
