"""One seed and one thread count for every test; tests marked gpu run only where CUDA is."""

import importlib.util
import os

import pytest
import torch


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
        importlib.import_module("ops.triton.linear")
    knobs = importlib.import_module("triton").knobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs, "propagate_env", False)
        knobs.runtime.interpret = True


interpret_triton()
# Or tiktoken, as Hugging Face calls it, keeps files by their path: those of a folder that once had
# this name.
os.environ["TIKTOKEN_CACHE_DIR"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
