"""The names that options accept are those of the registries, and reading them needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantbench.errors import UsageError
from quantbench.log import config as names
from quantbench.log.config import RunConfig
from quantbench.quantize.registry import SCHEMES

ROOT = Path(__file__).parents[2]


def test_kernels_are_those_that_schemes_have():
    kernels = {name for scheme in SCHEMES.values() for name in scheme.kernels}
    assert {"auto", *kernels} == set(names.KERNELS) and len(names.KERNELS) == 1 + len(kernels)


@pytest.mark.parametrize("kernel", names.KERNELS)
def test_every_kernel_can_be_asked_for(kernel):
    assert RunConfig(kernel=kernel).kernel == kernel
    with pytest.raises(UsageError, match="torch"):
        RunConfig(kernel=f"{kernel}x")


def test_the_grammar_and_the_options_need_no_torch():
    code = "import sys, quantbench.log.config, quantbench.quantize.spec"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
