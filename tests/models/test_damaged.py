"""Damaged checkpoints: one line each that names the file, the key, and what is accepted."""

import json
import operator
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantbench.errors import CheckpointError, QuantbenchError
from quantbench.models.hugging_face import from_hugging_face
from quantbench.models.loading import load_config, load_model
from quantbench.models.tokenizer import load_tokenizer
from tests.models.hugging_face import LLAMA_3_1
from tests.models.refused import refusal
from tests.programs import ROOT, command, ran, worked

TINY = ROOT / "models" / "tiny"
CONFIG = json.loads((TINY / "config.json").read_text())
LLAMA_3 = LLAMA_3_1 | {"original_max_position_embeddings": 512}


@pytest.fixture
def copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(TINY, "mine", ignore=lambda *_: ["__pycache__"])
    return Path("mine")


WHOLE = ["256", 256.5, 0, -1, True, [5], 10**12]
ABOVE_0 = ["1e-5", float("nan"), -1, 0, True, [10000], 10**400]
TRUTHS = ["false", 2, [], 1, 0.0]
WRONG = {  # what each key does not accept
    "model_type": [7, ["llama"], {"a": 1}],
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ["linear", 7, [1, 2]]),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), TRUTHS),
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_key_value_heads"), WHOLE),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "head_dim"), [*WHOLE, 2**63]),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), ABOVE_0),
    "use_sliding_window": TRUTHS,
    "max_window_layers": ["3", -1, 2.5],
    "layer_types": [5, [{}], "full_attention"],
    "sliding_window": ["16", 1.5, True],
}
WRONG_ROPE = {
    "factor": ["8", 0, -8, 1e-300, 0.5, True, 10**400, None],
    "low_freq_factor": [0, "1"],
    "high_freq_factor": [1.0, -4],
    "original_max_position_embeddings": [512.5, "512"],
    "rope_type": [["llama3"], 3],
}
KINDS = {  # of models that have a key
    **dict.fromkeys(("use_sliding_window", "max_window_layers", "layer_types"), "qwen2"),
    "sliding_window": "mistral",
}


def test_a_config_of_wrong_types_names_file_and_key(copy):
    for key, values in (WRONG | WRONG_ROPE).items():
        kind = {"model_type": KINDS.get(key, "llama")}
        for value in values:
            changes = {key: value} if key in WRONG else {"rope_scaling": LLAMA_3 | {key: value}}
            (copy / "config.json").write_text(json.dumps(CONFIG | kind | changes))
            message = refusal(CheckpointError, load_config, "mine")
            assert "config.json" in message and key in message, (key, value)


def test_null_is_as_good_as_leaving_a_key_out():
    optional = ("tie_word_embeddings", "rope_scaling", "head_dim", "rope_theta", "rms_norm_eps")
    without = {key: value for key, value in CONFIG.items() if key not in optional}
    nulls = without | dict.fromkeys(optional)
    assert from_hugging_face(nulls, "x") == from_hugging_face(without, "x")


PARAMS = {"dim": 64, "n_layers": 2, "n_heads": 2, "norm_eps": 1e-5, "vocab_size": 100}


def test_params_json_of_wrong_types(tmp_path):
    torch.save({}, tmp_path / "consolidated.00.pth")
    for key, values in {
        **dict.fromkeys(("dim", "n_heads", "n_kv_heads", "multiple_of"), ["64", 0, 1.5]),
        "n_layers": [10**9, 0],
        "vocab_size": ["100", [1]],
        **dict.fromkeys(("ffn_dim_multiplier", "norm_eps", "rope_theta"), ["1", -1]),
        "use_scaled_rope": ["yes", 1],
        "moe": [{}],
    }.items():
        for value in values:
            (tmp_path / "params.json").write_text(json.dumps(PARAMS | {key: value}))
            message = refusal(CheckpointError, load_config, str(tmp_path))
            assert "params.json" in message and key in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_nested_too_deeply(copy, name):
    (copy / name).write_text("[" * 100_000)
    message = refusal(CheckpointError, lambda: (load_config("mine"), load_tokenizer(copy, 4096)))
    assert name in message and "nested too deeply" in message


