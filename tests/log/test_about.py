"""What a file of measurements says of the machine and the command that made it."""

import os

import pytest

from quantbench.log import origin
from tests.programs import ROOT, python

XEON = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor @ 2.60GHz
flags\t\t: fpu avx2 avx512f avx512_vnni amx_tile amx_int8
"""
OLD = "model name\t: Old\nflags\t: sse2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\n"


@pytest.mark.parametrize(
    "text, cores, said",
    [
        (XEON, {0, 1}, "2 cores of Intel(R) Xeon(R) Processor @ 2.60GHz (AMX, AVX-512 VNNI)"),
        (OLD, {3}, "1 core of Old"),
        (ARM, {0, 1}, "(NEON)"),
    ],
)
def test_the_processor(kernel_files, monkeypatch, text, cores, said):
    kernel_files({"proc/cpuinfo": text})
    monkeypatch.setattr(origin.os, "sched_getaffinity", lambda process: cores, raising=False)
    assert said in origin.processor()


def test_a_card_comes_first(kernel_files):
    text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 1\n"
    kernel_files({"proc/driver/nvidia/gpus/0000:01:00.0/information": text})
    assert origin.machine().startswith("NVIDIA H100 80GB HBM3, ")


TYPED = [  # argv, the module that Python runs, the command as it was typed
    (["/home/me/compare/__main__.py", "ab", "--arm", "a b"], None,
     "python -m compare ab --arm 'a b'"),
    (["/home/me/generate.py", "--compile"], None, "python generate.py --compile"),
    (["/home/me/.venv/bin/quantbench", "ab"], None, "quantbench ab"),
    (["/me/tests/compare/trust.py", "--only", "tiny, side by side"], "tests.compare.trust",
     "python -m tests.compare.trust --only 'tiny, side by side'"),
    (["/me/quantbench/__main__.py", "ab"], "quantbench.__main__", "python -m quantbench ab"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "module", "typed"), TYPED)
def test_the_command_as_it_was_typed(argv, module, typed):
    assert origin.command(argv, module) == typed


def test_a_process_knows_the_module_that_it_runs(tmp_path):
    """As a module inside of a package, started with -m."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text(
        "from quantbench.log.origin import about\nprint(about().command)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = python("-m", "package.tool", "--only", "a b", cwd=tmp_path, env=environment)
    assert done.stdout == "python -m package.tool --only 'a b'\n", done.stderr
