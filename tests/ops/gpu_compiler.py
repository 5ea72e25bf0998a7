"""Compiling Triton kernels for a GPU that need not be here."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Bytes; "Shared Memory Capacity" per block in the CUDA C++ Programming Guide's table 21.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}


class Driver:
    """As much of a device's driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead(capability: int) -> list:
    """From now on this process compiles kernels for compute capability 9.0, given 90, instead of
    launching them: the list to which they are added."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    triton.runtime.driver.set_active(Driver(capability))
    launch, compiled = triton.JITFunction.run, []

    def compile_only(kernel, *arguments, grid, warmup, **settings):
        made = launch(kernel, *arguments, grid=grid, warmup=True, **settings)
        assert made.metadata.shared <= SHARED_MEMORY[capability]
        compiled.append(made)

    triton.JITFunction.run = compile_only
    return compiled


def compile_for_gpus(name: str) -> None:
    """tests/ops/NAME.py for every capability, each in a process of its own, where Triton is not
    interpreting. They run at once: a compiler takes one core."""
    root = Path(__file__).parent.parent.parent

    def compiled(capability: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"tests.ops.{name}", str(capability)]
        return subprocess.run(command, cwd=root, capture_output=True, text=True)

    with ThreadPoolExecutor() as threads:
        ended = threads.map(compiled, SHARED_MEMORY)
        for capability, done in zip(SHARED_MEMORY, ended, strict=True):
            assert done.returncode == 0, f"compute capability {capability}: {done.stderr}"
