"""Counting a pass: against cases worked by hand, torch's own counter, and a model's parameters."""

import dataclasses
import json

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from quantbench.errors import QuantbenchError
from quantbench.estimate.counting import Collective, count_module, pairs
from quantbench.estimate.counting_configs import count_config
from quantbench.estimate.counting_models import count_model
from quantbench.estimate.predict import Request
from quantbench.models import build
from quantbench.models.config import Mixture, ModelConfig
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.llama import step_bytes, weight_bytes
from quantbench.models.presets import preset
from quantbench.quantize.spec import parse_scheme
from quantbench.run.sizes import size_of
from tests.memory import allocated
from tests.models import hugging_face
from tests.models.refused import refusal

# D 64, 4 query heads share 2 key/value heads of 16, F 96, V 256.
GROUPED = ModelConfig("grouped", 64, 1, 4, 2, 16, 96, 256, 128)


def counted(config, scheme="none", tokens=1, depth=0, device="cpu", cache_size=None, **more):
    """A pass of a request with these other fields."""
    request = Request(config, scheme, **more)
    return count_model(request, torch.device(device), tokens, depth, cache_size)


def of_kind(count, kind):
    return [work for work in count.works if work.kind == kind]


def by_shape(count):
    return {(work.inner, work.outer): work for work in of_kind(count, "linear")}


def calls(count, kind):
    return sum(n for work, n in count.works.items() if work.kind == kind)


# 3 positions of 2 sequences behind 5 in the cache; bfloat16 takes 2 bytes. The queries at positions
# 5, 6 and 7 see 6, 7 and 8 keys, in 2 sequences of 4 heads: 168 pairs, each 4 · 16 operations. The
# cache holds 2 heads · 16 · 2 (key and value) · 2 bytes = 128 bytes a position.
def test_a_layer_with_grouped_heads_is_counted_as_worked_by_hand():
    count = counted(GROUPED, batch=2, tokens=3, depth=5, device="cuda")
    works = by_shape(count)
    assert {shape: work.flops for shape, work in works.items()} == {
        (64, 128): 2 * 6 * 64 * 128,  # (4 + 2 + 2) · 16 columns
        (64, 64): 2 * 6 * 64 * 64,
        (64, 192): 2 * 6 * 64 * 192,
        (96, 64): 2 * 6 * 96 * 64,
        (64, 256): 2 * 2 * 64 * 256,  # of the last positions alone
    }
    wqkv = works[64, 128]
    assert (wqkv.bytes_read, wqkv.bytes_written) == (2 * 64 * 128 + 2 * 6 * 64, 2 * 6 * 128)
    assert wqkv.format == "bfloat16" and count.works[wqkv] == 1
    (attention,) = of_kind(count, "attention")
    assert attention.flops == 168 * 4 * 16
    query = 2 * 4 * 3 * 16 * 2
    assert attention.bytes_read == query + 2 * 5 * 128 + 2 * 3 * 128
    assert attention.bytes_written == query + 2 * 3 * 128
    assert count.kv_cache_bytes == 2 * 8 * 128


def test_a_decoding_step_reads_the_cache_once_for_all_heads_that_share_it():
    count = counted(GROUPED, batch=2, tokens=1, depth=5)
    (attention,) = of_kind(count, "attention")
    assert attention.flops == 6 * 2 * 4 * 4 * 16
    assert attention.bytes_read == 2 * 6 * 128 + 2 * 4 * 16 * 2
    assert attention.outer == 6 and attention.rows == 2


def test_attention_is_counted_as_it_is_computed_on_the_device():
    def seen(device, **more):
        count = counted(GROUPED, tokens=8, device=device, **more)
        return count.total("flops", "attention") / (4 * 4 * 16)

    assert seen("cuda") == 36  # flash attention leaves out the upper triangle
    assert seen("cpu") == 64  # torch's, with a mask, computes all of the chunk
    assert seen("cpu", chunk=4) == 16 + (16 + 16)  # the second chunk also sees the first
    assert seen("cuda", chunk=4) == 36


