"""Loading: every layout gives Hugging Face's logits; damage gives one clear line."""

import gc
import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from quantbench.errors import CheckpointError
from quantbench.models.formats import names, open_checkpoint, tensor_files
from quantbench.models.formats.dummy import PERIOD
from quantbench.models.loading import WeightPool, load_config, load_model
from tests.models.hugging_face import (
    TOKENS,
    assert_near,
    edit_config,
    read_by_transformers,
    rewritten,
    saved,
    turned,
)
from tests.models.refused import refusal
from tests.models.small import small_checkpoint
from tests.models.tiny_tokenizers import write_folder


def assert_same(model, theirs):
    assert_near(model(TOKENS), theirs(TOKENS).logits)


def edit(folder, change):
    with rewritten(folder) as tensors:
        change(tensors)


META = {  # parts of names
    "model.": "", "lm_head": "output", "embed_tokens": "tok_embeddings", "_proj": "",
    "self_attn.": "attention.w", "mlp.gate": "feed_forward.w1", "mlp.down": "feed_forward.w2",
    "mlp.up": "feed_forward.w3", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def meta_layout(theirs, fused):
    """A Hugging Face model's weights under Meta's names, q and k rows as Meta orders them."""
    out = {}
    for name, tensor in theirs.state_dict().items():
        for part, meta in META.items():
            name = name.replace(part, meta)
        for part, heads in (("wq", "num_attention_heads"), ("wk", "num_key_value_heads")):
            if part in name:
                tensor = turned(tensor, getattr(theirs.config, heads))
        out[name] = tensor.clone()
    for i in range(theirs.config.num_hidden_layers if fused else 0):
        stem = f"layers.{i}.attention.w"
        out[f"{stem}qkv.weight"] = torch.cat([out.pop(f"{stem}{part}.weight") for part in "qkv"])
    return out


PARAMS = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 96,
          "ffn_dim_multiplier": 0.5, "norm_eps": 1e-6, "vocab_size": -1,
          "rope_theta": 500000.0}  # fmt: skip


# ---------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("family", ["llama-3.1", "llama-3.2", "mistral-0.1", "qwen-2", "qwen-3"])
def test_shards(family, tmp_path):
    folder, theirs = saved(family, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same(load_model(str(folder)), theirs)
    (folder / "model.safetensors.index.json").unlink()
    assert_same(load_model(str(folder)), theirs)


def pickled(folder, content, name="pytorch_model.bin", zipped=True):
    """Put a pickle into the place of the weights."""
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / name, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_hugging_face_folder(tmp_path, zipped):
    folder, theirs = saved("llama-3", tmp_path)
    pickled(folder, theirs.state_dict(), zipped=zipped)
    assert_same(load_model(str(folder)), theirs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("described_by", ["config.json", "params.json"])
def test_gpt_fast_pickle(tmp_path, fused, described_by):
    folder, theirs = saved("llama-3", tmp_path)
    pickled(folder, meta_layout(theirs, fused), "model.pth")
    if described_by == "params.json":
        (folder / "config.json").unlink()
        (folder / "params.json").write_text(json.dumps(PARAMS))
    for path in (folder / "model.pth", folder):
        assert_same(load_model(str(path)), theirs)
        assert open_checkpoint(str(path)).name == "llama-3"


def test_a_linked_checkpoint_goes_by_the_name_of_its_link(tmp_path):
    """The hub's cache links each file to a blob elsewhere; the config is in the link's folder."""
    folder, theirs = saved("llama-3", tmp_path)
    pickled(folder, meta_layout(theirs, fused=True), "../blob")
    (folder / "model.pth").symlink_to(tmp_path / "blob")
    (tmp_path / "mine").symlink_to(folder)
    path = str(tmp_path / "mine" / "model.pth")
    assert_same(load_model(path), theirs)
    assert open_checkpoint(path).name == open_checkpoint(str(tmp_path / "mine")).name == "mine"


def meta_folder(tmp_path):
    """A folder with params.json; the model for it, in Meta's layout and in Hugging Face's."""
    _, theirs = saved("llama-3", tmp_path)
    folder = tmp_path / "meta"
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS | {"vocab_size": 160}))
    return folder, meta_layout(theirs, fused=False), theirs


