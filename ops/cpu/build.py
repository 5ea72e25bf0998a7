"""Builds the C++ kernels in src/ with the machine's compiler, once, and loads them.

Every *.cpp there goes into one library, kept in $XDG_CACHE_HOME/quantbench (~/.cache/quantbench)
under a hash of all that it was made from. A file's name says which instructions it may use
(INSTRUCTIONS); which of them run is decided when the library is loaded (src/common/isa.cpp), so
the library fits any machine of its architecture, and the hash leaves this one's CPU out.
QUANTBENCH_ISA names another set than the best: portable, avx2, avx512, avx512vnni, amx.

Ops are registered from C++, through torch's stable C interface (torch/csrc/stable): that compiles
in 1 s where torch/library.h takes 4, and a call costs 2.5 µs; through torch.library.custom_op and
ctypes it was 7, and the 150 ops of a step then took a millisecond of Python.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from errors import KernelError

SOURCES = Path(__file__).parent / "src"
TORCH = Path(torch.__file__).parent
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"),
    "-DTORCH_TARGET_VERSION=0x020B000000000000",  # what torch 2.11 has, and newer ones keep
    *(f"-isystem{TORCH / folder}" for folder in ("include", "include/torch/csrc/api/include")),
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (
    *(*AVX2, "-mprefer-vector-width=512"),
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")),
)
AVX512VNNI = (*AVX512, "-mavx512vnni", "-mavx512vbmi")
INSTRUCTIONS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512vnni": AVX512VNNI,
    "amx": (*AVX512VNNI, *(f"-mamx-{part}" for part in ("tile", "bf16", "int8"))),
}
ISAS = ("portable", *INSTRUCTIONS)
DIGEST_BYTES = hashlib.sha256().digest_size


def unavailable() -> str | None:
    """Why the C++ kernels cannot be used here, or None. Builds nothing."""
    if sys.platform != "linux":
        return f"the C++ kernels are built on Linux only, not on {sys.platform}"
    named = os.environ.get("CXX")
    if _compiler() is None:
        tried = f"$CXX is {named!r}, which is no program" if named else "no c++, g++ or clang++"
        return f"the C++ kernels need a C++ compiler: {tried}; install one or set CXX"
    return None


@functools.cache
def refusal() -> str | None:
    """Why the C++ kernels cannot be used here, or None, found out by building and loading them."""
    try:
        load()
    except KernelError as error:
        return str(error)
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels' library, its ops registered with torch; built first if that was not done.

    Raises KernelError with the reason, which may be the compiler's own.
    """
    if reason := unavailable():
        raise KernelError(reason)
    path = built()
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.quantbench_isa.restype = ctypes.c_char_p
    if name := os.environ.get("QUANTBENCH_ISA"):
        use_isa(name, library)
    return library


def isa() -> str:
    """The instruction set in use: one of ISAS."""
    return load().quantbench_isa().decode()


def use_isa(name: str, library: ctypes.CDLL | None = None) -> None:
    """Use another instruction set from now on, in the whole process: for tests."""
    if not (library or load()).quantbench_use_isa(name.encode()):
        raise KernelError(
            f"QUANTBENCH_ISA={name}: this CPU cannot run it, or there is no such instruction set; "
            f"there are {', '.join(ISAS)}"
        )


def built() -> Path:
    """The library, built if the cache has none like it. Processes that come at once wait for one.

    A digest of the library follows it in its file, for loading a damaged one could crash.
    """
    compiler = _compiler()
    sources = [path for path in sorted(SOURCES.rglob("*.cpp")) if _instructions(path) is not None]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantbench"
    library = folder / f"kernels-{_key(compiler)}.so"
    if _intact(library):
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however it ends
            if not _intact(library):
                print("Building the CPU kernels, once: about a minute …", file=sys.stderr)
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    os.replace(_compile(compiler, sources, Path(scratch)), library)
    except OSError as error:
        raise KernelError(
            f"cannot keep the C++ kernels in {folder}: {error.strerror}; set XDG_CACHE_HOME to a "
            "folder that can be written to"
        ) from error
    return library


def _compile(compiler: str, sources: list[Path], scratch: Path) -> Path:
    def compile_one(source: Path) -> Path:
        target = scratch / f"{'-'.join(source.relative_to(SOURCES).parts)}.o"
        flags = (*_flags(), *_instructions(source), f"-I{SOURCES}")
        _run([compiler, *flags, "-c", source, "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    library = scratch / "kernels.so"
    link = ["-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", library]
    _run([compiler, *_flags(), *link])
    data = library.read_bytes()
    library.write_bytes(data + hashlib.sha256(data).digest())
    return library


def _intact(library: Path) -> bool:
    if not library.exists():
        return False
    data = library.read_bytes()
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _run(command: list) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines[-1:]
        raise KernelError(
            f"{command[0]} cannot build the C++ kernels: {'; '.join(errors[:2])} "
            "(CXX names another compiler; GCC 11 and clang 14 or newer will do)"
        )


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    candidates = (named,) if named else ("c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, candidates)), None)


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *os.environ.get("CXXFLAGS", "").split())


def _instructions(source: Path) -> tuple[str, ...] | None:
    """The flags of a source file's own; None if it is for another architecture."""
    if source.stem not in INSTRUCTIONS:
        return ()
    return INSTRUCTIONS[source.stem] if platform.machine() == "x86_64" else None


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    parts = [torch.__version__, platform.machine(), version, *_flags(), repr(INSTRUCTIONS)]
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        parts += [str(path.relative_to(SOURCES)), path.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
