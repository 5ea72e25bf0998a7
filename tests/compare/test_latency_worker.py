"""The worker of latencies: what it measures, and which cells it refuses beforehand."""

import pytest
import torch

from quantbench import devices
from quantbench.compare.sampling.latency_worker import LatencyWorker
from quantbench.errors import MemoryShortage, UsageError
from quantbench.models.loading import load_config
from quantbench.ops.ranks import ALONE
from quantbench.run.energy import Meter, NotCounted
from quantbench.run.why import Expected
from tests.fake_counter import Counter

FLOAT32 = ["--precision", "float32", "--device", "cpu", "--checkpoint_path", "tiny"]
CONTEXT = load_config("tiny").max_position


def ready(cells, decode_length=4, options=()):
    worker = LatencyWorker()
    described = worker.describe([*FLOAT32, *options], cells, decode_length)
    worker.load()
    return worker, described


def test_a_cell_is_of_exactly_these_tokens_and_goes_on_past_the_end_of_text(monkeypatch):
    worker, described = ready([(30, 2)])
    assert described.refusals == [] and described.model.layers == 5
    worker.cell(30, 2)
    asked = []
    generate = worker.generator.generate

    def watched(prompt, *rest):
        asked.append((prompt, generate(prompt, *rest)))
        return asked[-1][1]

    monkeypatch.setattr(worker.generator, "generate", watched)
    # Whatever the likeliest token is, it is the end of text now.
    end = worker.plan.tokenizer.eos_ids
    monkeypatch.setattr(type(worker.plan.tokenizer), "eos_ids", {*range(4096), *end}, raising=False)
    runs = worker.runs(3, 60.0)
    assert len(runs.samples) == len(asked) == 3
    for (prompt, generation), sample in zip(asked, runs.samples, strict=True):
        assert prompt.shape == (2, 30) and generation.tokens.shape == (2, 4)
        assert len(sample.step_seconds) == 3  # the first of the four tokens is prefill's
        assert sample.prefill_seconds == generation.prefill_seconds
        # Each step's time is read once, so their sum is that of decoding but for reading clocks.
        assert sample.decode_seconds <= generation.decode_seconds
        assert torch.equal(generation.tokens, asked[0][1].tokens)  # greedy


def test_runs_end_when_the_seconds_are_over():
    worker, _ = ready([(10, 1)])
    worker.cell(10, 1)
    assert len(worker.runs(5, 0.0).samples) == 1


def test_cells_past_the_context_are_refused():
    _, described = ready([(CONTEXT - 4, 1), (CONTEXT - 3, 1), (CONTEXT, 2)])
    assert [(r.sequence_length, r.batch_size) for r in described.refusals] == [
        (CONTEXT - 3, 1), (CONTEXT, 2)
    ]  # fmt: skip
    assert described.refusals[0].reason == (
        f"past the context: a prompt of {CONTEXT - 3} tokens and 4 new ones need {CONTEXT + 1} "
        f"positions; the model has {CONTEXT}"
    )
    _, described = ready([(60, 1), (61, 1)], options=["--cache_size", "64"])
    (refusal,) = described.refusals
    assert refusal.reason == (
        "a prompt of 61 tokens and 4 new ones need 65 positions; --cache_size is 64"
    )