# ---------------------------------------------------------------------------------- files


INPUTS = ["config.json", "tokenizer.model", "model.safetensors", "tokenizer_config.json"]


@pytest.mark.parametrize(
    "kind, says",
    [
        ("pipe", "not a regular file"),
        ("zero", "not a regular file"),
        ("folder", "Is a directory"),
        ("dangling", "is a link to 'nowhere', which does not exist"),
        ("loop", "leads back to itself"),
    ],
)
def test_an_input_that_is_no_regular_file_is_named(copy, kind, says):
    path = copy / random.choice(INPUTS)
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to({"zero": "/dev/zero", "dangling": "nowhere", "loop": path.name}[kind])
    message = refusal(CheckpointError, lambda: (load_model("mine"), load_tokenizer(copy, 4096)))
    assert path.name in message and says in message


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_a_folder_whose_name_is_not_utf8(copy, form):
    if form == "pickle":
        pickled(copy, lambda tensor: tensor)
    name = os.fsdecode(b"caf\xe9")
    copy.rename(name)
    message = refusal(CheckpointError, load_model, name)
    assert "is not UTF-8; rename its folder" in message and "damaged" not in message
    result = command("generate", "--checkpoint_path", name, "--device", "cpu")
    line = result.stderr.splitlines()[-1]
    assert result.exit_code == 1 and line.startswith("error: ") and "rename its folder" in line


# ---------------------------------------------------------------------------------- shards


def sharded(folder, weight_map):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "where, says",
    [
        *((path, "model.safetensors.index.json names") for path in
          ("../outside.safetensors", "absolute", "sub/../../x", "", "a\0b")),
        ("x" * 300, "File name too long"),
        ("part.safetensors", "'part.safetensors' holds tensor 'model.nothing.weight', which it"),
    ],
)  # fmt: skip
def test_an_index_that_names_what_is_not_there_or_outside(copy, where, says):
    shutil.copy(copy / "model.safetensors", "outside.safetensors")
    where = os.path.abspath("outside.safetensors") if where == "absolute" else where
    sharded(copy, {"model.nothing.weight": where})
    assert says in refusal(CheckpointError, load_model, "mine")


def test_an_index_of_files_in_a_folder_below_is_read(copy):
    names = load_file(copy / "model.safetensors")
    sharded(copy, dict.fromkeys(names, "below/part.safetensors"))
    (copy / "below").mkdir()
    (copy / "part.safetensors").rename(copy / "below" / "part.safetensors")
    assert load_model("mine").config.num_layers == 5


# ---------------------------------------------------------------------------------- pickles


def pickled(folder, changed):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({name: changed(tensor) for name, tensor in tensors.items()},
               folder / "pytorch_model.bin")  # fmt: skip


def test_column_major_weights_are_the_same_weights(copy):
    expected = load_model("tiny").state_dict()
    pickled(copy, lambda tensor: tensor.T.contiguous().T if tensor.ndim == 2 else tensor)
    model = load_model("mine")
    for name, tensor in model.state_dict().items():
        assert tensor.is_contiguous() and torch.equal(tensor, expected[name])


@pytest.mark.parametrize("form", [("to", "meta"), ("to_sparse",), ("to_sparse_csr",)])
def test_tensors_without_dense_values(copy, form):
    changed = operator.methodcaller(*form)
    pickled(copy, lambda tensor: changed(tensor.float()) if tensor.ndim == 2 else tensor)
    message = refusal(CheckpointError, load_model, "mine")
    assert "pytorch_model.bin" in message and "dense tensors are read" in message


# ---------------------------------------------------------------------------------- saved models

