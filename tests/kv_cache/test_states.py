"""What layers without attention remember: the rule against its definition in float64, going back in
a text, compiling, and what cannot be."""

import random

import pytest
import torch
from transformers import AutoConfig

import quantbench.models
from quantbench.errors import UsageError
from quantbench.generate import Generator
from quantbench.models.formats import open_checkpoint
from quantbench.models.formats.base import SavedScheme
from quantbench.models.formats.saver import Saver
from quantbench.models.loading import load_config, load_model
from quantbench.ops.delta_rule import delta_rule
from quantbench.quantize.kernel import KernelLinear
from quantbench.quantize.registry import quantizer_of
from quantbench.quantize.spec import parse_scheme
from quantbench.run.decoding import Modules, with_own_code
from quantbench.speculate import MOST, ModelDraft, Speculating
from tests.models.hugging_face import OF_STATES, SIZES, assert_near, drawn
from tests.models.test_families import DELTA

LENGTH = 50
KINDS = {
    "qwen3.5": (
        "qwen3_5_text",
        DELTA | {"num_hidden_layers": 4, "head_dim": 16, "linear_value_head_dim": 16},
    ),
    "lfm2": ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1], "num_key_value_heads": 2}),
}


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory):
    """A model, and another one of the same sizes."""
    kind, fields = KINDS[request.param]
    loaded = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("model")
        theirs = drawn(AutoConfig.for_model(kind, **SIZES | fields))
        theirs.save_pretrained(folder)
        loaded.append(load_model(str(folder)))
        loaded[-1].__dict__.update(theirs=theirs, path=str(folder))
    return loaded


