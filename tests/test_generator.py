"""Sampling against the distribution it should draw from; compiled steps against eager ones."""

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

from quantbench import models
from quantbench.devices import prefill_chunk
from quantbench.errors import KernelError, UsageError
from quantbench.generate import Generator, Sampling, sample
from quantbench.kv_cache import CACHES
from quantbench.log.config import RunConfig
from quantbench.models.loading import load_model
from quantbench.ops import attend as chunk
from quantbench.ops import attention as decode
from quantbench.ops.cpu import build
from quantbench.quantize.registry import Quantizer
from quantbench.quantize.spec import parse
from quantbench.run.loading import load
from quantbench.run.plan import make_plan
from tests import seeds
from tests.memory import allocated
from tests.models.small import small_model

GREEDY = Sampling(temperature=0, top_k=200)
PROMPT = torch.tensor([[1, 40, 50, 60, 70]])


def tiny(sampling=GREEDY, scheme="none", precision=torch.float32, rows=1, **options):
    model = models.load("tiny", precision=precision, quantization=scheme)
    return Generator(model, rows, 64, sampling=sampling, **options)


def test_samples_follow_the_softmax_of_the_top_k():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
    draws = sample(logits.expand(20000, 5), Sampling(temperature=0.7, top_k=3))
    expected = torch.softmax(logits[1:4] / 0.7, 0)
    counts = torch.bincount(draws.flatten(), minlength=5) / 20000
    assert counts[0] == 0 and counts[4] == 0
    # five standard deviations of a count's share
    bound = 5 * (expected * (1 - expected) / 20000).sqrt()
    assert ((counts[1:4] - expected).abs() <= bound).all()


def test_temperature_zero_is_the_argmax_and_top_k_may_exceed_the_vocabulary():
    assert sample(torch.randn(2, 10), Sampling(1.0, 1000)).shape == (2, 1)
    logits = torch.randn(7, 100)
    assert torch.equal(sample(logits, GREEDY).flatten(), logits.argmax(-1))
    ties = torch.tensor([[1.0, 5.0, 5.0, 2.0]]).bfloat16()
    assert sample(ties, GREEDY).tolist() == [[1]]  # the first of them


def test_a_seed_repeats_a_sample_and_another_seed_does_not():
    made = tiny(Sampling(temperature=1.0, top_k=200))

    def drawn(seed):
        torch.manual_seed(seed)
        return made.generate(PROMPT, 20).tokens

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.skipif(bool(build.unavailable()), reason=str(build.unavailable()))
@pytest.mark.parametrize("scheme", ["none", "int8wo"])
def test_a_step_in_one_op_leaves_inductor_nothing_to_compile(scheme):
    """Each of its kernels would cost a cold start seconds; and both draw torch's own numbers."""
    how = Sampling(temperature=0.9, top_k=20)
    with fresh_cache():
        step = tiny(how, scheme, torch.bfloat16, rows=2, compile_decode=True)
        torch.manual_seed(5)
        tokens = step.generate(PROMPT.expand(2, -1), 8).tokens
        assert not list(Path(cache_dir()).rglob("*.cpp"))
    torch.manual_seed(5)
    eager = tiny(how, scheme, torch.bfloat16, rows=2).generate(PROMPT.expand(2, -1), 8).tokens
    assert torch.equal(tokens, eager)


@pytest.fixture
def compilations(monkeypatch):
    """Counts what is compiled; compiling makes nothing faster, so it takes no time."""
    counter, compile = CompileCounter(), torch.compile

    def counted(function, options=None, **settings):
        return compile(function, backend=counter, **settings)

    monkeypatch.setattr(torch, "compile", counted)
    torch._dynamo.reset()
    return counter


CACHE = pytest.mark.parametrize("cache", CACHES)


def test_decode_compiles_once_for_every_position(compilations, monkeypatch):
    """Past edges of blocks, at 32, 64 and 128, and some dozen wraps of a window. Each cache has one
    of the pairs of a kernel (torch's or this device's own) and a window."""
    pairs = itertools.product(
        (decode.choose, lambda *_: decode.AttentionKernel("torch")), (None, 11)
    )
    for cache, (choose, window) in zip(seeds.sample(CACHES, 4), pairs, strict=True):
        monkeypatch.setattr(decode, "choose", choose)
        compilations.clear()
        torch._dynamo.reset()
        model = small_model(window)
        eager, compiled = (
            Generator(model, 2, 256, cache, compile_decode=compiled) for compiled in (False, True)
        )
        prompt = torch.randint(100, (2, 30))
        tokens = eager.generate(prompt, 120).tokens
        with seeds.naming((cache, choose, window)):
            assert torch.equal(compiled.generate(prompt, 120).tokens, tokens)
            compiled.generate(prompt[:, :3], 10)
            compiled.generate(prompt[:, :3], 5, start=240)
            assert compilations.frame_count == 1