@pytest.mark.parametrize(
    ("queries", "keys", "depth", "window"), [(5, 5, 0, None), (3, 9, 6, None), (7, 12, 5, 4)]
)
def test_pairs_are_those_that_a_mask_leaves(queries, keys, depth, window):
    query, key = torch.arange(depth, depth + queries)[:, None], torch.arange(keys)
    mask = key <= query
    if window is not None:
        mask &= key > query - window
    assert pairs(queries, keys, depth, window) == int(mask.sum())


def test_layers_and_chunks_add_up():
    config = preset("TinyLlama-1.1B-Chat-v1.0")
    count = counted(config, tokens=1, depth=7)
    matrices = config.parameters() - 32000 * 2048 - 45 * 2048  # without embedding and norms
    assert count.total("flops", "linear") == 2 * matrices
    assert calls(count, "linear") == 22 * 4 + 1
    assert calls(count, "attention") == 22
    whole = counted(config, tokens=8, device="cuda")
    chunks = counted(config, tokens=8, chunk=2, device="cuda")
    assert whole.total("flops") == chunks.total("flops")
    assert calls(chunks, "linear") == 4 * 22 * 4 + 1


def test_flops_of_products_are_those_of_torchs_counter():
    model = build(GROUPED.with_layers(1))
    tokens = torch.randint(256, (2, 7))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    theirs = counter.get_flop_counts()["Global"]
    with torch.device("meta"):
        count = count_module(build(GROUPED), tokens.to("meta"))
    assert count.total("flops", "linear") == theirs[torch.ops.aten.mm]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int4wo-32", "fp6", "sparse-marlin"])
def test_a_decoding_step_reads_every_weight_but_the_embedding_once(scheme, tied):
    """A tied output layer that is quantized no longer shares the embedding's memory."""
    config = ModelConfig("wide", 256, 3, 4, 2, 64, 512, 512, 128, tie_embeddings=tied)
    count = counted(config, scheme, tokens=1)
    size = size_of(config, parse_scheme(scheme), torch.device("cpu"), torch.bfloat16)
    activations = sum(2 * n * w.inner for w, n in count.works.items() if w.kind == "linear")
    norms = 2 * (3 * 2 + 1) * 256
    read = count.total("bytes_read", "linear") - activations
    assert read == size.model_bytes - norms
    assert count.weight_bytes == size.memory_bytes
    (format,) = {work.format for work in of_kind(count, "linear")}
    assert format == ("bfloat16" if scheme == "none" else scheme)


