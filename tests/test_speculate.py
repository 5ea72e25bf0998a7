"""Speculation changes how fast a text comes, never which: each draft, each way to draw."""

import random
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from quantbench import generate
from quantbench.errors import UsageError
from quantbench.generate import Generator, Sampling
from quantbench.log.config import RunConfig
from quantbench.models import load
from quantbench.models.formats import open_checkpoint
from quantbench.run.plan import make_plan
from quantbench.speculate import Lookup, ModelDraft, Speculating, judge, load_draft
from tests import seeds

WORDS = "one two three four five six seven one two three four five six seven one two three".split()


@pytest.fixture(scope="module")
def model():
    return load("tiny", precision=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    checkpoint = open_checkpoint("tiny")
    tokenizer = checkpoint.tokenizer(checkpoint.config().vocab_size)
    text = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a"
    return torch.tensor([tokenizer.encode(text)])


def model_draft(generator, quantization, shared):
    """The embedded model in fewer bits."""
    caches = generator.caches if shared else None
    model = load("tiny", precision=torch.float32, quantization=quantization)
    how = {"sampling": generator.sampling, "caches": caches}
    return ModelDraft(Generator(model, cache_size=generator.cache_size, **how), shared)


DRAFTERS = {
    "lookup": lambda generator: Lookup(),
    "self": lambda generator: model_draft(generator, "int4wo-32", True),
    "self that errs": lambda generator: model_draft(generator, "uintx-2-64", True),
    "model": lambda generator: model_draft(generator, "uintx-2-64", False),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_greedy_text_is_the_same(model, prompt, name, monkeypatch):
    """However many tokens are drafted: the count is drawn, in the place of what pays here."""
    count = 60
    how = {"kv_cache": random.choice(("dense", "int8")), "cache_size": prompt.shape[1] + count}
    how["decoder"] = random.choice(("auto", "modules"))
    expected, generator = (Generator(model, **how) for _ in range(2))
    generator = Speculating(generator, DRAFTERS[name](generator))
    best = lambda offered: random.randint(0, len(offered))  # noqa: E731
    monkeypatch.setattr(generator.speculator, "_best", best)
    wanted = expected.generate(prompt, count).tokens
    for _ in range(2):  # the second starts anew in the same caches
        got = generator.generate(prompt, count)
        assert got.tokens.tolist() == wanted.tolist()
        done = got.speculation
        assert done.drafted >= done.accepted > 0
        assert done.passes + done.accepted >= count - 1
    middle = prompt.shape[1] + count // 2  # from there on, with what the caches hold
    last = wanted[:, count // 2 : count // 2 + 1]
    rest = list(zip(generator.stream(last, middle), range(count // 4), strict=False))
    assert [int(token) for token, _ in rest] == wanted[0, count // 2 + 1 :][: count // 4].tolist()


def test_lookup_goes_on_as_the_text_did():
    """By hand: after "one two three" came "four"; a text that ends in the middle of a repetition
    goes on into its own draft."""
    draft = Lookup()
    assert draft.offer(WORDS, 6) == [7] * 6
    assert draft.draft(WORDS, 6)[0] == ["four", "five", "six", "seven", "one", "two"]
    assert draft.offer("a b c".split(), 3) == []
    assert draft.offer("a b a b".split(), 5) == [2, 3, 4, 5, 6]
    assert draft.draft("a b a b".split(), 5)[0] == ["a", "b", "a", "b", "a"]
    draft.offer("a b a b a".split(), 1)
    assert draft.offer("a b a b".split(), 1) == [2]  # the text has become shorter
    assert draft.draft("a b a b".split(), 1)[0] == ["a"]


@pytest.mark.parametrize("certain", [True, False])
def test_the_distribution_is_the_models(certain):
    """Tokens that `judge` gives, over many draws, against the model's distribution (chi-square)."""
    k, draws = 6, 4000
    p, q = (torch.rand(2, k).pow(2) + 0.05 for _ in "pq")
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.stack([torch.randperm(k), torch.randperm(k)])
    drawn_tokens = torch.randperm(k)[None]
    first, second = Counter(), Counter()
    for _ in range(draws):
        if certain:
            x, drawn_from = int(tokens[0, p[0].argmax()]), None  # often accepted
        else:
            x = int(generate.draw(q[:1], drawn_tokens))
            drawn_from = q[:1], drawn_tokens
        kept, new = judge([x], (p, tokens), drawn_from)
        first[x if kept else new] += 1
        if kept:
            second[new] += 1
    for counted, row in ((first, 0), (second, 1)):
        observed = [counted[token] for token in tokens[row].tolist()]
        assert sum(observed) > 50
        shares = p[row].double()  # float32 adds up to nearly 1
        wanted = sum(observed) * shares / shares.sum()
        assert chisquare(observed, wanted.numpy()).pvalue > 1e-5


def test_sampling_with_a_draft_draws_from_the_same_tokens(model, prompt):
    """With top_k 1 any temperature is greedy, whatever drafts."""
    size = prompt.shape[1] + 40
    expected = Generator(model, cache_size=size).generate(prompt, 40).tokens
    for name, draft in DRAFTERS.items():
        sampling = Sampling(temperature=0.9, top_k=1)
        generator = Generator(model, cache_size=size, sampling=sampling)
        generator = Speculating(generator, draft(generator))
        with seeds.naming(name):
            assert torch.equal(generator.generate(prompt, 40).tokens, expected)


def test_what_speculation_refuses(model):
    with pytest.raises(UsageError, match="one row"):
        Speculating(Generator(model, 2, 64), Lookup())
    options = {"quantization": "int8wo", "draft_quantization": "int8wo"}
    plan = make_plan(RunConfig(speculate="self", **options))
    with pytest.raises(UsageError, match="reads 100% of the bytes"):
        load_draft(plan)
    plan = make_plan(RunConfig(speculate="draft", draft_checkpoint="dummy:Qwen3-0.6B"))
    with pytest.raises(UsageError, match="number of tokens"):
        load_draft(plan)
