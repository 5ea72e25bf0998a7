"""What this machine let the tests run, and what it has to let them run.

A skipped test is no proof. The summary counts the skipped tests by reason, and names the
instruction sets with which kernels ran.
QUANTBENCH_EXPECT=compiler,portable,avx2 states what a machine must have: a test that skips for the
lack of one of these fails; `.ci/run` sets it. Without it any of NEEDS may be lacking. A test that
skips for a reason that NEEDS does not know fails everywhere.
So does a compiler that `make check` lacks (tests/ops/check_syntax.py): it is named as well.

With `pytest -n 2` tests run in worker processes: the process that prints the summary sees their
reports, and each worker sends it the instruction sets when it ends.
"""

import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLE = "QUANTBENCH_EXPECT"

# What a machine may lack → the reasons for which tests skip then. A test skips with one of these.
NEEDS = {
    "compiler": r"the C\+\+ kernels (need a C\+\+ compiler|are built on Linux only)"
    r"|without the C\+\+ kernels",
    **{
        isa: rf"instruction set {isa}: "
        for isa in ("portable avx2 avxvnni avx512 avx512vnni avx512bf16 amx".split())
    },
    # The other compilers that read the C++ in `make check`: tests/ops/check_syntax.py
    "clang": r"not checked with clang\+\+: ",
    "aarch64-gcc": r"not checked with aarch64-linux-gnu-g\+\+: ",
    "arm": r"no ARM emulation: ",
    "linux": r"needs Linux|reads /proc|glibc's malloc|needs bash",
    "venv": r"needs the Makefile's \.venv|needs a \.venv that is newer",
    "dev": r"could not import '(triton|gguf|transformers|lm_eval|auto_round)\b"
    r"|could not import 'quantbench\.ops\.triton\b"
    r"|pip install lm-eval"
    r"|ray is not installed",
    "git": r"needs git",
    "disk": r"this file system keeps its files in memory",
    "real": r"no real model: ",
    "chromium": r"needs chromium",
    "thread-sanitizer": r"thread sanitizer: ",
    "huge-pages": r"no transparent huge pages here",
    "gpu": r"no CUDA device here",
    "no-gpu": r"has CUDA|Triton runs on the GPU here|a GPU has as many as it has",
}

ran: Counter[str] = Counter()  # instruction set → tests that used it; tests.ops.instructions counts
skipped: Counter[str] = Counter()  # reason → tests


def expected() -> set[str]:
    names = {name for name in os.environ.get(VARIABLE, "").split(",") if name}
    if unknown := sorted(names - set(NEEDS)):
        raise pytest.UsageError(
            f"{VARIABLE} names {', '.join(unknown)}; there are {', '.join(NEEDS)}"
        )
    return names


def why_skipping_fails(reason: str, expected: set[str]) -> str | None:
    """Why a test must not skip for this reason on a machine that has to have what is expected."""
    lacking = next((name for name, pattern in NEEDS.items() if re.search(pattern, reason)), None)
    if lacking is None:
        return f"skipped for a reason that tests/coverage_of_machine.py does not know: {reason}"
    if lacking in expected:
        return f"skipped, but {VARIABLE} names {lacking}: {reason}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    expected()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    need_cuda = [item for item in items if "gpu" in item.keywords]
    if need_cuda and not importlib.import_module("torch").cuda.is_available():
        for item in need_cuda:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    reason = reason_of(report)
    if reason and (failure := why_skipping_fails(reason, expected())):
        report.outcome, report.longrepr = "failed", failure
    return report


pytest_make_collect_report = pytest_runtest_makereport


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why the test, or the whole file, was skipped; None if it was not."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return None


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    if reason := reason_of(report):
        skipped[reason] += 1


pytest_collectreport = pytest_runtest_logreport


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["ran"] = dict(ran)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist: a worker has ended
def pytest_testnodedown(node: Any) -> None:
    ran.update(getattr(node, "workeroutput", {}).get("ran", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ran:
        sets = ", ".join(f"{isa} in {count} tests" for isa, count in ran.items())
        terminalreporter.write_line(f"instruction sets covered: {sets}")
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}", yellow=True)