def test_caches_of_every_kind_compile_in_one_process(compilations):
    """Numbers that differ between them must not become variables of a graph. Prompts in chunks are
    compiled over int8."""
    model = small_model(layers=1)
    for cache in CACHES:
        chunks = {"compile_prefill": True, "prefill_chunk": 8} if cache == "int8" else {}
        plain = Generator(model, 1, 64, cache, "modules")
        compiled = Generator(model, 1, 64, cache, "modules", compile_decode=True, **chunks)
        for length in (19, 22):
            prompt = torch.randint(100, (1, length))
            tokens = plain.generate(prompt, 9).tokens
            assert torch.equal(compiled.generate(prompt, 9).tokens, tokens)


@pytest.mark.parametrize(
    ("device", "rows", "size"),
    [("cpu", 1, 512), ("cpu", 8, 64), ("cpu", 100, 32), ("cuda", 4, 2048), ("cuda", 32, 256)],
)
def test_many_rows_go_through_in_smaller_chunks(device, rows, size):
    assert prefill_chunk(torch.device(device), rows) == size


def test_compiled_prefill_in_chunks_compiles_for_any_length_and_start(compilations):
    """A first chunk and a later one; as the last, which gives a token, both and one of length 1."""
    model = small_model()
    plain = Generator(model, 1, 256)
    compiled = Generator(model, 1, 256, compile_prefill=True, prefill_chunk=16)
    for length in (7, 33, 40, 64, 75, 100, 130, 200):
        prompt = torch.randint(100, (1, length))
        assert torch.equal(compiled.generate(prompt, 3).tokens, plain.generate(prompt, 3).tokens)
        if length == 64:
            before = compilations.frame_count
    assert compilations.frame_count == before <= 5


def test_memory_of_prefill_is_linear_in_the_chunk_and_not_in_the_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr(chunk, "BLOCK", 32)
    model = small_model()

    def peak(length, at_once):
        made = Generator(model, 1, 256, prefill_chunk=at_once)
        prompt = torch.zeros(1, length, dtype=torch.long)
        return allocated(lambda: made.generate(prompt, 1), tmp_path)[1]

    assert peak(256, 16) <= 1.1 * peak(64, 16)
    assert peak(256, 256) >= 5 * peak(256, 16)


@CACHE
@pytest.mark.parametrize("window", [None, 11])
def test_a_random_depth(cache, window):
    """What is filled stays as it is, is seen, and a run repeats; all else is as at any position."""
    model = small_model(window)
    made = Generator(model, 2, 256, cache)
    made.fill_randomly(100)
    for layer in made.caches:
        filled = layer.key_codes.float().abs().amax((0, 1, 3)) > 0
        assert filled[: min(100, layer.slots)].all() and not filled[100:].any()
    before = [buffer.clone() for layer in made.caches for buffer in layer.buffers()]
    prompt = torch.randint(100, (2, 6))
    tokens = made.generate(prompt, 9, start=100).tokens
    if window is None:
        after = [buffer for layer in made.caches for buffer in layer.buffers()]
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old[:, :, :100], new[:, :, :100])
            assert not new[:, :, 100 + 6 + 8 :].any()
        assert torch.equal(made.generate(prompt, 9, start=100).tokens, tokens)
    # another depth, another context: other logits
    logits = made.forward(prompt[:, :1], 100)
    made.fill_randomly(100)
    assert (made.forward(prompt[:, :1], 100) - logits).abs().max() > 1e-3 * logits.abs().max()


