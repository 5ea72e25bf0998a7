"""Building a library with the machine's C++ compiler (compiler.py), and inductor's options for it.

A source with a line "// Variants: portable avx2" is compiled once for each instruction set that the
line names, with that set's flags and -DVARIANT=avx2; other sources once, with neither. Sets of
other machines are left out, and one that the compiler does not support is left out of the library,
and so are all that MACHINES lists after it: those of younger processors.
"""

import contextlib
import hashlib
import itertools
import os
import platform
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench import files, host
from quantbench.errors import KernelError, LogError
from quantbench.ops.cpu.compiler import (
    FLAGS_OF_FOLDERS,
    MACHINES,
    TORCH,
    Words,
    command,
    flags,
    own_flags,
    version,
)
from quantbench.text import one_line, plain

HEADERS = {"x86_64": "immintrin.h", "aarch64": "arm_neon.h"}
_VARIANTS = re.compile(r"^// Variants: (.*)$", re.MULTILINE)
BUILD_SECONDS = 900  # for one source
JOB_BYTES = 1 << 30  # memory for one compiler process; more than the largest source needs
# Compiler messages when the machine failed, not the source: the build is tried again next time.
PASSING = ("Killed", "No space left", "annot allocate memory", "out of memory")


class Passing(KernelError):
    """A failed build that may succeed the next time, because the machine was the cause."""


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
    sets, built = MACHINES.get(machine or platform.machine(), {}), []
    for source in sorted(sources.rglob("*.cpp")):
        named = _VARIANTS.search(source.read_text(encoding="utf-8"))
        of_folder = (*FLAGS_OF_FOLDERS.get(source.parent.name, ()), f"-I{sources}")
        for variant in named[1].split() if named else [None]:
            if variant in (None, "portable") or variant in sets:
                options = sets[variant][0] if variant in sets else ()
                define = [f"-DVARIANT={variant.replace('-', '_')}"] if variant else []
                built.append(Unit(source, variant, (*options, *define, *of_folder)))
    return built


def library(compiler: Words, sources: Path, scratch: Path, sets: Sequence[str]) -> Path:
    """Compile all sources, for these instruction sets and as portable code, into one library in the
    folder `scratch`. Raises KernelError."""
    processes, target = _Processes(compiler, scratch), scratch / "kernels.so"
    every = units(sources)
    used = {unit.variant for unit in every}
    wanted = [name for name in sets if name in used]
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


def _failed(library: Path) -> Path:
    return library.with_suffix(".failed")


def remember(library: Path, error: KernelError) -> None:
    """Keep why a library cannot be built; a folder that cannot be written to keeps nothing."""
    with contextlib.suppress(LogError):
        files.write_text("", _failed(library), f"{_compiler()}\n{error}", follow=False)


def remembered(library: Path) -> str | None:
    """Why an earlier build of the same library by the same compiler failed, or None."""
    if not files.is_private(_failed(library)):
        return None
    failed_compiler, _, reason = (
        files.read_ours(_failed(library)).decode(errors="replace").partition("\n")
    )
    if failed_compiler != _compiler():
        return None
    words = plain(shlex.join([*(command() or ()), *own_flags()]))
    return (
        f"{one_line(reason)}; an earlier build by {words} failed: remove {_failed(library)} to try "
        "again"
    )


def _compiler() -> str:
    """The compiler, when its program was changed, and $CXXFLAGS: other ones may do."""
    words = command() or ("no compiler",)
    changed = 0
    with contextlib.suppress(OSError):
        changed = os.stat(words[0]).st_mtime_ns
    return one_line(f"{shlex.join(words)} of {changed} with {shlex.join(own_flags())}")


def options_of_inductor() -> dict[str, Any]:
    """The option of torch.compile that names the compiler, where $CXX is several words: inductor
    takes them for the name of one program. So it gets a script that calls them."""
    words = command()
    if words is None or len(words) == 1:
        return {}
    # Inductor tells clang from GCC by the program's name.
    name = "clang++" if "clang" in version(words) else "g++"
    text = f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
    digest = hashlib.sha256(os.fsencode(text)).hexdigest()
    script = files.cache_folder() / f"cxx-{digest[:16]}" / name
    try:
        if not (files.is_private(script) and files.read_ours(script) == os.fsencode(text)):
            script.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.replace("CXX", script, lambda path: _write_script(path, text), follow=False)
    except (OSError, LogError) as error:
        raise KernelError(f"cannot write {script}, which calls $CXX: {error}") from None
    return {"cpp.cxx": (None, str(script))}


def _write_script(path: Path, text: str) -> None:
    path.write_bytes(os.fsencode(text))
    path.chmod(0o700)
