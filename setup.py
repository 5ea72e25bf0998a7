"""Packs the C++ kernels into the wheel, where QUANTBENCH_PREBUILD=1 asks for it.

Everything else is in pyproject.toml. Such a wheel needs no compiler where it is installed; it is
for one processor architecture, all instruction sets of it, and any Python and any torch that
pyproject.toml allows (ops/cpu/build.py). It is built where torch is installed:

    QUANTBENCH_PREBUILD=1 pip wheel --no-deps --no-build-isolation .
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("QUANTBENCH_PREBUILD") == "1"


class WithKernels(build_py):
    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(Path(__file__).parent))
        from quantbench.ops.cpu import build

        folder = Path(self.build_lib, "quantbench", "ops", "cpu", build.PREBUILT.name)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(build.built(), folder / build.prebuilt().name)


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class ForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if PREBUILD:
    commands = {"build_py": WithKernels, "bdist_wheel": ForAnyPython}
    setup(distclass=WithLibrary, cmdclass=commands)
else:
    setup()
