"""Checkpoints of the Hugging Face hub, through its own client, from a server of this machine."""

import shutil

import pytest
from huggingface_hub import constants

from quantbench.errors import CheckpointError
from quantbench.models.formats import EMBEDDED, hub, open_checkpoint
from quantbench.models.loading import load_config, load_model
from tests.models import hugging_face
from tests.models.hub_server import serving
from tests.models.test_checkpoint import assert_same, pickled, saved
from tests.models.test_gguf import tokenizer_of_tiny, written
from tests.programs import worked


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """Starts a hub of these folders, whose cache is empty."""
    hubs = []

    def start(**folders):
        named = {name.replace("__", "/"): folder for name, folder in folders.items()}
        server = serving(named)
        hubs.append(server)
        started = server.__enter__()
        monkeypatch.setattr(constants, "ENDPOINT", started.url)
        place = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub._entry.cache_clear()
        return started

    yield start
    for server in hubs:
        server.__exit__(None, None, None)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A repository of GGUF files, as people publish them: names in several spellings, one in parts
    in a folder of its own, and what is no model."""
    folder, made = tmp_path_factory.mktemp("gguf"), hugging_face.model("llama-2", vocab_size=4096)
    (folder / "Q8_0").mkdir()
    tokens = tokenizer_of_tiny()
    written(folder / "Small-Q4_0.gguf", made, "llama", "Q4_0", tokens)
    written(folder / "Small-UD-Q4_K_XL.gguf", made, "llama", "Q4_0", tokens)
    written(folder / "small.f16.gguf", made, "llama", "F16", tokens)
    written(
        folder / "Q8_0" / "Small-Q8_0.gguf", made, "llama", "Q8_0", tokens, split_max_tensors=20
    )
    (folder / "mmproj-Small-F16.gguf").write_bytes(b"GGUF of pictures")
    (folder / "README.md").write_text("about")
    return folder


QUANTIZATIONS = ("Q4_0", "UD-Q4_K_XL", "Q8_0", "f16")  # of that repository


@pytest.mark.parametrize("as_pickle", [False, True])
def test_a_folder_is_downloaded_and_named_by_its_id(tmp_path, on_hub, as_pickle):
    published, theirs = saved("llama-3", tmp_path)
    (published / "consolidated.safetensors").write_bytes(b"the same weights, under other names")
    if as_pickle:
        pickled(published, theirs.state_dict())
    server = on_hub(org__Small=published)
    assert load_config("org/Small").num_layers == 3
    assert not any(name.endswith((".safetensors", ".bin")) for name in server.sent)
    assert_same(load_model("org/Small"), theirs)
    assert open_checkpoint("org/Small").name == "Small"
    assert (
        len(server.sent) == len(set(server.sent)) and "consolidated.safetensors" not in server.sent
    )


def test_a_revision_is_another_folder(tmp_path, on_hub):
    first, theirs = saved("llama-3", tmp_path / "first")
    other, _ = saved("llama-2", tmp_path / "other")
    on_hub(org__Small=other, **{"org__Small@v1.0": first})
    assert_same(load_model("org/Small@v1.0"), theirs)
    assert open_checkpoint("org/Small@v1.0").name == "Small@v1.0"
    with pytest.raises(CheckpointError, match="has no revision v2"):
        open_checkpoint("org/Small@v2")


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("Q4_0", ["Small-Q4_0.gguf"]),
        ("ud-q4_k_xl", ["Small-UD-Q4_K_XL.gguf"]),
        ("F16", ["small.f16.gguf"]),
        ("Small-Q4_0", ["Small-Q4_0.gguf"]),
        ("Q8_0", [f"Q8_0/Small-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]),
    ],
)
def test_one_quantization_is_downloaded_with_all_its_parts(quantized, on_hub, asked, taken):
    server = on_hub(**{"org__Small-GGUF": quantized})
    checkpoint = open_checkpoint(f"org/Small-GGUF:{asked}")
    assert sorted(server.sent) == taken and len(checkpoint.files) == len(taken)
    assert checkpoint.name == f"Small-GGUF:{asked}" and checkpoint.config().num_layers == 3


def test_which_quantization_has_to_be_said(quantized, on_hub, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(quantized / "Small-Q4_0.gguf", alone)
    on_hub(**{"org__Small-GGUF": quantized, "org__One-GGUF": alone, "org__Other": tmp_path})
    named = r"it holds Q4_0 \(.* MB\), UD-Q4_K_XL \(.*\), Q8_0 \(.*\), f16 \(.*\); name one, as "
    with pytest.raises(CheckpointError, match=rf"org/Small-GGUF: {named}org/Small-GGUF:Q4_0"):
        open_checkpoint("org/Small-GGUF")
    with pytest.raises(CheckpointError, match=f"there is no Q5_K_M; {named}"):
        open_checkpoint("org/Small-GGUF:Q5_K_M")
    assert open_checkpoint("org/One-GGUF").name == "One-GGUF"  # there is no other


def test_a_repository_s_quantizations_and_their_bytes(quantized, on_hub):
    server = on_hub(**{"org__Small-GGUF": quantized})
    sizes = hub.published("org/Small-GGUF")
    parts = [file.stat().st_size for file in (quantized / "Q8_0").iterdir()]
    assert sizes["org/Small-GGUF:Q8_0"] == sum(parts) and len(parts) == 2
    assert sizes.keys() == {f"org/Small-GGUF:{name}" for name in QUANTIZATIONS}
    assert not server.sent


def test_the_cache_serves_without_a_network(quantized, on_hub, monkeypatch):
    on_hub(**{"org__Small-GGUF": quantized})
    open_checkpoint("org/Small-GGUF:Q4_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._entry.cache_clear()
    assert open_checkpoint("org/Small-GGUF:Q4_0").config().num_layers == 3
    with pytest.raises(CheckpointError, match="there is no Q8_0; it holds Q4_0"):
        open_checkpoint("org/Small-GGUF:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    hub._entry.cache_clear()
    assert open_checkpoint("org/Small-GGUF:Q4_0").config().num_layers == 3
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        open_checkpoint("org/Another")


def test_what_the_hub_does_not_give_is_said_in_one_line(quantized, on_hub, monkeypatch):
    server = on_hub(**{"org__Small-GGUF": quantized, "org__Gated": EMBEDDED, "org__Tiny": EMBEDDED})
    server.gated.add("org/Gated")
    for name, why, ask in (
        ("org/Gated", "licence has to be accepted on the hub", open_checkpoint),
        ("org/Nothing", "the hub has no such model", open_checkpoint),
        ("org/Tiny:Q4_0", "has no GGUF file", open_checkpoint),
        ("org/Small-GGUF:All", "recommend compares all; it holds Q4_0", open_checkpoint),
        ("org/Tiny", "has no GGUF file", hub.published),
        ("a.gguf", "give a hub id", hub.published),
        ("org/Small-GGUF:Q4_0", "give a hub id", hub.published),
    ):
        with pytest.raises(CheckpointError, match=why):
            ask(name)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(CheckpointError, match=r"to download, and .* has 0.00 MB free; make room"):
        open_checkpoint("org/Small-GGUF:Q4_0")


def test_the_log_keeps_the_id(quantized, on_hub, tmp_path):
    on_hub(**{"org__Small-GGUF": quantized})
    log = tmp_path / "benchmarks.txt"
    given = ("--checkpoint_path", "org/Small-GGUF:Q4_0", "--write_result", log)
    worked("generate", *given, "--num_samples", 1, "--max_new_tokens", 4)
    line = log.read_text()
    assert ", mod: Small-GGUF:Q4_0, " in line
    assert "--checkpoint_path org/Small-GGUF:Q4_0" in line
    worked("log", "check", log)