@pytest.mark.parametrize("embedding_cut", [0, 1], ids=["rows, Llama 3", "columns, Llama 2"])
def test_meta_folder_of_two_ranks(tmp_path, embedding_cut):
    folder, whole, theirs = meta_folder(tmp_path)
    for rank in range(2):
        part = {"rope.freqs": torch.ones(8)}
        for name, tensor in whole.items():
            by_column = name.endswith(("wo.weight", "w2.weight"))
            axis = embedding_cut if name.startswith("tok_emb") else int(by_column)
            part[name] = tensor if tensor.ndim == 1 else tensor.chunk(2, axis)[rank].clone()
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    assert_same(load_model(str(folder)), theirs)


def test_tied_output_shares_the_embedding(tmp_path):
    folder, theirs = saved("llama-3.2", tmp_path)
    model = load_model(str(folder))
    assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same(load_model(str(folder)), theirs)
    edit(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match="has tensor lm_head.weight"):
        load_model(str(folder))


def test_cutting_the_depth(tmp_path):
    folder, theirs = saved("llama-3", tmp_path)
    theirs.model.layers = theirs.model.layers[:2]
    assert_same(load_model(str(folder), num_layers=2), theirs)


# ---------------------------------------------------------------------------------- random weights


def test_dummy_weights_are_random_and_the_same_each_time(tmp_path):
    folder, _ = saved("qwen-2", tmp_path)
    path = f"dummy:{folder / 'config.json'}"
    first, again = load_model(path), load_model(path)
    assert open_checkpoint(path).name == "qwen-2" and open_checkpoint(path).tokenizer_folder is None
    for (name, a), b in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
        if "norm" in name:
            assert (a == 1).all()
        elif a.ndim == 2:
            assert a.std() == pytest.approx(0.02, rel=0.1)
            assert not torch.equal(a[0], a[1])
    assert first(TOKENS).isfinite().all()


def test_a_dummy_weight_follows_from_its_name_and_place(tmp_path):
    """It is the same with other layers around it and another number of threads. The embedding is
    longer than the block of random numbers that it repeats."""
    folder, _ = saved("qwen-2", tmp_path)
    edit_config(folder, vocab_size=70_000)
    path, threads = f"dummy:{folder / 'config.json'}", torch.get_num_threads()
    whole = load_model(path, precision=torch.bfloat16)
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        part = load_model(path, precision=torch.bfloat16, num_layers=1)
    finally:
        torch.set_num_threads(threads)
    assert len(whole.layers) > 1 and len(part.layers) == 1
    for name, weight in part.named_parameters():
        assert torch.equal(weight, whole.get_parameter(name))
    table = whole.tok_embeddings.weight.flatten()
    assert len(table) > 2 * PERIOD
    for repeated in table.split(PERIOD)[1:]:
        assert torch.equal(repeated, table[: len(repeated)])


def test_presets_need_no_files(tmp_path, monkeypatch):
    """Nor does a pickle whose folder has a preset's name. The embedded model is found anywhere."""
    monkeypatch.chdir(tmp_path)
    assert load_model("tiny").config.vocab_size == 4096
    assert open_checkpoint("tiny").tokenizer_folder.is_dir()
    folder = tmp_path / "TinyLlama-1.1B-Chat-v1.0"
    folder.mkdir()
    torch.save({}, folder / "model.pth")
    assert load_config(str(folder / "model.pth")).num_layers == 22
    assert load_config("dummy:Meta-Llama-3.1-70B").num_layers == 80
    assert open_checkpoint("dummy:Meta-Llama-3.1-70B").tokenizer_folder is None
    model = load_model("dummy:Qwen3-0.6B", precision=torch.bfloat16, num_layers=1)
    assert model.config.num_layers == 1