SAVE = "--quantization int8wo --num_layers 1 --num_samples 1 --device cpu --max_new_tokens 1"
SAVE = [*SAVE.split(), "--write_result", "none", "--save"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "mine"
    worked("generate", *SAVE, folder)
    return folder


GONE = object()
EDITED = [  # keys, a value, and what the line says
    ("files", GONE, "no files"),
    ("aliases", GONE, "no aliases"),
    ("how", GONE, "no how"),
    ("how/scheme", GONE, "no how.scheme"),
    ("how", ["int8wo"], "how is"),
    ("how/more", 1, "how.more is not understood"),
    ("how/scheme", 5, "how.scheme is 5"),
    ("how/scheme", "int9", "'int9' is no scheme"),
    ("how/precision", "int8", "how.precision is 'int8'"),
    ("how/precision", [1], "how.precision is [1]"),
    ("how/layers", 5, "how.layers is 5"),
    ("how/layers", {"output": ["int8wo"]}, "how.layers is"),
    ("how/layers", {"__import__('os')": ["int8wo", "cpu"]}, "how.layers is"),
    ("how/layers", {"output": ["int8wo", "__import__('os')"]}, "how.layers is"),
    ("how/layers", {"output": ["__import__('os')", "cpu"]}, "__import__"),
    ("files", [1], "files is [1]"),
    ("files", {}, "files is {}"),
    ("files", ["../x.safetensors"], "names '../x.safetensors', which is not inside"),
    ("files", ["x" * 300], "File name too long"),
    ("files", ["gone.safetensors"], "names gone.safetensors, which is not there"),
    ("files", [], "lacks tensor tok_embeddings.weight"),
    ("how/scheme", "uintx-5-64", "save the model again"),
    ("aliases", [1], "aliases is [1]"),
    ("aliases", {"output.weight.q": 1}, "aliases is"),
    ("architecture", 5, "architecture is 5"),
    ("architecture/rope_scaling", "8", "rope_scaling is '8'"),
    ("architecture/rope_scaling", {"factor": 0}, "factor is 0"),
    ("architecture/tie_embeddings", "false", "tie_embeddings is 'false'"),
    ("architecture", {}, "its architecture is damaged"),
    ("version", "one", "of version 'one'"),
    ("aliases", {"output.weight.scale": "nothing"}, "'nothing', which is no embedding"),
]


def test_a_quantbench_json_that_was_edited(saved, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(saved, folder)
    file = folder / "quantbench.json"
    original = file.read_text()
    given = ("generate", "--checkpoint_path", folder, "--device", "cpu", "--write_result", "none")
    for keys, value, says in EDITED:
        inner = content = json.loads(original)
        *path, last = keys.split("/")
        for key in path:
            inner = inner[key]
        inner[last] = value
        if value is GONE:
            del inner[last]
        file.write_text(json.dumps(content))
        result = command(*given)
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert says in line and "report it" not in line
        assert "quantbench.json" in line or "save the model again" in line
        assert result.exit_code == 1


def test_a_save_that_the_disk_is_too_small_for_can_be_repeated(tmp_path):
    # The disk ends within the tokenizer, within the weights, or within the weights' last bytes.
    kibibytes, exists = random.choice([(1, False), (97, True), (976, False)])
    folder = tmp_path / "mine"
    if exists:
        folder.mkdir()
    limited = ("bash", "-c", f'ulimit -f {kibibytes}; "$@"', "bash", sys.executable, "generate.py")
    done = ran(*limited, *SAVE, folder)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: --save ") and "report it" not in last
    assert folder.exists() == exists and not any(folder.glob("*"))


def test_a_save_that_was_killed_is_no_checkpoint(saved, tmp_path):
    """tests/run/test_hostile_save.py repeats it."""
    folder = tmp_path / "mine"
    shutil.copytree(saved, folder)
    (folder / "quantbench.json").rename(folder / "quantbench.json.unfinished")
    with pytest.raises(QuantbenchError, match="its --save did not finish; save it again"):
        load_config(str(folder))
    (folder / "quantbench.json.unfinished").unlink()
    (folder / "notes.txt").write_text("mine")
    again = command("generate", *SAVE, folder)
    assert again.exit_code == 1 and "the folder is not empty" in again.stderr
    assert (folder / "notes.txt").read_text() == "mine"
