"""A quantized model kept on disk is the same model; what is not that model is not taken for it."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from quantbench import generate
from quantbench.log.config import RunConfig
from quantbench.models.formats import EMBEDDED, saver
from quantbench.models.llama import weight_bytes
from quantbench.quantize.spec import SHOWN
from quantbench.run import loading, saved_model
from quantbench.run.plan import make_plan
from tests.models.small import small_checkpoint

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENS = torch.arange(3, 20)[None]


@pytest.fixture
def arm(tmp_path):
    """Load a small model as an arm does, keeping it: its logits, and what is recorded of it."""
    checkpoint = small_checkpoint(tmp_path)

    def load(folder=tmp_path / "arms" / "1", said=None, **options):
        own = {"checkpoint_path": checkpoint, "device": "cpu", "num_layers": 1} | options
        plan = make_plan(RunConfig(**own))
        said = [] if said is None else said
        loaded = saved_model.load(plan, folder, lambda done, total: None, said.append)
        decoder = generate.make_generator(plan, loaded.model).decoder
        with torch.no_grad():
            logits = loaded.model(TOKENS)
        of_model = loaded.kernels, decoder.name, decoder.reason, weight_bytes(loaded.model)
        return logits, (*of_model, plan.name, plan.prompt)

    return load


@pytest.fixture
def reads(monkeypatch):
    """True for each load that read the kept model, False for one that read the checkpoint."""
    seen = []

    def spy(*arguments, saved=None, **others):
        seen.append(saved is not None)
        return loading.load(*arguments, saved=saved, **others)

    monkeypatch.setattr(saved_model, "load_anew", spy)
    return seen


@pytest.mark.parametrize("scheme", [*SHOWN, "autoquant"])
def test_read_back_it_is_the_same_model(arm, reads, scheme):
    logits, first = arm(quantization=scheme)
    again, second = arm(quantization=scheme)
    assert torch.equal(logits, again) and first == second
    assert reads == ([False, False] if scheme == "none" else [False, True])


@pytest.mark.parametrize(
    "changes", [{"quantization": "fp6"}, {"precision": "float32"}, {"num_layers": 2}]
)
def test_what_was_kept_for_other_options_is_not_taken(arm, reads, changes):
    arm(quantization="int8wo")
    changed = {"quantization": "int8wo"} | changes
    assert torch.equal(arm(**changed)[0], arm(folder=None, **changed)[0])
    assert reads == [False, False, False]


def test_another_checkpoint_or_version_is_not_taken(arm, reads, tmp_path, monkeypatch):
    arm(quantization="int8wo")
    small_checkpoint(tmp_path, rope_theta=77.0)
    arm(quantization="int8wo")
    versions = saved_model.versions()
    monkeypatch.setattr(saved_model, "versions", lambda: versions | {"torchao": "0.0"})
    arm(quantization="int8wo")
    monkeypatch.setattr(saved_model, "CODE", saved_model.CODE[:1])
    arm(quantization="int8wo")
    assert reads == [False] * 4


def test_weights_that_changed_are_read_anew(arm, reads, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(EMBEDDED, checkpoint)
    options = {"checkpoint_path": str(checkpoint), "quantization": "int8wo"}
    arm(**options)
    arm(**options)
    weights = checkpoint / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    arm(**options)
    assert reads == [False, True, False]


def shard(folder):
    return min(folder.glob("*.safetensors"))


DAMAGES = {
    "cut short": lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-1]),
    "a lost file": lambda folder: shard(folder).unlink(),
    "no description": lambda folder: (folder / "quantbench.json").write_text("{"),
    "no facts": lambda folder: (folder / saved_model.FACTS).write_text('{"facts": 3}'),
    "never finished": lambda folder: (folder / saved_model.FACTS).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_written_anew_in_silence(arm, reads, tmp_path, damage):
    said = []
    logits, first = arm(said=said, quantization="int8wo")
    DAMAGES[damage](tmp_path / "arms" / "1")
    for _ in range(2):
        again, second = arm(said=said, quantization="int8wo")
        assert torch.equal(logits, again) and first == second
    assert reads == [False, False, True] and not said


def test_a_full_disk_only_costs_time(arm, reads, tmp_path, monkeypatch):
    expected, first = arm(folder=None, quantization="int8wo")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "save_file", full)
    said = []
    for _ in range(2):
        logits, again = arm(said=said, quantization="int8wo")
        assert torch.equal(expected, logits) and first == again
    assert len(said) == 2 and all("not kept" in line and "No space left" in line for line in said)
    assert not any(reads)


def test_a_disk_that_would_be_full_is_left_alone(arm, reads, tmp_path, monkeypatch):
    free = SimpleNamespace(free=saved_model.RESERVE)
    monkeypatch.setattr(saved_model.shutil, "disk_usage", lambda folder: free)
    said = []
    arm(said=said, quantization="int8wo")
    assert len(said) == 1 and "2.0 GB free" in said[0]
    assert not list((tmp_path / "arms").rglob("*.safetensors"))


def test_keeping_it_takes_no_memory(arm, monkeypatch):
    """What waits to be written is never more than a layer, so that the peak is generate.py's."""
    waiting = []
    add = saver.Saver.add

    def watched(self, name, module):
        add(self, name, module)
        waiting.append(sum(map(saver.stored_bytes, self.pending.values())))

    monkeypatch.setattr(saver.Saver, "add", watched)
    arm(quantization="int8wo", num_layers=2)
    assert waiting and max(waiting) < saved_model.SHARD_BYTES
