"""What every test needs: its packages, a seed (seeds.py), an account of what the machine lets run
(coverage_of_machine.py), Triton's interpreter where no GPU is, the order of the files, and what
many tests begin with."""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGES = ("torch", "torchao", "transformers", "hypothesis", "safetensors", "gguf", "click")
if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
    raise pytest.UsageError(
        f"the tests need {', '.join(missing)}, which this Python lacks: `make test` installs all "
        "into .venv and runs them; then .venv/bin/python -m pytest does"
    )

import torch  # noqa: E402  # after the message above

pytest_plugins = ["tests.seeds", "tests.coverage_of_machine"]


def interpret_triton() -> None:
    """Where no GPU is, our Triton kernels run in Triton's interpreter.

    Triton decides that function by function while it is imported, and almost everything imports
    it: so it is done here, first. The variable does not stay, for it would reach commands that
    tests start, and `--kernel auto`; Triton's own setting does, for what it imports later.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("quantbench.ops.triton.linear")
    knobs = importlib.import_module("triton").knobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs, "propagate_env", False)
        knobs.runtime.interpret = True


interpret_triton()
# Or tiktoken, as Hugging Face calls it, keeps files by their path: those of a folder that once had
# this name.
os.environ["TIKTOKEN_CACHE_DIR"] = ""
# Tests never touch what the person's sessions have taught.
os.environ["QUANTBENCH_FLOOR_FILE"] = "none"
os.environ.pop("PYTHONUNBUFFERED", None)  # users' streams keep what they could not write


# Two processes share the tests, file by file (Makefile). The slowest files start first:
# otherwise one process would still be busy with one of them when the other has nothing left.
LONGEST = (
    "tests/test_real_model.py",
    "tests/parallel/test_command.py",
    "tests/compare/test_ab.py",
    "tests/run/test_environment.py",
    "tests/bench/test_process.py",
    "tests/peers/test_peers.py",
    "tests/ops/test_triton.py",
    "tests/ops/test_cpu_team.py",
    "tests/test_wheel.py",
    "tests/recipe/test_recipe_command.py",
    "tests/test_fuzz.py",
    "tests/ops/test_decode_attention.py",
    "tests/test_house.py",
    "tests/run/test_compiling.py",
    "tests/test_readme.py",
    "tests/run/test_card_code.py",
    "tests/models/test_converter.py",
    "tests/quantize/test_recipe.py",
    "tests/latency/test_latency_command.py",
    "tests/quality/test_quality.py",
    "tests/test_generate.py",
    "tests/latency/test_ray_tasks.py",
    "tests/models/test_real_vocabularies.py",
    "tests/run/test_calibration.py",
    "tests/ops/test_cpu_build.py",
    "tests/test_generator.py",
    "tests/experts/test_saved.py",
    "tests/run/test_loading.py",
    "tests/ops/test_arm.py",
    "tests/test_test_run.py",
    "tests/experts/test_tiers.py",
    "tests/test_terminals.py",
    "tests/test_refusals.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of garbage collections: transformers and others are
    a million objects, and a run collects several times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[object]:
    """Without the name of the test, which pytest keeps in the environment: the template of worker
    processes serves one environment (bench/process.py), and would start anew, and import torch,
    in every test."""
    name = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        return (yield)
    finally:
        if name is not None:
            os.environ["PYTEST_CURRENT_TEST"] = name


pytest_fixture_setup = pytest_pyfunc_call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help="write tests/messages.txt anew")


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new working directory, so that the test has its own benchmarks.txt."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cache folder. The C++ kernels stay where the machine keeps them."""
    from quantbench.ops.cpu import build

    build.refusal()  # which builds them
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kernel_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes the files in which the kernel describes a machine, by path; hides the real ones."""
    monkeypatch.setattr("quantbench.host.ROOT", tmp_path)

    def write(texts: dict[str, object]) -> None:
        for path, text in texts.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")

    return write
