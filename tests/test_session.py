"""Sampling against the distribution it should draw from; compiled steps against eager ones."""

import pytest
import torch

from kv_cache.dense import DenseKVCache
from kv_cache.eight_bit import Int8KVCache
from models.checkpoint import load_model
from quantize.registry import Quantizer
from quantize.spec import parse
from session import Sampling, Session, sample

GREEDY = Sampling(temperature=0, top_k=200)
PROMPT = torch.tensor([[1, 40, 50, 60, 70]])


def session(sampling=GREEDY, scheme="none", precision=torch.float32, rows=1, **options):
    quantizer = Quantizer(parse(scheme), torch.device("cpu"), precision)
    model = load_model("tiny", precision=precision, transform=quantizer)
    return Session(model, sampling, batch_size=rows, cache_size=64, **options)


def test_samples_follow_the_softmax_of_the_top_k():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
    draws = sample(logits.expand(20000, 5), Sampling(temperature=0.7, top_k=3))
    expected = torch.softmax(logits[1:4] / 0.7, 0)
    counts = torch.bincount(draws.flatten(), minlength=5) / 20000
    assert counts[0] == 0 and counts[4] == 0
    # five standard deviations of a count's share
    bound = 5 * (expected * (1 - expected) / 20000).sqrt()
    assert ((counts[1:4] - expected).abs() <= bound).all()


def test_temperature_zero_is_the_argmax():
    logits = torch.randn(7, 100)
    assert torch.equal(sample(logits, GREEDY).flatten(), logits.argmax(-1))


def test_a_top_k_beyond_the_vocabulary_is_the_vocabulary():
    assert sample(torch.randn(2, 10), Sampling(1.0, 1000)).shape == (2, 1)


def test_generation_has_as_many_tokens_as_asked_and_times_both_phases():
    generation = session(rows=2).generate(PROMPT.expand(2, -1), 6)
    assert generation.tokens.shape == (2, 6)
    assert generation.prefill_seconds > 0 and generation.decode_seconds > 0
    assert torch.equal(generation.tokens[0], generation.tokens[1])


def test_greedy_tokens_are_those_of_the_whole_sequence_without_cache():
    made = session()
    tokens = made.generate(PROMPT, 12).tokens
    sequence = torch.cat([PROMPT, tokens], 1)
    logits = made.model(sequence)
    assert torch.equal(logits[:, 4:-1].argmax(-1), tokens)


def test_a_seed_repeats_a_sample_and_another_seed_does_not():
    made = session(Sampling(temperature=1.0, top_k=200))

    def drawn(seed):
        torch.manual_seed(seed)
        return made.generate(PROMPT, 20).tokens

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("scheme", ["none", "int8wo"])
def test_compiled_decode_is_eager_decode(scheme):
    eager = session(scheme=scheme).generate(PROMPT, 24).tokens
    compiled = session(scheme=scheme, compile_decode=True)
    assert torch.equal(compiled.generate(PROMPT, 24).tokens, eager)


def test_compiled_int8dq_agrees_with_eager():
    """Logits, not tokens: an activation between two int8 steps may round to either, and a few of
    those, 1/254 of the row each, can turn a close decision."""
    made = session(scheme="int8dq", compile_decode=True)
    made.generate(PROMPT, 8)
    position, token = torch.tensor([13]), torch.tensor([[77]])
    with torch.no_grad():
        eager = made.model(token, position)
        compiled = torch.compile(made.model)(token, position)
    assert (eager - compiled).norm() <= 0.03 * eager.norm()


def test_compiled_prefill_and_int8_cache():
    plain = session(cache=Int8KVCache).generate(PROMPT, 16).tokens
    compiled = session(cache=Int8KVCache, compile_decode=True, compile_prefill=True)
    assert torch.equal(compiled.generate(PROMPT, 16).tokens, plain)
    longer = torch.randint(4096, (1, 23))
    assert compiled.generate(longer, 4).tokens.shape == (1, 4)


@pytest.mark.parametrize("cache", [DenseKVCache, Int8KVCache])
def test_decode_compiles_once_for_every_position(cache):
    made = session(compile_decode=True, cache=cache)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made.generate(PROMPT, 40)
    made.generate(PROMPT, 10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_streaming_continues_where_it_stopped():
    """Two calls, the second from the position where the first ended: the same text as in one."""
    made = session()
    whole = made.generate(PROMPT, 10).tokens
    first = [token for token, _ in zip(made.stream(PROMPT), range(4), strict=False)]
    again = made.stream(first[-1], start=PROMPT.shape[1] + 3)
    second = [token for token, _ in zip(again, range(6), strict=False)]
    assert torch.equal(torch.cat([*first, *second], 1), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int8dq"])
def test_cuda_graphs_write_the_tokens_that_eager_steps_write(scheme):
    def on_cuda(**options):
        quantizer = Quantizer(parse(scheme), torch.device("cuda"), torch.bfloat16)
        model = load_model("tiny", "cuda", torch.bfloat16, transform=quantizer)
        return Session(model, GREEDY, 1, 64, **options).generate(PROMPT.cuda(), 24).tokens

    assert (on_cuda() == on_cuda(compile_decode=True)).float().mean() > 0.8
