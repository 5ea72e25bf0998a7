"""Linear layers' kernels for ARM, cross-compiled and run by qemu, against float64.

    make test-arm

Shapes, weights and x are drawn and packed here (linear_contract.py): a packed weight is the same on
every machine. The program in the emulator (arm.cpp) has the library's sources, but not torch.
"""

import dataclasses
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from quantbench.ops.cpu import build, compiler, compiling, linear
from quantbench.ops.formats import Packed
from tests import seeds
from tests.ops.exact import DTYPES
from tests.ops.instructions import NEEDS_COMPILER
from tests.ops.linear_contract import FORMS, FULL_PRECISION, check, cpu_kernels, draw, of_cpu
from tests.ops.packed_weights import packed

PROGRAMS = ("aarch64-linux-gnu-g++", "qemu-aarch64")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.slow,
    NEEDS_COMPILER,
    pytest.mark.skipif(bool(MISSING), reason=f"no ARM emulation: {' and '.join(MISSING)} missing"),
]
# Set, and the processor that qemu emulates: the first has products of bytes, but none of matrices.
PROCESSORS = {"neon-dotprod": "neoverse-n1", "neon-i8mm": "max"}
REPLACED = ("few", "many", "plain", "hqq", "step")  # folders whose portable loops are tested on x86
UNUSED = ("attention", "bandwidth", "hqq", "ranks", "step")  # and whose ops no product calls
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """arm.cpp, statically linked; torch's functions, which it does not call, are left out."""
    folder = tmp_path_factory.mktemp("arm")
    flags = [PROGRAMS[0], *(flag for flag in compiler.FLAGS if flag != "-O3"), "-O0"]

    def run(*arguments):
        done = subprocess.run([*flags, *map(str, arguments)], capture_output=True, text=True)
        assert not done.returncode, done.stderr

    def compile_one(unit):
        target = folder / unit.object_name
        run(*unit.options, "-c", unit.source, "-o", target)
        return target

    units = [
        unit
        for unit in compiling.units(build.SOURCES, "aarch64")
        if unit.source.parent.name not in (REPLACED if unit.variant == "portable" else ())
        and not (unit.source.parent.name in UNUSED and unit.source.name == "op.cpp")
    ]
    with ThreadPoolExecutor(compiling.jobs()) as pool:
        objects = list(pool.map(compile_one, units))
    source, target = build.SOURCES.parents[3] / "tests/ops/arm.cpp", folder / "arm"
    link = ("-static", "-Wl,--unresolved-symbols=ignore-all", "-o", target)
    run(f"-I{build.SOURCES}", source, *objects, *link)
    return target


@pytest.fixture(params=PROCESSORS)
def kernels(request, program):
    """The contract's kernels, of packed weights and of plain ones: the program in the emulator."""
    command = ["qemu-aarch64", "-cpu", PROCESSORS[request.param], program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr.readline().decode().strip() == request.param  # the best that it has

        def multiply(x: Tensor, weight: Packed | Tensor, activation: str | None) -> Tensor:
            M, K = x.shape
            is_packed = isinstance(weight, Packed)
            N = len(weight.planes[0]) if is_packed else len(weight)
            data = linear.pack(weight, K, activation) if is_packed else weight
            data = data.contiguous().view(torch.uint8).numpy().tobytes()
            head = struct.pack("7q", is_packed, TYPES[x.dtype], M, N, K, False, len(data))
            process.stdin.write(head + x.contiguous().view(torch.uint8).numpy().tobytes() + data)
            process.stdin.flush()
            y = process.stdout.read(M * N * x.itemsize)
            return torch.frombuffer(bytearray(y), dtype=x.dtype).view(M, N)

        own = {"multiply": multiply, "rows": (*range(1, 18), 49), "most_columns": 400}
        yield [dataclasses.replace(kernel, **own) for kernel in cpu_kernels(request.param)]
        process.stdin.close()


def test_products(kernels):
    """Of every format: random shapes, dtypes, groups, scales, zero points, activations."""
    for form in FORMS:
        for _ in range(20):
            with seeds.naming(form):
                check(kernels[form == FULL_PRECISION], *draw(kernels[form == FULL_PRECISION], form))


def test_a_row_is_the_same_among_any_others(kernels):
    for form in seeds.sample(filter(of_cpu, FORMS), 4):
        weight, x = packed(form, 20, 256), torch.randn(4, 256).to(DTYPES[form[1] % 3])
        alone = torch.cat([kernels[0].multiply(row[None], weight, None) for row in x])
        assert torch.equal(kernels[0].multiply(x, weight, None), alone)