# ---------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("family", ["qwen-3", "llama-3"])
def test_transform_sees_every_layer_once_with_its_weights(tmp_path, family):
    """What it adds is frozen, too; and progress reaches the end."""
    folder, theirs = saved(family, tmp_path)
    seen, steps = [], []

    def transform(name, module):
        seen.append(name)
        assert isinstance(module, nn.Embedding | nn.RMSNorm | nn.Linear)
        assert not any(p.is_meta for p in module.parameters())
        module.added = nn.Linear(2, 2)
        return module

    def progress(done, total):
        steps.append((done, total))

    model = load_model(str(folder), transform=transform, progress=progress)
    names = [n.rpartition(".")[0] for n in model.state_dict() if ".added." not in n]
    assert seen == list(dict.fromkeys(names))
    assert_same(model, theirs)
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > 0


def test_weights_side_by_side_share_no_storage():
    """torch.compile takes parts of one storage for aliases, which no nested region may have."""
    layers = [nn.Linear(64, 32, dtype=torch.bfloat16) for _ in range(3)]
    before = [layer.weight.clone() for layer in layers]
    pool = WeightPool()
    for layer in layers:
        pool.move(layer)
    del pool
    gc.collect()
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    assert len({weight.untyped_storage()._cdata for weight in weights}) == len(weights)
    addresses = sorted(weight.data_ptr() for weight in weights)
    assert addresses[-1] - addresses[0] < 1 << 20 and addresses[0] % 64 == 0
    assert all(torch.equal(old, layer.weight) for old, layer in zip(before, layers, strict=True))


def resident_kilobytes(file):
    """How much of a mapped file counts as this process's memory now."""
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    here = [i for i, line in enumerate(lines) if line.endswith(str(file))]
    return sum(int(lines[i + 1 + j].split()[1]) for i in here for j in range(20)
               if lines[i + 1 + j].startswith("Rss:"))  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's smaps")
@pytest.mark.parametrize("layout", ["model.safetensors", "model.pth", "consolidated.00.pth"])
def test_a_files_pages_are_let_go(tmp_path, monkeypatch, layout):
    """However large the file, little of it stays resident: here 2 MB read through one mapping, one
    more tensor, and the 64 kB around each page fault that Linux maps along."""
    monkeypatch.setattr(tensor_files, "_MAPPED_BYTES", 2 << 20)
    sizes = {"intermediate_size": 1024, "num_hidden_layers": 8, "num_key_value_heads": 4}
    made = load_model(small_checkpoint(tmp_path, **sizes))
    name_map = names.hugging_face if layout.endswith("safetensors") else names.meta
    tensors = {
        part: piece.clone()
        for name, tensor in made.state_dict().items()
        for part, piece in zip(name_map(name), tensor.chunk(len(name_map(name))), strict=True)
    }
    file = tmp_path / layout
    (save_file if layout.endswith("safetensors") else torch.save)(tensors, file)
    assert file.stat().st_size > 32 << 20
    most = 0

    def transform(name, module):
        nonlocal most
        most = max(most, resident_kilobytes(file))
        return nn.Identity()

    load_model(str(tmp_path), transform=transform)
    assert most < 6 << 10


# ---------------------------------------------------------------------------------- bad input


class Harmful:
    def __reduce__(self):
        return os.system, ("touch HARM",)


def old_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1, "b": [Harmful()]}))


def already_quantized(folder):
    layer = nn.Linear(64, 64)
    quantize_(layer, Int8WeightOnlyConfig())
    pickled(folder, dict(layer.state_dict()))


def index_of(file):
    index = {"weight_map": {"lm_head.weight": file}}
    return lambda folder: write_folder(folder, {"model.safetensors.index.json": index})


def stale_shard(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({GATE: tensors[GATE] + 1}, folder / "model-00001-of-00002.safetensors")


def put(name, tensor):
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: tensor}))


def only(kept="", pickle=None):
    """Nothing but the file `kept`, and a model.pth of these bytes."""

    def change(folder):
        for file in folder.iterdir():
            if file.name != kept:
                file.unlink()
        write_folder(folder, {} if pickle is None else {"model.pth": pickle})

    return change


