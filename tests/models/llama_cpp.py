"""What llama.cpp makes of a GGUF file: the package ik-llama-cpp-python has a fork of it, built.

    ids(file, ["Hello"])                    # without special tokens, in texts and around them
    logits(file, [1, 2, 3])                 # (3, V) float32
    quantized(file, "Q4_K_M", target)       # by its llama-quantize

Each runs in a separate process, since the program brings its own OpenMP.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.programs import python, ran

PACKAGE = "ik_llama_cpp"
PROGRAM = Path(__file__).with_name("llama_cpp_program.py")
NEEDED = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="needs the package ik-llama-cpp-python"
)


def ids(file: Path, texts: Sequence[str]) -> list[list[int]]:
    return json.loads(_asked(file, {"texts": list(texts)}))


def logits(file: Path, tokens: Sequence[int]) -> np.ndarray:
    target = file.with_suffix(".npy")
    _asked(file, {"tokens": list(tokens), "target": str(target)})
    return np.load(target)


def quantized(file: Path, kind: str, target: Path, *options: str) -> Path:
    package = Path(importlib.util.find_spec(PACKAGE).origin).parent
    done = ran(package / "bin" / "llama-quantize", *options, file, target, kind, 1)
    assert done.returncode == 0, done.stderr
    return target


def _asked(file: Path, question: dict) -> str:
    done = python(PROGRAM, file, input=json.dumps(question))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
