"""What other compilers say about the C++ kernels: clang, and GCC for aarch64, where installed.

    python -m tests.ops.check_syntax        # part of `make check`; nothing is generated

Every source is checked with its own instructions, those of ARM by GCC only; warnings are errors.
A compiler that is missing is an error where QUANTBENCH_EXPECT names it (coverage_of_machine.py).
"""

import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

from quantbench.ops.cpu import build, compiler, compiling
from tests.coverage_of_machine import expected, why_skipping_fails
from tests.programs import ran

FLAGS = [flag for flag in compiler.FLAGS if flag != "-O3"]
STRICT = ("-O0", "-Wextra", "-Werror", "-Wno-unused-parameter", "-fsyntax-only")
COMPILERS = {"clang++": platform.machine(), "aarch64-linux-gnu-g++": "aarch64"}


def complaint(program: str, unit: compiling.Unit) -> str:
    """What the compiler says about a source: nothing, if all is well."""
    done = ran(program, *FLAGS, *STRICT, *unit.options, unit.source)
    return done.stderr if done.returncode else ""


def main() -> int:
    checks, failures = [], []
    for program, machine in COMPILERS.items():
        if shutil.which(program) is None:
            reason = f"C++ is not checked with {program}: it is not installed"
            failure = why_skipping_fails(reason, expected())
            print(failure or reason)
            failures += [failure] if failure else []
            continue
        checks += [(program, unit) for unit in compiling.units(build.SOURCES, machine)]
    with ThreadPoolExecutor(compiling.jobs()) as pool:
        complaints = list(filter(None, pool.map(lambda check: complaint(*check), checks)))
    print(*complaints, sep="\n", end="", file=sys.stderr)
    return 1 if complaints or failures else 0


if __name__ == "__main__":
    sys.exit(main())
