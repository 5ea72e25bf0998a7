"""Ranks of one machine exchange numbers through memory, in ops of their own and within the C++
decoding step; and none waits for a rank that has failed or ended."""

import multiprocessing
import threading
import time

import pytest
import torch

from quantbench.ops.cpu import build
from quantbench.ops.cpu.ranks import CAPACITY, SharedMemoryRanks, open_memory
from quantbench.ops.ranks import ALONE
from tests.models import hugging_face
from tests.parallel import work
from tests.parallel.work import TOKENS, agree

pytestmark = pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))


@pytest.fixture
def memory(tmp_path):
    return str(tmp_path / "memory")


@pytest.mark.parametrize("size", [2, 4])
def test_sums(pool, memory, size):
    lengths = [1, 7, 2048, 3 * CAPACITY + 5] + [64] * 300
    expected = [
        sum(work.numbers_of(rank, i, length) for rank in range(size))
        for i, length in enumerate(lengths)
    ]
    for sums in pool.run(size, work.shared_sums, memory, lengths):
        assert all(map(torch.equal, sums, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathers(pool, memory, dtype):
    for even, uneven, many in pool.run(2, work.shared_gathers, memory, dtype):
        assert even.dtype == dtype and even.shape == (1, 3, 8)
        assert even[0, :, 3:5].tolist() == [[0, 1], [10, 11], [20, 21]]
        assert uneven.tolist() == [[[0, 0, 0, 1, 1, 1, 1], [10, 10, 10, 11, 11, 11, 11]]]
        assert many.shape == (1, 2, 2 * CAPACITY + 5)
        assert (many[..., :CAPACITY] == torch.tensor([[[0], [10]]])).all()
        assert (many[..., CAPACITY:] == torch.tensor([[[1], [11]]])).all()


def decoded(pool, size, *arguments):
    """A rank's logits, the same on all, and the decoder's name."""
    if size == 1:
        return work.decoded(ALONE, *arguments)
    results = pool.run(size, work.decoded, *arguments)
    first, *others = [logits for logits, _ in results]
    assert all(torch.equal(first, other) for other in others)
    (name,) = {name for _, name in results}
    return first, name


EXPERTS = ("mixtral", "qwen-2-moe", "qwen-3-moe-dense", "olmoe")


@pytest.mark.parametrize("family", [*hugging_face.LLAMAS, *EXPERTS])
def test_a_step_of_every_family(pool, memory, tmp_path, family):
    """One row, whose products a team shares, and two. OLMoE has a norm over the heads of all ranks,
    which is left to the modules."""
    folder, oracle = hugging_face.saved(family, tmp_path)
    for size, rows in ((2, 2), (4, 1)) if family in EXPERTS else ((2, 1), (4, 2)):
        given = TOKENS[:rows], {"checkpoint_path": str(folder)}
        logits, name = decoded(pool, size, f"{memory}{size}", *given)
        assert name == ("modules" if family == "olmoe" else "cpu-step")
        agree(logits, oracle(torch.tensor(TOKENS[:rows])).logits)


SCHEMES = ("none", "int8wo", "int4wo-32", "fp6", "bnb-nf4", "sparse-marlin")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_of_every_scheme(pool, memory, wide, scheme):
    options = {"checkpoint_path": wide, "quantization": scheme}
    size = 4 if scheme in ("none", "int8wo") else 2
    alone, _ = decoded(pool, 1, memory, TOKENS[:1], options)
    shared, name = decoded(pool, size, memory, TOKENS[:1], options)
    assert name == "cpu-step"
    agree(shared, alone)


@pytest.mark.parametrize(("kv_cache", "rows"), [("int8", 1), ("fp8", 2)])
def test_quantized_caches(pool, memory, kv_cache, rows):
    options = {"checkpoint_path": "tiny", "precision": "bfloat16", "quantization": "int8wo"}
    given = (memory, TOKENS[:rows], options, kv_cache)
    alone, _ = decoded(pool, 1, *given, "cpu-step")
    shared, name = decoded(pool, 2, *given, "cpu-step")
    assert name == "cpu-step"
    # bfloat16 has 8 bits, and a part of a sum is rounded to it on each rank
    assert (shared - alone).abs().max() < 0.03 * alone.abs().max()


@pytest.mark.parametrize("rows", [1, 2])
def test_teams_of_threads_on_every_rank(pool, memory, rows):
    """Also several tokens at a time, each with the bits that it gets alone."""
    given = (TOKENS[:rows], {"checkpoint_path": "tiny"}, "dense", "cpu-step")
    one_thread, _ = decoded(pool, 2, memory, *given, 1)
    three, _ = decoded(pool, 2, f"{memory}3", *given, 3)
    assert torch.equal(one_thread, three)
    several, _ = decoded(pool, 2, f"{memory}4", *given, 3, 4)
    agree(several, one_thread)
    assert rows > 1 or torch.equal(several, one_thread)


@pytest.mark.parametrize("member", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_it_on_all(pool, memory, member):
    told = pool.run(4, work.failing_step, memory, member)
    own = "a thread of the decoding step could not allocate memory"
    others = "another rank has failed: rank 1"
    for rank, messages in enumerate(told):
        assert own in messages[0] if rank == 1 else others in messages[0]
        assert others in messages[1]


def test_who_waits_for_a_rank_that_ends_sleeps_and_is_told(memory):
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    other = context.Process(target=work.wait_for_memory, args=(memory, ready), daemon=True)
    other.start()
    handle = open_memory(memory, 0, 2)
    assert handle and ready.wait(60)
    threading.Timer(1, other.kill).start()
    before = time.thread_time()
    with pytest.raises(RuntimeError, match="another rank has ended: rank 1"):
        SharedMemoryRanks(0, 2, memory=handle).sum(torch.ones(3))
    assert time.thread_time() - before < 0.5  # of a second of waiting
    other.join()
