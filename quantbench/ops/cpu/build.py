"""Building and loading the C++ kernels in src/. They are built when they are first needed, unless
the wheel brings them (setup.py) and neither CXX nor CXXFLAGS asks for others.

All *.cpp files are compiled into one library (compiling.py), which is cached in
$XDG_CACHE_HOME/quantbench (~/.cache/quantbench) under a hash of the sources, the compiler, its
flags and the instruction sets that this CPU has: the others would take most of the build's time.
A wheel's library has all of them. The best is chosen when the library is loaded
(src/common/isa.cpp). QUANTBENCH_ISA selects another: portable, avx2, avxvnni, avx512, avx512vnni,
avx512bf16, amx; on ARM portable, neon-dotprod, neon-i8mm.

Ops are registered from C++ through torch's stable C interface (torch/csrc/stable), which compiles
in 1 s instead of the 4 s of torch/library.h. A call costs 2.5 µs; through torch.library.custom_op
and ctypes it cost 7 µs, a millisecond for the 150 ops of a step.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from quantbench import files
from quantbench.errors import KernelError
from quantbench.ops.cpu import compiler

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
ISAS = ("portable", *compiler.MACHINES.get(platform.machine(), ()))
MAX_LIBRARIES = 10  # that stay in the cache: those that were used last
MIN_STACK_BYTES = 1 << 20  # of a thread; a product's buffers take about 270 KB of it
DIGEST_BYTES = hashlib.sha256().digest_size

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unavailable() -> str | None:
    """Why the C++ kernels cannot be used here, or None. Builds nothing; takes milliseconds.

    A build that failed before is a reason. If none was tried, None does not mean that it succeeds.
    """
    if sys.platform != "linux":
        return f"the C++ kernels are built on Linux only, not on {sys.platform}"
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return (
            "the C++ kernels' threads wait for each other, which needs a torch that runs threads "
            "by OpenMP, as the wheels on PyPI do"
        )
    if reason := _small_stacks():
        return reason
    if _comes_built():
        return None
    if reason := compiler.unavailable():
        return reason
    try:
        library = _library()
    except KernelError as error:
        return str(error)
    if files.is_private(library):
        return None
    from quantbench.ops.cpu import compiling

    return compiling.remembered(library)


def _small_stacks() -> str | None:
    """Why threads' stacks would overflow, a crash without a message; None if they are large enough.

    OpenMP reads a number without a unit as KiB.
    """
    text = os.environ.get("OMP_STACKSIZE", "")
    size = re.fullmatch(r"\s*(\d+)\s*([bkmg]?)\s*", text.lower())
    units = {"b": 1, "": 1 << 10, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    if size is None or int(size[1]) * units[size[2]] >= MIN_STACK_BYTES:
        return None
    return f"the C++ kernels need OMP_STACKSIZE={MIN_STACK_BYTES >> 10}K or more, not {text!r}"


@functools.cache
def refusal() -> str | None:
    """Why the C++ kernels cannot be used here, or None. Builds and loads them to find out."""
    try:
        load()
    except KernelError as error:
        return str(error)
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels' library, loaded, with its ops registered with torch; built first if need be.

    Raises KernelError with the reason, which may be the compiler's message.
    """
    if reason := unavailable():
        raise KernelError(reason)
    path = built()
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        reason = str(error.__cause__ or error).splitlines()[0]  # torch wraps the cause
        hint = "; the compiler's C++ library is newer than the one in use" * ("GLIBC" in reason)
        raise KernelError(
            f"the C++ kernels do not load: {reason}{hint} (CXX names another compiler)"
        ) from error
    library.quantbench_isa.restype = ctypes.c_char_p
    if name := os.environ.get("QUANTBENCH_ISA"):
        use_isa(name, library)
    return library


def constant_when_traced(function: _Function) -> _Function:
    """torch.compiler.assume_constant_result without importing torch._dynamo, which takes as long
    as torch itself: most processes compile nothing."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_when_traced
def ready() -> bool:
    """Load the C++ library, outside of what torch.compile traces."""
    load()
    return True


def isa() -> str:
    """The instruction set in use: one of ISAS."""
    return load().quantbench_isa().decode()


def use_isa(name: str, library: ctypes.CDLL | None = None) -> None:
    """Use another instruction set from now on, in the whole process (for tests).

    Raises KernelError if it does not exist or cannot run here.
    """
    if not (library or load()).quantbench_use_isa(name.encode()):
        raise KernelError(
            f"QUANTBENCH_ISA={name}: this CPU cannot run it, the compiler does not know it, or "
            f"there is no such instruction set; there are {', '.join(ISAS)}"
        )


def built() -> Path:
    """The library's file, built unless the cache holds it. Concurrent processes wait for one build.

    The file ends with a digest of the library, since loading a damaged library could crash. One
    that somebody else may have written is built again. Raises KernelError. A failed build is
    repeated only after the sources, the compiler or its flags have changed.
    """
    if _comes_built():
        return prebuilt()
    library = _library()
    if _intact(library):
        with contextlib.suppress(OSError):  # a folder that is read-only
            os.utime(library)
        return library
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(files.opened(library.parent / "lock", os.O_RDWR | os.O_CREAT), "wb") as lock:
            files.lock(lock)
            if not _intact(library):
                _build(library)
            libraries = sorted(library.parent.glob("kernels-*.so"), key=os.path.getmtime)
            for old in libraries[:-MAX_LIBRARIES]:
                old.unlink()
    except OSError as error:
        raise KernelError(
            f"cannot keep the C++ kernels in {library.parent}: {error.strerror}; set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from error
    return library


def _library() -> Path:
    """Where the library is, or will be."""
    return files.cache_folder() / _name(compiler.identity(compiler.command(), _sets()))


def _sets() -> list[str]:
    """The instruction sets to build, portable code apart: all of them for a wheel (setup.py)."""
    every = os.environ.get("QUANTBENCH_PREBUILD") == "1"
    return list(ISAS[1:]) if every else compiler.sets_of_this_cpu()


def prebuilt() -> Path:
    """Where a wheel has the library of these sources for this architecture, if it has one."""
    return PREBUILT / _name([platform.machine()])


def _comes_built() -> bool:
    chosen = os.environ.get("CXX") or os.environ.get("CXXFLAGS")
    return PREBUILT.is_dir() and not chosen and prebuilt().is_file()


def _name(parts: list[str]) -> str:
    """The file name of a library of the sources, and of what else it depends on."""
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        parts += [str(path.relative_to(SOURCES)), path.read_text(encoding="utf-8")]
    key = "\0".join(parts).encode()
    return f"kernels-{_digest(key).hex()[:16]}.so"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _build(library: Path) -> None:
    """Build the library. Only called with the lock held."""
    from quantbench.ops.cpu import compiling

    if reason := compiling.remembered(library):
        raise KernelError(reason)
    folder = library.parent
    for left_over in folder.glob("build-*"):  # left by a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    print("Building the CPU kernels, once: up to three minutes …", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        try:
            path = compiling.library(compiler.command(), SOURCES, Path(scratch), _sets())
        except compiling.Passing:
            raise
        except KernelError as error:
            compiling.remember(library, error)
            raise
        data = path.read_bytes()
        path.write_bytes(data + _digest(data))
        path.chmod(0o700)
        os.replace(path, library)


def _intact(library: Path) -> bool:
    if not files.is_private(library):
        return False
    data = files.read_ours(library)
    return _digest(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]
