"""The C++ kernels in src/: built with the machine's compiler when first needed, kept, and loaded.

Every *.cpp there goes into one library (compiler.py), kept in $XDG_CACHE_HOME/quantbench
(~/.cache/quantbench) under a hash of all that it was made from. Which instruction set runs is
decided when the library is loaded (src/common/isa.cpp), so the library fits any machine of its
architecture, and the hash leaves this one's CPU out. QUANTBENCH_ISA names another set than the
best: portable, avx2, avx512, avx512vnni, amx.

Ops are registered from C++, through torch's stable C interface (torch/csrc/stable): that compiles
in 1 s where torch/library.h takes 4, and a call costs 2.5 µs; through torch.library.custom_op and
ctypes it was 7, and the 150 ops of a step then took a millisecond of Python.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from errors import KernelError
from ops.cpu import compiler

SOURCES = Path(__file__).parent / "src"
ISAS = ("portable", *compiler.INSTRUCTIONS)
KEPT = 3  # libraries of a checkout, the newest
DIGEST_BYTES = hashlib.sha256().digest_size


def unavailable() -> str | None:
    """Why the C++ kernels cannot be used here, or None. Builds nothing, and takes milliseconds.

    A build that failed before is a reason; one that has not been tried may still fail.
    """
    if sys.platform != "linux":
        return f"the C++ kernels are built on Linux only, not on {sys.platform}"
    if reason := compiler.unavailable():
        return reason
    library = _library()
    return None if library.exists() else _remembered(library)


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


def isa() -> str:
    """The instruction set in use: one of ISAS."""
    return load().quantbench_isa().decode()


def use_isa(name: str, library: ctypes.CDLL | None = None) -> None:
    """Use another instruction set from now on, in the whole process: for tests."""
    if not (library or load()).quantbench_use_isa(name.encode()):
        raise KernelError(
            f"QUANTBENCH_ISA={name}: this CPU cannot run it, the compiler does not know it, or "
            f"there is no such instruction set; there are {', '.join(ISAS)}"
        )


def built() -> Path:
    """The library, built if the cache has none like it. Processes that come at once wait for one.

    A digest of the library follows it in its file, for loading a damaged one could crash. Raises
    KernelError; a failed build is not tried again until something about it changes.
    """
    library = _library()
    if _intact(library) and library.name in _names(_index(library.parent)):
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as lock, compiler.terminates():
            fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however it ends
            if not _intact(library):
                _build(library)
            _forget_old(library)
    except OSError as error:
        if _intact(library):  # in a folder that can only be read
            return library
        raise KernelError(
            f"cannot keep the C++ kernels in {library.parent}: {error.strerror}; set "
            "XDG_CACHE_HOME to a folder that can be written to"
        ) from error
    return library


def _library() -> Path:
    """Where the library is, or will be."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantbench"
    parts = compiler.identity(compiler.path())
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        parts += [str(path.relative_to(SOURCES)), path.read_text()]
    key = "\0".join(parts).encode()
    return folder / f"kernels-{_digest(key).hex()[:16]}.so"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _build(library: Path) -> None:
    """Under the lock: nobody else builds in this folder."""
    if reason := _remembered(library):
        raise KernelError(reason)
    folder = library.parent
    for left_over in folder.glob("build-*"):  # by a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    print("Building the CPU kernels, once: about a minute …", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        try:
            path = _compile(compiler.path(), SOURCES, Path(scratch))
        except compiler.Passing:
            raise
        except KernelError as error:
            _failed(library).write_text(str(error))
            raise
        data = path.read_bytes()
        path.write_bytes(data + _digest(data))
        os.replace(path, library)


_compile = compiler.library


def _failed(library: Path) -> Path:
    return library.with_suffix(".failed")


def _remembered(library: Path) -> str | None:
    """Why an earlier build of this very library failed."""
    try:
        reason = _failed(library).read_text()
    except OSError:
        return None
    return f"{reason}; so it was before: remove {_failed(library)} to try again"


def _intact(library: Path) -> bool:
    if not library.exists():
        return False
    data = library.read_bytes()
    return _digest(data[:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]


def _index(folder: Path) -> Path:
    """The file that names the sources' folder, then this checkout's libraries, the newest last."""
    return folder / f"checkout-{_digest(str(SOURCES).encode()).hex()[:16]}"


def _names(index: Path) -> list[str]:
    try:
        return index.read_text().splitlines()[1:]
    except OSError:
        return []


def _forget_old(library: Path) -> None:
    """Under the lock: of this checkout's libraries the newest stay, and those that others use."""
    folder, index = library.parent, _index(library.parent)
    names = [name for name in _names(index) if name != library.name] + [library.name]
    index.write_text("\n".join([str(SOURCES), *names[-KEPT:]]) + "\n")
    used = set()
    for other in folder.glob("checkout-*"):
        if Path(other.read_text().splitlines()[0]).exists():
            used.update(_names(other))
        else:
            names += _names(other)
            other.unlink()
    for name in set(names) - used:
        (folder / name).unlink(missing_ok=True)