def test_cells_that_do_not_fit_are_refused_before_loading(monkeypatch):
    """Weights in float32, and keys and values: 5 layers × 2 × 4 heads × 64 × 104 positions × 4 B a
    row."""
    row, weights = 5 * 2 * 4 * 64 * 104 * 4, 4 * (load_config("tiny").parameters())
    monkeypatch.setattr(devices, "free_memory", lambda device: weights + 3 * row + row // 2)
    worker, described = ready([(100, size) for size in (1, 2, 3, 4, 8)])
    assert [refusal.batch_size for refusal in described.refusals] == [4, 8]
    assert described.refusals[0].reason.startswith("does not fit: weights of ")
    assert f"and a KV cache of {4 * row / 1e6:.2f} MB" in described.refusals[0].reason
    worker.cell(100, 3)
    monkeypatch.setattr(devices, "free_memory", lambda device: row)  # of what is left now
    with pytest.raises(MemoryShortage, match="^does not fit: a KV cache of"):
        worker.cell(100, 2)
    worker.cell(100, 1)


def test_what_is_compiled_for_one_batch_size_serves_others(monkeypatch):
    """With dynamo, and without the compiler behind it."""
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, fullgraph, options: compile_with(f, None, backend="eager")
        if not fullgraph else compile_with(f, fullgraph=True, backend="eager"),
    )  # fmt: skip
    options = ["--compile", "--decoder", "modules"]
    sizes = (1, 2, 4, 3, 6)
    worker, _ = ready([(length, size) for length in (10, 20) for size in sizes], options=options)
    for length in (10, 20):
        compiled = {size: worker.cell(length, size).compiled for size in sizes}
        assert compiled == {1: True, 2: True, 4: False, 3: False, 6: False}
        assert worker.generator.batch_size == 6
        worker.cell(length, 4)
        shared = worker.generator.generate(worker.prompt, 4).tokens
        alone, _ = ready([(length, 4)])
        alone.cell(length, 4)
        assert torch.equal(shared, alone.generator.generate(alone.prompt, 4).tokens)
    # One op is not compiled, so every batch size has caches of its own.
    worker, _ = ready([(10, 1), (10, 4)], options=["--compile"])
    assert not worker.cell(10, 1).compiled and worker.generator.batch_size == 1


def test_ranks_that_cannot_share_the_model():
    worker = LatencyWorker()
    with pytest.raises(UsageError, match="--tp 3: tiny has 4 query .* --tp takes 1, 2, 4$"):
        worker.check(FLOAT32, [1, 2, 3])
    with pytest.raises(UsageError, match="--tp 8: .* --tp takes 1, 2, 4$"):
        worker.check(FLOAT32, [8])


def test_more_ranks_than_cores_are_warned_of(monkeypatch):
    from quantbench.run import threads

    monkeypatch.setattr(threads, "cores", lambda: 1)
    (warning,) = LatencyWorker().check(FLOAT32, [1, 2]).warnings
    assert warning.startswith("2 ranks on 1 core take turns") and "slower than --tp 1" in warning
    monkeypatch.setattr(threads, "cores", lambda: 2)
    assert LatencyWorker().check(FLOAT32, [1, 2]).warnings == []


def test_a_cell_is_estimated_as_the_run_that_it_is(monkeypatch):
    """Unless the model lies in the processor's caches, as the embedded one does."""
    from quantbench import devices
    from quantbench.estimate import beside

    worker, _ = ready([(30, 2)])
    monkeypatch.setattr(devices, "last_level_cache", lambda device: 1 << 40)
    assert worker.cell(30, 2).estimate is None
    seen = []
    monkeypatch.setattr(devices, "last_level_cache", lambda device: None)
    monkeypatch.setattr(
        beside, "expected", lambda *given: seen.append(given) or Expected({"x": 1.0})
    )
    assert worker.cell(30, 2).estimate == {"x": 1.0}
    ((facts, phases),) = seen
    assert (facts.config.batch_size, facts.prompt_tokens, facts.cache_size) == (2, 30, 34)
    assert facts.config.max_new_tokens == 4 and facts.config.context_depth == 0
    assert phases is None  # four layers are too few to estimate from


def test_the_energy_of_runs_is_counted_where_it_is_asked_for():
    worker, _ = ready([(10, 1)])
    worker.cell(10, 1)
    worker.meter = Meter(Counter(), 0.0, torch.device("cpu"), ALONE)
    assert worker.runs(2, 60.0).energy is None
    found = worker.runs(2, 60.0, metered=True)
    assert len(found.samples) == 2 and found.energy.joules == pytest.approx(1.5)
    worker.meter = NotCounted("there is no counter")
    assert worker.runs(1, 60.0, metered=True).energy == NotCounted("there is no counter")
