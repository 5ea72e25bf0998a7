"""A worker's peak memory is that of generate.py: it has imported next to nothing else."""

import json
import sys

import pytest

from quantbench.bench.process import Process
from tests.programs import python

OPTIONS = ["--num_samples", "1", "--max_new_tokens", "4", "--device", "cpu"]
# `finish` starts when the peak has been read.
GENERATE = """
import json, sys
from quantbench import generate
from quantbench.commands.generate import generate as main

def tell(*given):
    print("modules", json.dumps(sorted(sys.modules)))

generate.finish = tell
main(sys.argv[1:], standalone_mode=False)
"""
WORKER = """
import sys
from quantbench.bench.worker import Worker, serve

class Telling(Worker):
    def modules(self) -> list:
        return sorted(sys.modules)

serve(Telling())
"""
# What else a worker needs, by prefixes of names: our own files, some kB each, and Python's
# modules by which it reads its requests.
OURS = (
    "quantbench.bench",
    "quantbench.run.turns",
    "safetensors.torch",  # the reference's hidden states
    "quantbench.quality",
    "quantbench.quantize.observe",  # SQNR
    "quantbench.models.chat",
    "numpy.ctypeslib",  # safetensors writes by it
    "quantbench.run.saved_model",
    "quantbench.run.bandwidth",
    "quantbench.run.why",
)
OF_PYTHON = {"_queue", "queue"}


@pytest.fixture(scope="module")
def of_generate():
    done = python("-c", GENERATE, *OPTIONS, "--write_result", "none")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("modules "))
    return set(json.loads(line.partition(" ")[2]))


@pytest.mark.parametrize("quality", [False, True], ids=["speed", "and quality"])
def test_a_worker_imports_next_to_nothing_that_generate_does_not(of_generate, tmp_path, quality):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    worker = Process((sys.executable, str(path)))
    try:
        worker.ask("load", argv=OPTIONS)
        if quality:
            logits = str(tmp_path / "logits")
            worker.ask("quality", tokens=64, text=None, reference=None, keep=logits)
            again = {"tokens": 64, "text": None, "reference": logits, "keep": None}
            assert worker.ask("quality", **again)["quality"]["perplexity_ratio"] == 1.0
        worker.ask("get_ready")
        worker.ask("sample", index=0)
        found = set(worker.ask("modules"))
    finally:
        worker.close()
    assert "torch" in found & of_generate
    more = {name for name in found - of_generate if not name.startswith(OURS)}
    assert more <= OF_PYTHON