GATE = "model.layers.1.mlp.gate_proj.weight"
DAMAGE = {  # what is done to a folder, by what the line says
    "is damaged": lambda f: (f / "model.safetensors").write_bytes(bytes(5000)),
    "holds no weights": lambda f: (f / "model.safetensors").unlink(),
    "config.json is missing": lambda f: (f / "config.json").unlink(),
    "config.json: it is no JSON": lambda f: (f / "config.json").write_text("{"),
    "holds no JSON object": lambda f: (f / "config.json").write_text("[]"),
    f"llama-3 lacks tensor {GATE}": lambda f: edit(f, lambda tensors: tensors.pop(GATE)),
    "model.safetensors has tensor odd, which the model would not read": put("odd", torch.ones(2)),
    f"model.safetensors: tensor {GATE} has shape (95, 64); the config says (96, 64)": put(
        GATE, torch.ones(95, 64)
    ),
    f"model.safetensors: tensor {GATE} is torch.int8": put(GATE, torch.ones(96, 64).char()),
    "has tensor model.layers.2.": lambda f: edit_config(f, num_hidden_layers=2),
    "lacks tensor model.layers.3": lambda f: edit_config(f, num_hidden_layers=4),
    "must give a file's name for every tensor": index_of(3),
    f"model.safetensors both hold tensor {GATE}": stale_shard,
    "holds no state_dict of plain tensors": already_quantized,
    "holds more than weights": lambda f: pickled(f, {"a": Harmful()}),
    "pytorch_model.bin": old_pickle,
    "holds no state_dict": lambda f: pickled(f, [1, 2]),
    "holds no weights; looked for": only(),
    "no config.json or params.json": only(pickle=b""),
    "pth is damaged": only("config.json", b"PK\x03\x04 cut"),
    "model.pth is damaged": only("config.json", b""),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_one_clear_line(tmp_path, monkeypatch, message):
    monkeypatch.chdir(tmp_path)
    folder, _ = saved("llama-3", tmp_path)
    DAMAGE[message](folder)
    assert message in refusal(CheckpointError, load_model, str(folder))
    assert not (tmp_path / "HARM").exists()


def test_ranks_of_different_models(tmp_path):
    folder, whole, _ = meta_folder(tmp_path)
    torch.save(whole, folder / "consolidated.00.pth")
    torch.save({n: t[:8].clone() for n, t in whole.items()}, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match="consolidated.01.pth: tensor .* has shape"):
        load_model(str(folder))


def test_an_index_of_files_that_are_gone(tmp_path):
    """As where a whole file was uploaded in the place of parts."""
    folder, theirs = saved("llama-3", tmp_path)
    names = load_file(folder / "model.safetensors")
    part = "model-00001-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, part)}))
    assert_same(load_model(str(folder)), theirs)
    (folder / part).write_bytes((folder / "model.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, part) | {"x": "gone"}}))
    with pytest.raises(CheckpointError, match="gone, which is not there"):
        load_model(str(folder))


@pytest.mark.parametrize("adapter", [False, True])
def test_names_without_a_prefix_and_an_adapter_beside(adapter, tmp_path):
    folder, theirs = saved("qwen-3", tmp_path)
    edit_config(folder, tie_word_embeddings=True)
    theirs.lm_head.weight = theirs.model.embed_tokens.weight
    with rewritten(folder) as tensors:
        for name in [*tensors]:
            value = tensors.pop(name)
            if not name.startswith("lm_head"):
                tensors[name.removeprefix("model.")] = value
    if adapter:
        save_file({"base_model.lora_A.weight": torch.ones(1)}, folder / "adapter_model.safetensors")
    assert_same(load_model(str(folder)), theirs)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_without_the_original_length_takes_the_models(key, tmp_path):
    folder, _ = saved("llama-3", tmp_path)
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    edit_config(folder, rope_parameters=None)
    edit_config(folder, **{key: rope})
    assert_same(load_model(str(folder)), read_by_transformers(folder))
