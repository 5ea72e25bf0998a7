"""Mixtures of experts: who computes what, how experts are quantized, saved, sized and reported.

Their logits are compared with Hugging Face's in test_families.py, with all other families'.
"""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from quantbench import models
from quantbench.generate import Generator
from quantbench.models.config import compiles
from quantbench.models.formats import EMBEDDED
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.llama import step_bytes, weight_bytes
from quantbench.models.loading import load_model
from quantbench.models.mixtral import MixtureOfExperts, Router, tokens_per_expert
from quantbench.models.presets import PRESETS
from quantbench.models.stacked import Stacked
from quantbench.quantize.packed import PackedWeight
from quantbench.quantize.registry import SCHEMES, Quantizer
from quantbench.quantize.spec import SHOWN, parse
from quantbench.run import decoding
from quantbench.run.sizes import size_of
from tests.models.hugging_face import MIXTURES, assert_near, config, saved
from tests.programs import worked

CPU = torch.device("cpu")
TOKENS = torch.randint(160, (3, 12), generator=torch.Generator().manual_seed(2))
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 4096}
WIDE |= {"max_position_embeddings": 512, "num_key_value_heads": 2, "num_local_experts": 4}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A random Mixtral wide enough for every scheme's groups, saved by Hugging Face, with the
    embedded tokenizer; its folder."""
    folder = tmp_path_factory.mktemp("wide")
    AutoModelForCausalLM.from_config(config("mixtral", **WIDE)).save_pretrained(folder)
    shutil.copyfile(EMBEDDED / "tokenizer.model", folder / "tokenizer.model")
    return folder


def routed(model, tokens):
    """The experts of each token in each layer, (layers, rows, positions, k)."""
    chosen = []
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(lambda *a: chosen.append(a[2][0])) for router in routers]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen).unflatten(1, tokens.shape)


@pytest.mark.parametrize("family", ["mixtral", "qwen-2-moe"])
def test_an_expert_that_no_token_takes_is_not_computed(family, tmp_path):
    """Two tokens choose at most four of six. The logits are compared in test_families.py."""
    ours, tokens, called = load_model(str(saved(family, tmp_path)[0])), TOKENS[:1, :2], set()
    for name, module in ours.named_modules():
        if name.rpartition(".")[0].endswith("experts"):
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    chosen = routed(ours, tokens)
    numbers = [i for i, layer in enumerate(ours.layers) if hasattr(layer.feed_forward, "experts")]
    assert called == {
        f"layers.{layer}.feed_forward.experts.{expert}"
        for layer, of_layer in zip(numbers, chosen, strict=True)
        for expert in of_layer.unique().tolist()
    }


def test_weights_add_up_to_one_only_where_they_are_normalized():
    config = MIXTURES["olmoe"]
    mixture = from_hugging_face(config.to_dict(), "olmoe").mixture
    x = torch.randn(5, 64)
    router = Router(64, mixture)
    chosen, weights = router(x)
    probabilities = (x @ router.weight.T).double().softmax(-1)
    assert torch.allclose(weights.double(), probabilities.gather(1, chosen), atol=1e-6)
    router.mixture = dataclasses.replace(mixture, normalized=True)
    assert torch.allclose(router(x)[1].sum(-1), torch.ones(5))


def test_one_token_is_summed_as_among_others():
    """To the bit, with experts whose products do not depend on the other rows."""
    config = from_hugging_face(MIXTURES["olmoe"].to_dict(), "olmoe")
    config = dataclasses.replace(
        config, mixture=dataclasses.replace(config.mixture, experts_per_token=5)
    )
    mixture = MixtureOfExperts(config)
    mixture.elsewhere = lambda tokens, rows: [(e, tokens[r] / (e + 3)) for e, r in rows.items()]
    tokens = torch.randn(7, 64)
    chosen, weights = mixture.router(tokens)
    together = mixture.routed(tokens, chosen, weights)
    for i in range(7):
        alone = mixture.routed(tokens[i : i + 1], chosen[i : i + 1], weights[i : i + 1])
        assert torch.equal(alone, together[i : i + 1])


def test_a_mixture_is_compiled_on_cuda_alone_and_in_one_memory():
    mixture = from_hugging_face(MIXTURES["olmoe"].to_dict(), "olmoe").mixture
    assert compiles(None, "cpu", False) and compiles(mixture, "cuda", False)
    assert not compiles(mixture, "cuda", True) and not compiles(mixture, "cpu", False)


def test_without_numbers_tokens_are_spread_evenly():
    chosen = torch.tensor([[0, 2], [2, 1]])
    assert tokens_per_expert(chosen, 4) == [1, 1, 2, 0]
    assert tokens_per_expert(chosen.to("meta"), 3) == [2, 1, 1]
    with torch.device("meta"):
        made = models.build(PRESETS["Qwen3-30B-A3B"].with_layers(1))
    assert made(torch.empty(1, 40, dtype=torch.long, device="meta")).shape == (1, 40, 151936)


@pytest.mark.parametrize("name", [n for n in SHOWN if n != "none" and not parse(n).calibrated])
def test_an_experts_numbers_are_those_of_its_own_matrix(name, wide):
    spec = parse(name).scheme
    loaded = load_model(str(wide), transform=Quantizer(spec, CPU, torch.float32, "reference"))
    stored = load_file(wide / "model.safetensors")
    for expert in range(4):
        prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
        w13 = torch.cat((stored[f"{prefix}.w1.weight"], stored[f"{prefix}.w3.weight"]))
        for matrix, weight in (("w13", w13), ("w2", stored[f"{prefix}.w2.weight"])):
            layer = loaded.layers[0].feed_forward.experts[expert].get_submodule(matrix)
            assert isinstance(layer.weight.data, PackedWeight)
            alone = SCHEMES[type(spec)].quantize(weight, spec)
            assert torch.equal(layer.weight.dequantize(), alone.dequantize())
    router = loaded.layers[0].feed_forward.router.weight
    assert torch.equal(router, stored["model.layers.0.block_sparse_moe.gate.weight"])


@pytest.mark.parametrize(
    "name", ["sparse-marlin-wanda", "autoquant", "int4wo-64-gptq", "int4wo-64-awq"]
)
def test_schemes_that_are_calibrated_take_experts(name, wide, in_tmp, own_cache):
    given = ("--checkpoint_path", wide, "--quantization", name, "--write_result", "none")
    worked("generate", *given, "--prefill_size=4", "--max_new_tokens=2")


@pytest.mark.parametrize("family", MIXTURES)
def test_sizes_from_shapes_are_those_of_the_loaded_model(family, tmp_path):
    folder = str(saved(family, tmp_path)[0])
    for name in ("none", "int8wo", "fp6"):
        spec = parse(name).scheme
        loaded = models.load(folder, precision=torch.bfloat16, quantization=name)
        assert size_of(loaded.config, spec, CPU, torch.bfloat16).model_bytes == (
            weight_bytes(loaded)
        )


def test_a_step_reads_the_chosen_experts():
    """Mixtral-8x7B by hand: 7 of 8 GB are experts' weights, and a row reads two of eight."""
    with torch.device("meta"):
        made = models.build(PRESETS["Mixtral-8x7B-v0.1"]).bfloat16()
    expert = 3 * 4096 * 14336 * 2  # bytes
    assert weight_bytes(made) - step_bytes(made, 1) == 32 * 6 * expert
    # Two rows choose 8 · (1 - (3/4)²) = 3.5 different experts on average.
    assert weight_bytes(made) - step_bytes(made, 2) == 32 * 4.5 * expert
    assert step_bytes(made, 1) == pytest.approx(12.88e9 * 2 - 32000 * 4096 * 2, rel=1e-3)


