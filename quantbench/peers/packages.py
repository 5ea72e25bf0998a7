"""Which packages `quantbench peers` needs, and what to say where they are missing."""

import importlib.util
from collections.abc import Sequence

from quantbench.errors import UsageError

PACKAGES = {"llama.cpp": ("llama_cpp", "gguf"), "transformers": ("transformers",)}
MISSING = "quantbench peers needs packages of its own: pip install '.[peers]'"


def check(runtimes: Sequence[str]) -> None:
    """UsageError unless all that these runtimes need is installed."""
    for runtime in runtimes:
        for package in PACKAGES[runtime]:
            if importlib.util.find_spec(package) is None:
                raise UsageError(f"{MISSING} ({package} is missing)")
