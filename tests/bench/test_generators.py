"""Cells of latency in a worker: what a run of them is, which are refused, what is compiled."""

import pytest
import torch

from quantbench import devices
from quantbench.bench.worker import Worker
from quantbench.errors import MemoryShortage, UsageError
from quantbench.models.loading import load_config
from tests import fake_counter

FLOAT32 = ["--precision", "float32", "--device", "cpu", "--checkpoint_path", "tiny"]
FLOAT32 += ["--prefill_size", "1", "--max_new_tokens", "4", "--temperature", "0"]
CONTEXT = load_config("tiny").max_position


def loaded(*options):
    worker = Worker()
    worker.load([*FLOAT32, *options])
    return worker


def test_a_run_is_a_prompt_and_the_steps_behind_it():
    """The step that brings the weights back into the caches is not counted, and gives the token
    that the prompt gave: greedy tokens are those of one generation."""
    worker = loaded()
    facts = worker.cell(prompt=30, rows=2, new_tokens=4, most_rows=2)
    run = facts.run
    assert (run.prompt_tokens, run.config.batch_size, run.cache_size) == (30, 2, 34)
    assert facts.ready.compile_seconds is None and facts.run.decoder == "cpu-step"
    taken, stream = [], worker.turns.generator.stream
    prompts = worker.turns.prompts
    assert prompts.shape == (2, 30)

    def watched(*given):
        for token in stream(*given):
            taken.append(token)
            yield token

    worker.turns.generator.stream = watched
    assert worker.turn("prompt", 3, each=True).tokens == 30
    time = worker.turn("decode", 3, each=True)
    assert time.tokens == len(time.steps) == 3 and sum(time.steps) <= time.seconds
    assert worker.turn("decode", 3).steps is None
    expected = worker.generators.generator.generate(prompts, 4).tokens
    assert torch.equal(torch.cat(taken[1:5], 1), expected)  # of the prompt's turn, the first is
    assert torch.equal(taken[0], taken[1])


def test_cells_past_the_context_are_refused():
    worker = loaded()
    worker.cell(CONTEXT - 4, 1, 4, 1)
    with pytest.raises(UsageError, match=f"need {CONTEXT + 1} positions; the model's context has"):
        worker.cell(CONTEXT - 3, 1, 4, 1)
    worker.cell(10, 1, 4, 1)  # a smaller batch is measured after it


def test_caches_that_do_not_fit_beside_the_weights_are_refused(monkeypatch):
    """5 layers × 2 × 4 heads × 64 × 104 positions × 4 B a row, for keys and values."""
    worker, row = loaded(), 5 * 2 * 4 * 64 * 104 * 4
    monkeypatch.setattr(devices, "free_memory", lambda device: row + row // 2)
    reason = f"^out of memory: a KV cache of {2 * row / 1e6:.2f} MB"
    with pytest.raises(MemoryShortage, match=reason):
        worker.cell(100, 2, 4, 8)
    worker.cell(100, 1, 4, 8)


def test_plans_say_which_cells_cannot_run(monkeypatch):
    """Before anything is loaded, ranks included."""
    argv = [*FLOAT32, "--write_result", "none"]
    large = [*argv, "--prefill_size", str(CONTEXT)]
    others = ("--tp 2", "--tp 3", "--kernel triton --quantization none", "--expert_policy fetch")
    runs = Worker().plans([argv, large, *([*argv, *words.split()] for words in others)])
    assert [run.kind for run in runs] == [None, "usage", None, "usage", "refused", "usage"]
    assert "which 3 ranks cannot share evenly; --tp takes 1, 2, 4" in runs[3].problem
    assert "--kernel triton" in runs[4].problem
    assert "there is no second tier of memory" in runs[5].problem
    monkeypatch.setattr(devices, "free_memory", lambda device: 1000)
    (short,) = Worker().plans([argv])
    assert short.kind == "refused" and "weights of" in short.problem


def test_what_is_compiled_for_one_batch_size_serves_others(monkeypatch):
    """With dynamo, and without the compiler behind it."""
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, fullgraph, options: compile_with(f, None, backend="eager")
        if not fullgraph else compile_with(f, fullgraph=True, backend="eager"),
    )  # fmt: skip
    from torch._dynamo.utils import counters

    worker = loaded("--compile", "--decoder", "modules")
    for length in (10, 20):
        graphs = []
        for size in (1, 2, 3, 6):
            before = counters["stats"]["unique_graphs"]
            assert worker.cell(length, size, 4, 6).ready.compile_seconds is not None
            graphs.append(counters["stats"]["unique_graphs"] - before)
        assert graphs[0] > 0 and graphs[1] > 0 and graphs[2:] == [0, 0]
        assert worker.generators.generator.batch_size == 6
        worker.cell(length, 3, 4, 6)
        prompts = worker.turns.prompts
        shared = worker.turns.generator.generate(prompts, 4).tokens
        alone = loaded()
        alone.cell(length, 3, 4, 3)
        assert torch.equal(shared, alone.turns.generator.generate(prompts, 4).tokens)
    # One op is not compiled, so every batch size has separate caches.
    worker = loaded("--compile")
    worker.cell(10, 1, 4, 4)
    assert worker.generators.generator.batch_size == 1


def test_the_energy_of_a_cell(monkeypatch):
    worker = loaded()
    fake_counter.install(monkeypatch)
    (energy,) = worker.cell(10, 1, 4, 1).energy
    assert energy.joules > 0 and energy.counter
    fake_counter.install(monkeypatch, error=OSError("there is none"))
    (energy,) = worker.cell(10, 1, 4, 1).energy
    assert energy.why_not.endswith("(there is none)")