def compiled_step(model, rows, backend):
    """Logits of a prompt's last token as a compiled step gives them, and as the modules do."""
    tokens = TOKENS[torch.arange(rows) % 3]
    last, position = tokens[:, -1:], torch.tensor([tokens.shape[1] - 1])
    generator = Generator(model, rows, 16, decoder="modules")
    torch._dynamo.reset()
    with torch.no_grad():
        generator.forward(tokens[:, :-1])
        expected = generator.decoder.step(last, position)
        decoder = decoding.choose("modules", model, generator.caches, rows, compiled=True)
        step = torch.compile(decoder.step, backend=backend, fullgraph=True)
        return tokens, step(last, position), expected


@pytest.mark.parametrize(
    ("family", "backend", "rows"),
    [("mixtral", "aot_eager", 1), ("qwen-3-moe-dense", "eager", 2), ("qwen-2-moe", "eager", 7),
     ("olmoe", "eager", 1), ("gemma-2", "aot_eager", 1), ("gemma-3", "eager", 2)],
)  # fmt: skip
def test_a_compiled_step_gives_hugging_faces_logits(family, backend, rows, tmp_path):
    """As one graph: experts are gathered for a few rows, and for many each computes all rows."""
    folder, theirs = saved(family, tmp_path)
    made = load_model(str(folder), transform=Quantizer(parse("none"), CPU, torch.float32, "torch"))
    tokens, logits, _ = compiled_step(made, rows, backend)
    with torch.no_grad():
        expected = theirs(tokens).logits[:, -1]
    assert_near(logits, expected)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("scheme", "kernel"),
    [("int8wo", "torchao"), ("int4wo-32", "reference"), ("nvfp4", "reference"), ("none", "auto")],
)
def test_a_compiled_step_of_quantized_experts(scheme, kernel, rows, wide):
    """A weight that is gathered multiplies as the expert's own: its kernel adds as it does."""
    stages = Quantizer(parse(scheme), CPU, torch.float32, kernel)
    made = load_model(str(wide), precision=torch.float32, transform=stages)
    _, logits, expected = compiled_step(made, rows, "aot_eager")
    assert made.layers[0].feed_forward.stacked
    assert_near(logits, expected, 1e-5)


def test_stacked_weights_are_those_of_the_experts(wide):
    """The stacks share the memory of the weights; a kernel that keeps more is not stacked."""
    made = load_model(str(wide))
    before = {name: weight.clone() for name, weight in made.named_parameters()}
    made.prepare_to_compile()
    mixture = made.layers[0].feed_forward
    assert all(torch.equal(before[name], weight) for name, weight in made.named_parameters())
    stacked, held = mixture.stacked, {p.data_ptr() for p in mixture.experts.parameters()}
    for stack in stacked.stacks:
        assert {stack[i].data_ptr() for i in range(len(stack))} <= held
    made.prepare_to_compile()
    assert mixture.stacked is stacked
    mixture.experts[1].w2.register_buffer("state", torch.zeros(1))
    assert Stacked.of(mixture.experts) is None
    mixture.experts[1].w2 = nn.Linear(256, 256, dtype=torch.float64)
    assert Stacked.of(mixture.experts) is None