def by_definition(state, query, key, value, decay, beta):
    """Token by token, in float64."""
    state, outputs = state.double(), []
    for i in range(key.shape[2]):
        q, k, v = (x[:, :, i].double() for x in (query, key, value))
        state = state * decay[:, :, i].double().exp()[..., None, None]
        new = beta[:, :, i, None].double() * (v - torch.einsum("bhkv,bhk->bhv", state, k))
        state = state + k[..., None] * new[..., None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_chunks_follow_the_definition(length):
    heads = 2, 3, length
    query, key = (torch.nn.functional.normalize(torch.randn(*heads, 16), dim=-1) for _ in "qk")
    given = query, key, torch.randn(*heads, 8), -5 * torch.rand(heads) ** 3, torch.rand(heads)
    state = torch.randn(2, 3, 16, 8)
    for found, expected in zip(
        delta_rule(state, *given), by_definition(state, *given), strict=True
    ):
        # Sums of some 64 float32 numbers, through a triangular system of numbers below 1.
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_long_prompts_are_transformers(models):
    tokens = torch.randint(3, 96, (3, 150))
    expected = models[0].theirs(tokens).logits
    for chunk in (150, 64):
        generator = Generator(models[0], 3, 150, prefill_chunk=chunk)
        assert_near(generator.forward(tokens), expected, OF_STATES)


@pytest.mark.parametrize("back", [1, 5, MOST + 1])
def test_a_text_goes_on_behind_what_was_read_wrongly(models, back):
    """Passes of drawn lengths, each with drawn tokens behind them that the text does not have; some
    were written by another model before, as by one that drafts."""
    model, other = models
    tokens = torch.randint(3, 96, (2, LENGTH))
    expected = model(tokens)
    generator = Generator(model, 3, 2 * LENGTH, decoder="modules")
    for memory in generator.caches:
        memory.go_back(back)
    drafting = Generator(other, 3, 2 * LENGTH, decoder="modules", caches=generator.caches)
    for _ in range(2):  # the second text needs no reset
        outputs, start = [], 0
        while start < LENGTH:
            for i in range(random.randrange(back)):
                drafting.forward(torch.randint(3, 96, (2, 1)), start + i)
            count = random.randint(1, min(9, LENGTH - start))
            wrong = torch.randint(3, 96, (2, random.randint(0, back)))
            piece = torch.cat((tokens[:, start : start + count], wrong), 1)
            outputs.append(generator.forward(piece, start)[:, :count])
            start += count
        assert_near(torch.cat(outputs, 1), expected, OF_STATES)


def test_what_is_gone_is_refused_and_position_0_is_not(models):
    model, _ = models
    tokens = torch.randint(3, 96, (1, 30))
    generator = Generator(model, 1, LENGTH, decoder="modules")
    generator.forward(tokens)
    assert [generator.keep(n) for n in (28, 29, 30, 31, 0)] == [0, 29, 30, 0, 0]
    with pytest.raises(UsageError, match="position 12: .*have read on; start at position 0"):
        generator.forward(tokens[:, 12:], 12)
    assert_near(generator.forward(tokens[:, 29:], 29), model(tokens)[:, 29:], OF_STATES)
    generator.fill_randomly(20)
    assert_near(generator.forward(tokens), model(tokens), OF_STATES)


class Guesses:
    """Drafts a text, with some tokens replaced."""

    levels = 1

    def __init__(self, text):
        self.text = text

    def offer(self, history, most):
        return [0] * min(most, len(self.text) - len(history))

    def draft(self, history, count):
        right = self.text[len(history) : len(history) + count]
        return [x if random.random() < 0.7 else 3 for x in right], None


@pytest.mark.parametrize("drafter", ["guesses", "self", "other"])
def test_speculation_gives_the_greedy_text(models, drafter):
    model, other = models
    prompt = torch.randint(3, 96, (1, 9))
    expected = Generator(model, 1, 100, decoder="modules").generate(prompt, 15).tokens
    generator = Generator(model, 1, 100, decoder="modules")
    shared = drafter == "self"
    draft = Generator(other, 1, 100, decoder="modules",
                      caches=generator.caches if shared else None)  # fmt: skip
    text = [*prompt[0].tolist(), *expected[0].tolist()]
    drafts = Guesses(text) if drafter == "guesses" else ModelDraft(draft, shared)
    speculating = Speculating(generator, drafts)
    speculating.speculator.seconds = [1.0] * 17  # a pass costs the same with any draft
    assert torch.equal(speculating.generate(prompt, 15).tokens, expected)
    assert speculating.speculator.counted.drafted


def test_a_step_is_one_graph_and_writes_where_it_wrote(models):
    model, _ = models
    tokens = torch.randint(3, 96, (2, 6))
    generator = Generator(model, 2, LENGTH, decoder="modules")
    places = [buffer.data_ptr() for memory in generator.caches for buffer in memory.buffers()]
    decoder = Modules(model, generator.caches, None, compiled=True)
    graph = torch.compile(with_own_code(Modules.step), fullgraph=True, backend="eager")
    with torch.no_grad():
        steps = [graph(decoder, tokens[:, [i]], torch.tensor([i])) for i in range(6)]
    assert_near(torch.stack(steps, 1), model(tokens), OF_STATES)
    now = [buffer.data_ptr() for memory in generator.caches for buffer in memory.buffers()]
    assert now == places


@pytest.mark.parametrize("scheme", ["int8wo", "int4wo-32"])
def test_a_quantized_model_is_saved_and_read_back(models, scheme, tmp_path):
    """All linear layers are quantized, those of layers without attention as well; the gates and
    convolutions are not."""
    path, tokens = models[0].path, torch.randint(3, 96, (1, 20))
    spec = parse_scheme(scheme)
    quantizer = quantizer_of(spec, torch.device("cpu"), torch.float32)
    saver = Saver(tmp_path / "saved", SavedScheme(scheme, "float32"), open_checkpoint(path))
    made = load_model(path, transform=quantizer, saver=saver)
    saver.finish(made.config)
    packed = {name for name, part in made.named_modules() if isinstance(part, KernelLinear)}
    assert packed == set(made.config.linear_shapes())
    again = load_config(str(tmp_path / "saved"))
    assert again.recurrent == made.config.recurrent and again.layers == made.config.layers
    assert torch.equal(quantbench.models.load(str(tmp_path / "saved"))(tokens), made(tokens))