def test_a_scheme_is_counted_for_a_device_that_is_not_here():
    """4 bits a weight, and a scale and a zero point of 16 bits for every 32."""
    config = ModelConfig("wide", 256, 3, 4, 2, 64, 512, 512, 128, tie_embeddings=True)
    count = counted(config, "int4wo-32", tokens=1, device="cuda")
    works = by_shape(count)
    assert works[256, 512].bytes_read == (256 * 512 // 2 + 256 * 512 // 32 * 4 + 2 * 256)
    matrices = sum(rows * columns for rows, columns in config.linear_shapes().values())
    table, norms = 512 * 256, 7 * 256
    assert count.weight_bytes == matrices // 2 + matrices // 32 * 4 + 2 * (table + norms)
    whole = counted(config, tokens=1, device="cuda")
    assert whole.weight_bytes == 2 * config.parameters()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scheme", ["none", "int8wo", "int4wo-128", "fp6", "sparse-marlin"])
def test_no_weight_of_70b_is_made(scheme, device, tmp_path):
    """The smallest matrix has 1024 · 8192 numbers, and a cache of 1024 positions 1 M. One row of
    28,672 zeros is quantized, in up to 8 bytes a number, for the shapes of what it becomes."""
    sizes = {"tokens": 1024, "device": device, "tp": 8}
    largest, _ = allocated(lambda: counted(preset("Meta-Llama-3-70B"), scheme, **sizes), tmp_path)
    assert largest <= 8 * 28672


def test_ranks_share_the_products_and_exchange_sums():
    config = preset("Meta-Llama-3-8B")
    one, of_four = (counted(config, "int8wo", tokens=16, tp=tp) for tp in (1, 4))
    assert of_four.total("flops", "linear") * 4 == one.total("flops", "linear")
    assert of_four.total("flops", "attention") * 4 == one.total("flops", "attention")
    assert not one.collectives
    assert of_four.collectives == {
        Collective("all_reduce", 16 * 4096 * 2): 2 * 32 + 1,
        Collective("all_gather", 128256 // 4 * 2): 1,
    }


# ---------------------------------------------------------------------------------- any module


def test_any_module_and_what_is_alive_at_its_peak():
    """float32: x 6·4, h 6·10, relu of it 6·10, y 6·2. At the peak h and its relu are alive; x is
    given, and was there before."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
        count = count_module(module, torch.empty(6, 4))
    assert count.total("flops") == 2 * 6 * (4 * 10 + 10 * 2)
    assert count.weight_bytes == 4 * (40 + 10 + 20 + 2)
    assert count.peak_activation_bytes == 4 * (60 + 60)
    (relu,) = of_kind(count, "rest")
    assert (relu.bytes_read, relu.bytes_written, relu.flops) == (240, 240, 0)


def added(x, row):
    return x.view(3, 4).T.contiguous() + row.expand(4, 3)


@pytest.mark.parametrize(
    ("compute", "given", "expected"),
    [
        # Views cost nothing, and an expanded tensor is read once: a copy, and a sum.
        (added, ((12,), (3,)), [(48, 48), (48 + 12, 48)]),
        # The rows of six tokens, of 8 floats; a token's number has 8 bytes.
        (torch.embedding, ((1000, 8), [2, 3]), [(6 * 8 * 4 + 6 * 8, 6 * 8 * 4)]),
        # Three rows of four floats to which others are added are read and written alone.
        (lambda table, rows, more: table.index_add_(0, rows, more), ((1000, 4), [3], (3, 4)),
         [(2 * 48 + 24, 48)]),
    ],
)  # fmt: skip
def test_bytes_of_operations(compute, given, expected):
    """given: shapes of tensors of floats, and as lists those of whole numbers."""
    module = nn.Module()
    module.forward = compute
    dtypes = {list: torch.long, tuple: torch.float32}
    with torch.device("meta"):
        count = count_module(module, *(torch.empty(s, dtype=dtypes[type(s)]) for s in given))
    assert [(work.bytes_read, work.bytes_written) for work in count.works] == expected


# ---------------------------------------------------------------------------------- transformers


@pytest.fixture
def config_json(tmp_path):
    def written(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return written


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 128,
}  # fmt: skip
LLAMA_4 = LLAMA | {
    "model_type": "llama4_text", "intermediate_size_mlp": 128, "num_hidden_layers": 1,
    "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}  # fmt: skip
EACH = 64 * (64 + 64 + 32 + 32) + 3 * 64 * 96  # numbers of a layer's matrices in LLAMA


@pytest.mark.parametrize(
    ("fields", "matrices", "others"),
    [
        # Four square matrices and two of 64 · 256 a layer; biases, two norms a layer and one at the
        # end, and positions, of which OPT has two more. Its output is its embedding.
        (OPT, 3 * (4 * 64 * 64 + 2 * 64 * 256),
         3 * (4 * 64 + 256 + 64 + 4 * 64) + 2 * 64 + (128 + 2) * 64),
        (LLAMA, 2 * EACH, 256 * 64 + 5 * 64),
        # A model with pictures is counted as its text model.
        ({"model_type": "llava", "text_config": LLAMA}, 2 * EACH, 256 * 64 + 5 * 64),
        # Its attention makes a buffer on the processor, and has more: lambdas and a norm.
        (LLAMA | {"model_type": "diffllama"}, 2 * EACH, None),
        # All four experts get every token, zeros among them; one expert more, and the router.
        (LLAMA_4, 64 * (64 + 64 + 32 + 32) + 5 * 3 * 64 * 96 + 64 * 4, None),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_models_of_transformers_are_counted_as_worked_by_hand(
    fields, matrices, others, config_json
):
    """Numbers of all matrices but the output's, which the last positions go through; and of all
    else that is stored."""
    output = 64 * fields.get("vocab_size", 256)
    count = count_config(config_json(fields), 2, 10, precision=torch.float16)
    assert count.total("flops", "linear") == 2 * (20 * matrices + 2 * output)
    assert others is None or count.weight_bytes == 2 * (matrices + output + others)
    if fields is OPT:  # two sequences of 10 tokens, each of which sees itself and those before it
        assert count.total("flops", "attention") == 3 * 2 * 4 * 64 * 55


@pytest.mark.parametrize("depth", [0, 6])
def test_llama_of_transformers_computes_what_ours_does(config_json, depth):
    tokens = 1 if depth else 5
    theirs = count_config(config_json(LLAMA), 3, tokens, depth)
    two = dataclasses.replace(GROUPED, num_layers=2)
    ours = counted(two, batch=3, tokens=tokens, depth=depth, device="cuda")
    for kind in ("linear", "attention"):
        assert theirs.total("flops", kind) == ours.total("flops", kind)
    assert theirs.weight_bytes == ours.weight_bytes
    # Keys and values in 2 layers of 2 heads of 16, in bfloat16.
    assert theirs.kv_cache_bytes == 2 * 2 * 3 * (depth + tokens) * 2 * 16 * 2


def test_a_config_with_an_infinity_as_transformers_writes_it(tmp_path):
    mamba = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, n_groups=1,
        vocab_size=256,
    )  # fmt: skip
    mamba.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    assert count_config(tmp_path, tokens=8).weight_bytes > 2 * 256 * 64


# Transformers would take its own width, which 32 heads divide; the picture's model has one.
WITHOUT_WIDTH = {k: v for k, v in LLAMA.items() if k != "hidden_size"} | {"num_attention_heads": 32}
PICTURE = {"model_type": "clip_vision_model", "hidden_size": 64, "num_attention_heads": 4}
OF_PICTURES = {"model_type": "qwen2_5_vl", "text_config": LLAMA | {"model_type": "qwen2_5_vl_text"}}
BAD_CONFIGS = [
    ("{", "no config of transformers"),
    ("[]", "no config of transformers"),
    ("{}", "no config of transformers: it has no model_type"),
    ({"model_type": "nothing"}, "no config of transformers"),
    ({"model_type": "llama", "hidden_size": "wide"}, "config"),
    ({"model_type": "t5", "d_model": 64, "num_layers": 1}, "no causal language model of t5, and"),
    (LLAMA | {"num_key_value_heads": 3}, "4 query heads cannot share 3 key/value heads"),
    (LLAMA | {"num_attention_heads": 0}, "no config of transformers"),
    (LLAMA | {"vocab_size": -1}, "vocab_size is -1; accepted is a whole number from 1"),
    *((LLAMA | {"num_hidden_layers": n}, "a whole number from 1 to 10000") for n in (0, -3, 10**6)),
    ({"model_type": "gpt2", "n_embd": 64, "n_layer": 0}, "n_layer is 0; accepted is"),
    ({"model_type": "gpt2", "n_embd": 64}, "it does not say its number of layers"),
    ({"model_type": "llama"}, "it does not say its width (hidden_size), and transformers"),
    ({"model_type": "llava", "text_config": WITHOUT_WIDTH, "vision_config": PICTURE},
     "it does not say its width"),
    (OF_PICTURES, "no causal language model of qwen2_5_vl alone, and only these are counted; give"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), BAD_CONFIGS)
def test_a_config_that_is_not_understood_is_one_line(config_json, content, expected):
    assert expected in refusal(QuantbenchError, count_config, config_json(content))


# Eight experts of 2 · 96 and 96 columns; a token goes through two.
MIXED = dataclasses.replace(
    GROUPED, name="mixed", num_layers=3, mixture=Mixture(8, 2, 96), architecture="mixtral"
)


@pytest.mark.parametrize("tokens", [1, 2, 4, 64])
def test_experts_are_read_as_often_as_they_are_chosen(tokens):
    """Weights that a step reads: those of Mixtral.step_bytes, which knows the modules."""
    count = counted(MIXED, batch=tokens, tokens=1)
    with torch.device("meta"):
        model = build(MIXED).to(torch.bfloat16)
    experts = [w for w in count.works.elements() if (w.inner, w.outer) in ((64, 192), (96, 64))]
    read = sum(work.bytes_read - work.rows * work.inner * 2 for work in experts)
    unread = weight_bytes(model) - step_bytes(model, tokens)
    assert read == pytest.approx(3 * 8 * (2 * 64 * 192 + 2 * 96 * 64) - unread, abs=100)
    # Each token goes through two experts, of 3 · 64 · 96 multiplications.
    assert sum(work.flops for work in experts) == 2 * 3 * tokens * 2 * 3 * 64 * 96


def test_layers_without_experts_among_those_with():
    some = dataclasses.replace(MIXED, mixture=Mixture(8, 2, 96, dense_layers=(0, 2)))
    count = counted(some, batch=1, tokens=2)
    assert count.weight_bytes == 2 * some.parameters()
    # The dense layers' feed-forward networks have the shapes of an expert: 2 tokens each.
    dense = [n for w, n in count.works.items() if (w.inner, w.outer, w.rows) == (96, 64, 2)]
    assert sum(dense) == 2


@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_experts_of_transformers_are_products_and_are_read_as_often_as_they_are_chosen(
    tokens, config_json
):
    experts = {"num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2}
    path = config_json(LLAMA | {"model_type": "mixtral"} | experts)
    count = count_config(path, tokens=tokens)
    linear = [work for work in count.works.elements() if work.kind == "linear"]
    experts = [work for work in linear if work.rows == 2 * tokens]
    # Each token goes through two experts, of 2 · 96 and 96 columns.
    assert sum(work.flops for work in experts) == 2 * 3 * tokens * 2 * 3 * 64 * 96
    chosen = 8 * (1 - (1 - 2 / 8) ** tokens)
    weights = sum(work.bytes_read - work.rows * work.inner * 2 for work in experts)
    ends = len(experts) * 8 * 4  # where each expert's rows end
    assert weights - ends == pytest.approx(3 * chosen * 3 * 64 * 96 * 2, abs=len(experts))


@pytest.mark.parametrize(("tokens", "depth"), [(1, 60), (40, 0)])
@pytest.mark.parametrize("family", ["gemma-3", "qwen-3-moe-dense"])
def test_a_layer_of_each_kind_stands_for_the_others(family, tokens, depth, monkeypatch):
    """Windows, and layers with and without experts: as if every layer were counted."""
    theirs = hugging_face.FAMILIES[family]
    config = from_hugging_face({"model_type": theirs.model_type, **theirs.to_dict()}, family)

    def sums():
        given = {"batch": 2, "tokens": tokens, "depth": depth, "cache_size": 128}
        count = counted(config, **given)
        return count.total("flops"), count.total("bytes_read"), count.works.total()

    few, apart = sums(), [[number] for number in range(config.num_layers)]
    monkeypatch.setattr(ModelConfig, "kinds_of_layers", lambda self: [list(one) for one in apart])
    assert few == sums()
