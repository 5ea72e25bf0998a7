"""What llama.cpp makes of a GGUF file: the package ik-llama-cpp-python has a fork of it, built.

    ids(file, ["Hello"])                    # without special tokens, in texts and around them
    logits(file, [1, 2, 3])                 # (3, V) float32
    quantized(file, "Q4_K_M", target)       # by its llama-quantize

Each runs in a separate process, since the program brings its own OpenMP.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.programs import ROOT, ran

PACKAGE = "ik_llama_cpp"
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
    done = ran(sys.executable, "-m", __name__, file, input=json.dumps(question), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _answer(file: str, texts: Sequence[str] = (), tokens: Sequence[int] = (), target: str = ""):
    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkContext, IkModel, make_batch

    model = IkModel(file)
    if not target:
        print(json.dumps([model.tokenize(t, add_bos=False) if t else [] for t in texts]))
        return
    context = IkContext(model, n_ctx=max(256, len(tokens)), n_threads=1, flash_attn=False)
    batch = make_batch(list(tokens))
    for position in range(len(tokens)):
        batch.logits[position] = 1
    assert context.decode(batch) == 0
    rows = [api.llama_get_logits_ith(context.ctx, i)[: model.n_vocab] for i in range(len(tokens))]
    np.save(target, np.array(rows, np.float32))


if __name__ == "__main__":
    _answer(sys.argv[1], **json.load(sys.stdin))