def test_streaming_continues_where_it_stopped():
    """Two calls, the second from the position where the first ended: the same text as in one."""
    made = tiny()
    whole = made.generate(PROMPT, 10).tokens
    first = [token for token, _ in zip(made.stream(PROMPT), range(4), strict=False)]
    again = made.stream(first[-1], start=PROMPT.shape[1] + 3)
    second = [token for token, _ in zip(again, range(6), strict=False)]
    assert torch.equal(torch.cat([*first, *second], 1), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int8dq"])
def test_cuda_graphs_write_the_tokens_that_eager_steps_write(scheme):
    def on_cuda(**options):
        model = models.load("tiny", "cuda", torch.bfloat16, scheme)
        return Generator(model, 1, 64, **options).generate(PROMPT.cuda(), 24).tokens

    assert (on_cuda() == on_cuda(compile_decode=True)).float().mean() > 0.8


# ---------------------------------------------------------------------------------- borders


def test_two_generators_on_one_model_do_not_meet():
    """Their steps in turns, over other texts and caches, give what each gives alone."""
    model = small_model()
    prompts = torch.randint(100, (2, 1, 9))
    kinds = [("dense", "modules"), ("int8", "auto")]
    alone = [
        Generator(model, 1, 64, kind, decoder).generate(prompt, 12).tokens
        for prompt, (kind, decoder) in zip(prompts, kinds, strict=True)
    ]
    both = [Generator(model, 1, 64, kind, decoder) for kind, decoder in kinds]
    streams = [made.stream(prompt) for made, prompt in zip(both, prompts, strict=True)]
    turns = [[next(stream) for stream in streams] for _ in range(12)]
    for tokens, wanted in zip(zip(*turns, strict=True), alone, strict=True):
        assert torch.equal(torch.cat(tokens, 1), wanted)


@pytest.mark.parametrize("how", ["auto", "modules", "compiled"])
def test_a_deleted_generator_s_memory_is_free_at_once(how, compilations):
    """Nothing waits for Python's garbage collector: the next generator may need the memory."""
    compiled, decoder = how == "compiled", how.replace("compiled", "modules")
    options = {"decoder": decoder, "compile_decode": compiled, "compile_prefill": compiled}
    made = tiny(**options)
    made.generate(PROMPT, 4)
    gc.collect()  # what dynamo traced with refers to itself
    gc.disable()
    try:
        left = [weakref.ref(made), weakref.ref(made.caches[0].key_codes)]
        del made
        torch._dynamo.reset()
        assert not any(reference() is not None for reference in left)
    finally:
        gc.enable()


def test_a_process_may_compile_any_number_of_generators(monkeypatch):
    """Each for its own sizes. Of one code object dynamo keeps eight variants, here one; and what
    differs between two of them it takes for variable."""
    inputs, compile = [], torch.compile

    def backend(graph, examples):
        inputs.extend(examples)
        return graph

    monkeypatch.setattr(
        torch, "compile", lambda f, options, **how: compile(f, backend=backend, **how)
    )
    model, token = small_model(layers=1), torch.tensor([[1]])
    with torch._dynamo.config.patch(recompile_limit=1):
        for positions in (32, 33, 34):
            made = Generator(model, 1, positions, decoder="modules", compile_decode=True)
            made.decode_one_token(made.decoder, token, torch.tensor([0]), made.sampling)
    sizes = [x.shape[2] for x in inputs if isinstance(x, torch.Tensor) and x.dim() == 4]
    assert {*sizes} == {32, 33, 34}
    assert all(type(size) is int for size in sizes)


@pytest.mark.parametrize("decoder", ["modules", "auto"])
@pytest.mark.parametrize(
    ("shape", "start", "message"),
    [
        ((1, 65), 0, "positions 0 to 64, and the caches have 64"),
        ((1, 1), 64, "positions 64 to 64, and the caches have 64"),
        ((1, 1), -1, "positions -1 to -1"),
        ((3, 4), 0, "3 rows, and the caches have 2"),
        ((1, 0), 0, r"given: \[1, 0\]"),
        ((4,), 0, r"given: \[4\]"),
    ],
)
def test_what_the_caches_do_not_hold_is_told(decoder, shape, start, message):
    made = tiny(rows=2, decoder=decoder)
    with pytest.raises(UsageError, match=message):
        made.forward(torch.zeros(shape, dtype=torch.long), start)


def test_generating_past_the_end_is_told_before_it_begins():
    made = tiny()
    assert made.generate(PROMPT, 60).tokens.shape == (1, 60)  # the last token needs no position
    with pytest.raises(UsageError, match="positions 0 to 64, and the caches have 64"):
        made.generate(PROMPT, 61, after_token=lambda: pytest.fail("it began"))
    stream = made.stream(PROMPT)
    assert sum(1 for _ in zip(range(60), stream, strict=False)) == 60
    with pytest.raises(UsageError, match="positions 64 to 64"):
        next(stream)


def test_names_that_do_not_exist_are_told():
    with pytest.raises(UsageError, match="kv_cache 'int3': there are dense, int8, fp8, int4"):
        Generator(small_model(), kv_cache="int3")
    with pytest.raises(KernelError, match="--decoder fast: there are auto, cpu-step, modules"):
        Generator(small_model(), decoder="fast")


def test_the_public_door_gives_what_the_command_runs(tmp_path):
    """models.load reads what --checkpoint_path reads, on the kernels that the command uses."""
    model = models.load("tiny")
    assert model.output.weight.dtype == torch.float32
    quantizer = Quantizer(parse("none"), torch.device("cpu"), torch.float32)
    same = load_model("tiny", transform=quantizer)
    assert torch.equal(Generator(model).forward(PROMPT), Generator(same).forward(PROMPT))
    dummy = models.load("dummy:models/tiny/config.json", "cpu", torch.bfloat16, "int8wo")
    assert Generator(dummy).forward(PROMPT).dtype == torch.bfloat16
    config = RunConfig(quantization="fp6", device="cpu", save=str(tmp_path / "saved"))
    plan = make_plan(config)
    saved = load(plan, lambda done, total: None, print).model
    again = models.load(str(tmp_path / "saved"))
    assert torch.equal(Generator(again).forward(PROMPT), Generator(saved).forward(PROMPT))
